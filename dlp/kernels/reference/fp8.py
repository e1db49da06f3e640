"""FP8: amaxes, blocks, scales, E4M3 (max 448, no Inf) and E5M2 (max 57344), casts, delayed scales, and sums over ranks.

An amax starts at 0, ignores NaN and preserves Inf. Edge blocks may be partial: missing elements count as 0. A cast saturates
and never returns Inf. torch's conversion rounds to nearest even, but depending on version and format does not saturate, and
preserves the sign of NaN: the code clamps before and corrects NaN after the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels.canonical import tree

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FLT_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000  # exponent bits of a binary32

Block = tuple[int, int]
Parts = Sequence[Tensor]
Outs = tuple[Parts, Parts] | None  # parts of x and of x.t()
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


def amax_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return max |x| of every row [rows] and of every column [C], fp32."""
    return amax(x, 1), amax(x, 0)


def watched(x: Tensor, flag: Tensor | None) -> Tensor:
    """Return x, and set `flag`, fp32 [], to NaN if a value of x is not finite."""
    if flag is not None and x.numel():
        least, most = torch.aminmax(x.detach())  # NaN if x has a NaN; adding 0 * NaN or 0 * Inf gives NaN
        flag.add_(least, alpha=0).add_(most, alpha=0)
    return x


def into(out: Parts | None, parts: Parts) -> Parts:
    """Copy the parts of an operand to `out` and return `out`; without `out`, return the parts."""
    if out is None:
        return parts
    torch._foreach_copy_(list(out), list(parts))
    return out


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

    An amax below `epsilon` counts as `epsilon`. If the amax is then 0, Inf or NaN, the scale is 1. If the quotient overflows,
    the scale is `inf_scale`. `power_of_two` clears the mantissa, which rounds the scale down to a power of two.
    """
    clamped = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = torch.isfinite(clamped) & (clamped > 0)
    scale = torch.full_like(amax, fp8_max) / torch.where(usable, clamped, torch.ones_like(clamped))
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, inf_scale), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))


def encode_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP8 codes of fp32 values, rounded to nearest even. Inf and large values saturate, NaN gives 0x7F for either sign,
    and zeros preserve their sign."""
    largest = FP8_MAX[dtype]
    codes = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    not_nan_sign = (codes & 0x7F).add_(1).bitwise_and_(0x80).bitwise_not_()  # only NaN (0x7F, 0xFF) carries into bit 7
    return codes.bitwise_and_(not_nan_sign).view(dtype)


@lru_cache(maxsize=8)
def _decode_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


