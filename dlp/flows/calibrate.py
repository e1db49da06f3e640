"""calibrate: scales of activations from a few batches, for static casts.

    with dlp.calibrate(model, "**", observer="max"):
        for batch in batches:
            model(batch)
    dlp.freeze(model, "**", "fp8_current", mode="static")

The table of delayed scaling is the observer: each layer has a slot, whose staged amax enters a history after every forward of
the model, once the ranks that share scales have agreed on the amax. `observer` computes the scale from the history, as
`amax_compute_algo` does for delayed scaling. The model itself runs unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.transport import agree
from dlp.flows.frozen import SCALE
from dlp.kernels import ops
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model.survey import container_lengths
from dlp.quant.patterns import must_match
from dlp.quant.quantizer import ScaleSlot, SlotOptions
from dlp.quant.state import SlotTable
from dlp.quant.tensor import HighPrecision, QuantizedTensor

BATCHES = 1024  # maximum number of remembered batches
E4M3 = torch.float8_e4m3fn
CLIPS = 20  # fractions of the amax that `mse` tries, from 1 to 1/2


def average(window: Tensor) -> Tensor:
    """Mean amax over batches: fp32 [batches, slots] -> [slots]."""
    return window.sum(0) / (window > 0).sum(0).clamp(min=1)


def _of_batches(observer: Callable[[Tensor], Tensor], names: Sequence[str], window: Tensor) -> Tensor:
    """Return the amaxes that a user's function computes from the amaxes of all batches. Raises ValueError unless there
    is one per layer."""
    seen = window > 0
    if not seen.any():
        return window.amax(0)
    found = observer(window[seen.any(1)])
    if found.shape != window.shape[1:]:
        raise ValueError(
            f"calibrate: the observer returned {list(found.shape)}, and must return one amax per layer, {[len(names)]}"
        )
    for name, amax, there in zip(names, found.tolist(), seen.any(0).tolist(), strict=True):
        if there and not 0 < amax < math.inf and window.isfinite().all():
            raise ValueError(
                f"calibrate: the observer found an amax of {amax:g} for {name}: expected a finite number above 0"
            )
    return found


def best_clip(x: Tensor) -> Tensor:
    """The amax, fp32 [], at which casting x to E4M3 has the smallest mean square error."""
    values, amax = x.float(), ops.amax(x).float()
    top = ops.FP8_MAX[E4M3]
    losses, clips = [], [1 - i / (2 * CLIPS) for i in range(CLIPS)]
    for clip in clips:
        scale = top / (amax * clip).clamp(min=torch.finfo(torch.float32).tiny)
        cast = (values * scale).clamp(-top, top).to(E4M3).float() / scale
        losses.append((cast - values).square().mean())
    best = torch.stack(losses).argmin()
    return amax * torch.tensor(clips, device=x.device)[best]


OBSERVERS: dict[str, Any] = {"max": "max", "average": average, "mse": "max"}


@contextmanager
def calibrate(
    model: nn.Module, pattern: str = "**", observer: str | Callable[[Tensor], Tensor] = "max"
) -> Iterator[dict[str, nn.Module]]:
    """Observe x of linears during forwards, and store static scales afterwards. A context manager.

    On exit each observed linear gets a buffer `x_scale`, an fp32 scalar that is equal on all ranks.

    Args:
        model: model with linears, converted or plain.
        pattern: pattern of module names.
        observer: "max": largest amax of all batches; "average": mean of the amaxes; "mse": largest of the amaxes that minimize
            the error of each batch; or a function of the amaxes [batches, layers], oldest first, that returns [layers].

    Yields:
        The observed linears by name.

    Raises:
        ValueError: for an unknown observer, an observer without result for a layer, a pattern that matches no linear, and a
            layer that did not run, or whose x was not finite or zero.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> with dlp.calibrate(model):
        ...     y = model(torch.randn(16, 64))
        >>> model[0].x_scale.shape
        torch.Size([])
    """
    if not callable(observer) and observer not in OBSERVERS:
        raise ValueError(f"observer must be one of {', '.join(OBSERVERS)} or a function of amaxes; got {observer!r}")
    every = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | ParallelLinear)}
    lengths = container_lengths(model.named_modules())
    chosen = must_match(list(every), lengths, pattern, getattr(model, "base_model_prefix", ""), asked_by="calibrate")
    linears = {name: every[name] for name in chosen}
    algorithm = partial(_of_batches, observer, list(linears)) if callable(observer) else OBSERVERS[observer]
    device = next(next(iter(linears.values())).parameters()).device
    table = SlotTable({name: SlotOptions(ops.FP8_MAX[E4M3], 0, BATCHES, algorithm) for name in linears}, device)
    ran: set[str] = set()
    look = best_clip if observer == "mse" else ops.amax
    hooks = [
        module.register_forward_pre_hook(_records(table.slot(name), look, partial(ran.add, name)), with_kwargs=True)
        for name, module in linears.items()
    ]
    hooks.append(model.register_forward_hook(lambda *_: _close(table)))
    try:
        yield dict(linears)
        _close(table)  # of layers that ran outside of a forward of the model
    finally:
        for hook in hooks:
            hook.remove()
    for name, slot in table.state_dict().items():
        if not slot["history"].isfinite().all():
            raise ValueError(f"calibrate: x of {name} was not finite in a batch: leave this batch out")
        if not slot["history"].any():
            raise ValueError(
                f"calibrate: {name} received only zeros or no tokens, from which no scale can be computed: calibrate "
                f"with other batches"
                if name in ran
                else f"calibrate: {name} did not run: call the model inside, not compiled (compiled code skips hooks), or "
                f"leave the layer out of {pattern!r}"
            )
    for name, module in linears.items():
        module.register_buffer(SCALE, table.slot(name).scale.clone(), persistent=False)


def _records(slot: ScaleSlot, amax: Callable[[Tensor], Tensor], runs: Callable[[], None]) -> Callable[..., None]:
    @torch.no_grad()
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        runs()
        x = _x_of((*inputs, *named.values()))
        core = module.core if isinstance(module, ParallelLinear) else None
        if core is not None and core.stats is not None:
            core.stats.record(f"{core.spec.members[0]}.x", x, QuantizedTensor(HighPrecision(), (x,)), always=True)
        found = torch.where(x.isfinite().all(), amax(x).float(), torch.inf)  # amax ignores NaN
        slot.staging.copy_(torch.maximum(slot.staging, found))

    return hook


def _x_of(inputs: tuple[Any, ...]) -> Tensor:
    """Return the x [M, K] of a call."""
    x: Tensor = inputs[0].detach()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@torch.no_grad()
def _close(table: SlotTable) -> None:
    """End a forward: append its amaxes to the histories. All ranks call it."""
    world: ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
    shared = world is not None and world.size() > 1
    table.update(agree([table.staging], world)[0] if shared and world is not None else table.staging)
