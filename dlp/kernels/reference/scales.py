"""Amaxes, blocks, the rule for FP8 scales, and the update of delayed scales.

An amax starts at 0, ignores NaN and preserves Inf. Edge blocks may be partial: missing elements count as 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000  # exponent bits of a binary32

Block = tuple[int, int]
AmaxAlgorithm = Callable[[Tensor], Tensor]


def widen(x: Tensor) -> Tensor:
    """Return x as contiguous fp32, detached. A transposed view is copied in its dtype first, which is faster."""
    return x.detach().contiguous().float()


def magnitude(x: Tensor) -> Tensor:
    """Return |x| in the dtype of x, with 0 for NaN."""
    return x.detach().abs().nan_to_num_(nan=0.0, posinf=float("inf"))


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return max |x| in fp32, of the whole tensor (shape []) or along `dim`; NaN is ignored, and an empty tensor gives 0."""
    size = list(x.shape)
    if x.numel() == 0:
        shape = [] if dim is None else size[: dim % x.dim()] + size[dim % x.dim() + 1 :]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    return (magnitude(x).amax() if dim is None else magnitude(x).amax(dim)).float()


def watched(x: Tensor, flag: Tensor | None) -> Tensor:
    """Return x, and set `flag`, fp32 [], to NaN if a value of x is not finite."""
    if flag is not None and x.numel():
        least, most = torch.aminmax(x.detach())  # NaN if x has a NaN; 0 times NaN or Inf is NaN
        flag.add_(least, alpha=0).add_(most, alpha=0)
    return x


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """Return x [rows, C] as [row blocks, block rows, C blocks, block columns]; edge blocks are zero-padded."""
    (rows, cols), (height, width) = x.shape, block
    if rows % height or cols % width:
        x = F.pad(x, (0, -cols % width, 0, -rows % height))
    return x.reshape(-(-rows // height), height, -(-cols // width), width)


def from_blocks(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a contiguous matrix [rows, C] of blocks: the inverse of `to_blocks`."""
    down, height, across, width = blocks.shape
    return blocks.reshape(down * height, across * width)[: shape[0], : shape[1]].contiguous()


def amax_of_blocks(blocks: Tensor) -> Tensor:
    """Return the amax of each block, fp32 [row blocks, C blocks], of the result of `to_blocks`."""
    return magnitude(blocks).amax((1, 3)).float()


def spread(scale: Tensor) -> Tensor:
    """Return scales of blocks [row blocks, C blocks] in a shape that broadcasts over the result of `to_blocks`."""
    return scale[:, None, :, None]


def scale_from_amax(
    amax: Tensor, fp8_max: float, *, power_of_two: bool = False, epsilon: float = 0.0, inf_scale: float = FLT_MAX
) -> Tensor:
    """Return the scale of an 8-bit format with the largest value `fp8_max`, fp32, elementwise over `amax`.

    An amax of 0, Inf or NaN gives 1. If the quotient overflows, the scale is `inf_scale`. `power_of_two` clears the mantissa,
    which rounds the scale down to a power of two.
    """
    clamped = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = torch.isfinite(clamped) & (clamped > 0)
    scale = torch.full_like(amax, fp8_max) / torch.where(usable, clamped, torch.ones_like(clamped))
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, inf_scale), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))


def _largest(window: Tensor) -> Tensor:
    return amax(window, 0)


def _newest(window: Tensor) -> Tensor:
    return window[-1]


AMAX_ALGORITHMS: dict[str, AmaxAlgorithm] = {"max": _largest, "most_recent": _newest}


def delayed_scale(window: Tensor, scale: Tensor, target: Tensor, algorithm: str | AmaxAlgorithm) -> Tensor:
    """Return the new scale [n] of amaxes fp32 [L, n], oldest first: target / amax, or `scale` for an amax of 0, Inf or NaN.

    `algorithm`: "max", "most_recent", or a function of the window that returns amaxes [n].
    """
    if len(window) == 0:
        return scale
    chosen = (AMAX_ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm)(window)
    usable = torch.isfinite(chosen) & (chosen > 0)
    new = (target / torch.where(usable, chosen, torch.ones_like(chosen))).clamp(max=FLT_MAX)
    return torch.where(usable, new, scale)


def delayed_update(
    history: Tensor, scale: Tensor, reduced: Tensor, target: Tensor, algorithm: str | AmaxAlgorithm
) -> tuple[Tensor, Tensor]:
    """Return the new history and scale after one step of delayed scaling of n slots, from history fp32 [L, n] and scale [n].

    history[0] is the staging row, and history[1:] are amaxes from the oldest to the newest. `reduced` [n] is the staging row
    after the all-reduce. `target` [n] is fl(fp8_max * 2^-margin), the value to which the scale maps the amax. The window of
    `algorithm` (`delayed_scale`) has L rows, with the amax of this step last. A slot with amax 0 was not used in this step:
    history and scale of the slot do not change.
    """
    last = torch.where(reduced != 0, reduced, history[0])
    used = last != 0
    window = torch.cat([history[1:], last[None]])
    rolled = torch.cat([torch.zeros_like(last)[None], window[1:]])
    new = delayed_scale(window, scale, target, algorithm)
    return torch.where(used, rolled, history), torch.where(used, new, scale)


def sum_in_order(
    contributions: Tensor, dtype: torch.dtype | None = None, own: tuple[int, Tensor] | None = None, divisor: int = 1
) -> Tensor:
    """Return the fp32 sum [...] of contributions [R, ...] in order, divided by `divisor` and rounded once to `dtype`, by
    default the dtype of the contributions. `own`: index of a contribution that is stored elsewhere, and that contribution."""
    first, *others = with_own(contributions, own)
    total = first.float()
    for contribution in others:
        total = total + contribution
    return (total / divisor).to(dtype or contributions.dtype)


def with_own(contributions: Tensor, own: tuple[int, Tensor] | None) -> list[Tensor]:
    """Return the contributions of a tensor [R, ...] as a list, with `own` in place of the contribution of the same index."""
    each = list(contributions)
    if own is not None:
        each[own[0]] = own[1]
    return each