def decode_fp8(codes: Tensor) -> Tensor:
    """Return the exact fp32 values of FP8 codes, by a table, which is faster than torch's conversion on a CPU."""
    table = _decode_table(codes.dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def cast_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous codes `encode(fl(x * scale))` of x [rows, C] in any float dtype and a broadcastable fp32 scale."""
    return encode_fp8(widen(x) * scale, dtype)


class Fp8Scale(NamedTuple):
    """Source of the scale of a tensor: `scale_from_amax` of `amax`, fp32 [], or the given `scale`, fp32 []. If `staging`,
    fp32 [], is given, a cast raises `staging` to max |x|."""

    amax: Tensor | None = None
    scale: Tensor | None = None
    staging: Tensor | None = None
    power_of_two: bool = False
    epsilon: float = 0.0


def cast_fp8_tensor(
    x: Tensor, dtype: torch.dtype, source: Fp8Scale, *, out: Parts | None = None, flag: Tensor | None = None
) -> Parts:
    """Return codes [rows, C] of `dtype` and fp32 scale_inv [] of x [rows, C]; `source`: amax or scale."""
    if (source.amax is None) == (source.scale is None):
        raise ValueError("a per-tensor cast takes the scale from amax or from scale: pass exactly one of the two")
    scale = source.scale
    if source.amax is not None:
        scale = scale_from_amax(source.amax, FP8_MAX[dtype], power_of_two=source.power_of_two, epsilon=source.epsilon)
    assert scale is not None
    if source.staging is not None:
        source.staging.copy_(torch.maximum(source.staging, amax(x)))
    return into(out, (cast_fp8(watched(x, flag), scale, dtype), scale.reciprocal()))


def cast_fp8_tensor_both(
    x: Tensor, dtype: torch.dtype, source: Fp8Scale, *, outs: Outs = None, flag: Tensor | None = None
) -> tuple[Parts, Parts]:
    """Return `cast_fp8_tensor` of x and of x.t(); both scale_inv share memory, except in given outputs."""
    codes, scale_inv = cast_fp8_tensor(x, dtype, source, flag=flag)
    row, col = outs or (None, None)
    return into(row, (codes, scale_inv)), into(col, (codes.t().contiguous(), scale_inv))


def cast_fp8_rowwise(
    x: Tensor, amax: Tensor, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """Return codes [rows, C] of `dtype` and fp32 scale_inv [rows] of x [rows, C], by the amaxes of the rows."""
    scale = scale_from_amax(amax, FP8_MAX[dtype], power_of_two=power_of_two, epsilon=epsilon)
    return into(out, (cast_fp8(watched(x, flag), scale[:, None], dtype), scale.reciprocal()))


def cast_fp8_rowwise_both(
    x: Tensor, amaxes: tuple[Tensor, Tensor], dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    outs: Outs = None, flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """Return `cast_fp8_rowwise` of x and of x.t(), by the amaxes of the rows and of the columns of x."""
    row, col = outs or (None, None)
    cast = partial(cast_fp8_rowwise, dtype=dtype, power_of_two=power_of_two, epsilon=epsilon)
    return cast(x, amaxes[0], out=row, flag=flag), cast(x.t(), amaxes[1], out=col)


def cast_fp8_block(
    x: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """Return codes [rows, C] of `dtype` and fp32 scale_inv [row blocks, C blocks] of x [rows, C]; edge blocks may be partial.

    If the quotient max/amax overflows, the scale is the largest finite value of the dtype of x, or of fp32 for fp64.
    """
    wide = to_blocks(widen(watched(x, flag)), block)
    scale = scale_from_amax(
        amax_of_blocks(wide), FP8_MAX[dtype], power_of_two=power_of_two, epsilon=epsilon,
        inf_scale=min(torch.finfo(x.dtype).max, FLT_MAX),
    )  # fmt: skip
    codes = encode_fp8(wide * spread(scale), dtype)
    return into(out, (from_blocks(codes, (x.shape[0], x.shape[1])), scale.reciprocal()))


def cast_fp8_block_both(
    x: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    outs: Outs = None, flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """Return `cast_fp8_block` of x and of x.t()."""
    row, col = outs or (None, None)
    cast = partial(cast_fp8_block, block=block, dtype=dtype, power_of_two=power_of_two, epsilon=epsilon)
    return cast(x, out=row, flag=flag), cast(x.t(), out=col)


def decode_fp8_block(codes: Tensor, scale_inv: Tensor, block: Block) -> Tensor:
    """Return fp32 values [rows, C] of codes [rows, C] with fp32 scale_inv [row blocks, C blocks]."""
    wide = to_blocks(decode_fp8(codes), block)
    return from_blocks(wide * spread(scale_inv), (codes.shape[0], codes.shape[1]))


def _largest(window: Tensor) -> Tensor:
    return amax(window, 0)


def _newest(window: Tensor) -> Tensor:
    return window[-1]


AMAX_ALGORITHMS: dict[str, AmaxAlgorithm] = {"max": _largest, "most_recent": _newest}


def delayed_scale(window: Tensor, scale: Tensor, target: Tensor, algorithm: str | AmaxAlgorithm) -> Tensor:
    """Return the new scale [n] from the amaxes `window`, fp32 [L, n], oldest first: target / amax, where `algorithm` chooses
    the amax of each slot; the old `scale` for an amax of 0, Inf or NaN.

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
    """Return the new history and scale after one step, for n delayed scales (slots), from history fp32 [L, n] and scale [n].

    history[0] is the staging row, and history[1:] are amaxes from the oldest to the newest. `reduced` [n] is the staging row
    after the all-reduce; where it is 0, history[0] is the amax of this step. `target` [n] is fl(fp8_max * 2^-margin), the value
    to which the scale maps the amax. The window of `algorithm` (`delayed_scale`) has L rows, with the amax of this step last. A
    slot with amax 0 was not used in this step: history and scale of the slot do not change.
    """
    last = torch.where(reduced != 0, reduced, history[0])
    used = last != 0
    window = torch.cat([history[1:], last[None]])
    rolled = torch.cat([torch.zeros_like(last)[None], window[1:]])
    new = delayed_scale(window, scale, target, algorithm)
    return torch.where(used, rolled, history), torch.where(used, new, scale)


def sum_in_order(
    contributions: Tensor, dtype: torch.dtype | None = None, own: tuple[int, Tensor] | None = None, divisor: int = 1,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the fp32 sum [...] of contributions [R, ...] in order, divided by `divisor` and rounded once to `dtype`, by
    default the dtype of the contributions.

    own   index of a contribution that is stored elsewhere, and that contribution
    out   contiguous memory for the result
    """
    first, *others = with_own(contributions, own)
    total = first.float()
    for contribution in others:
        total = total + contribution
    total = (total / divisor).to(dtype or contributions.dtype)
    return total if out is None else out.copy_(total)


def sum_by_tree(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum [...] of a power-of-two number of fp32 parts [P, ...] by a binary tree of neighbours, rounded once to
    `dtype`."""
    return tree(parts.unbind()).to(dtype)


def with_own(contributions: Tensor, own: tuple[int, Tensor] | None) -> list[Tensor]:
    """Return the contributions of a tensor [R, ...] as a list, with `own` in place of the contribution of the same index."""
    each = list(contributions)
    if own is not None:
        each[own[0]] = own[1]
    return each
