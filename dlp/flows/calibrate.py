"""calibrate: compute static scales of x and y from a few batches.

    with dlp.calibrate(model, "**", observer="max"):
        for batch in batches:
            model(batch)
    dlp.freeze(model, "**", "fp8_current", mode="static")

The implementation uses the table of delayed scaling (`SlotTable`), one table for x and one for y. Each layer has a slot. A hook
records the amax of the layer in the slot; after every forward of the model, all ranks agree on the amaxes and append them to
the histories of the slots. The history of a layer that did not run stays unchanged. On exit `observer` computes one amax for
each slot from the histories, and the scale follows from this amax. With the observer "mse", hooks record the best clipping
threshold (`best_clip`) as the amax. The observer "minmax" has two slots for each layer, one for the largest value and one for
minus the smallest value. The results of the model do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.transport import agree
from dlp.kernels import ops
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model.survey import container_lengths
from dlp.quant.patterns import must_match
from dlp.quant.quantizer import SlotOptions
from dlp.quant.state import SlotTable
from dlp.quant.tensor import HighPrecision, QuantizedTensor

BATCHES = 1024  # number of batches in a history; the amaxes of older batches are dropped
E4M3 = torch.float8_e4m3fn
CLIPS = 20  # number of fractions 1 - i / 40 of the amax, from 1 down to 0.525, that the observer "mse" tries


def average(window: Tensor) -> Tensor:
    """Return the mean of the recorded amaxes of each slot: fp32 [batches, slots] -> [slots]. Entries of 0 are not counted: they
    are rows of the history that the slot has not filled, because the layer ran in fewer batches."""
    return window.sum(0) / (window > 0).sum(0).clamp(min=1)


def _of_batches(observer: Callable[[Tensor], Tensor], names: Sequence[str], window: Tensor) -> Tensor:
    """Call an observer function on the rows of `window` [batches, slots] that have an amax above 0, and return its result, one
    amax for each layer in `names`; zeros if there is no such row. Raises ValueError for a result of another shape. Also raises
    ValueError if the result for a layer with an amax above 0 is not a finite number above 0, unless a recorded amax is itself
    not finite."""
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
    """Return the clipping threshold, fp32 [], with which a cast of x to E4M3 has the smallest mean square error, among `CLIPS`
    fractions of the amax of x. The cast clips magnitudes above the threshold."""
    values, amax = x.float(), ops.amax(x).float()
    top = ops.FP8_MAX[E4M3]
    losses, clips = [], [1 - i / (2 * CLIPS) for i in range(CLIPS)]
    for clip in clips:
        scale = top / (amax * clip).clamp(min=torch.finfo(torch.float32).tiny)
        cast = (values * scale).clamp(-top, top).to(E4M3).float() / scale
        losses.append((cast - values).square().mean())
    best = torch.stack(losses).argmin()
    return amax * torch.tensor(clips, device=x.device)[best]


OBSERVERS: dict[str, Any] = {"max": "max", "minmax": "max", "average": average, "mse": "max"}
TENSORS = ("x", "y")


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value and minus the smallest value of x, each fp32 []; zeros for an x without elements."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32), x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return high.float(), -low.float()


class _Observed:
    """The amaxes of x or y of the observed layers, in a `SlotTable`.

    tensor      "x" or "y"
    names       names of the observed layers
    ran         names of the layers that ran
    algorithm   computes amaxes [slots] from the history [batches, slots]: "max" or a function
    look        computes the numbers to record from a tensor: one number, or two for "minmax"
    ends        suffixes of the slot names of a layer: ("",), or ("high", "low") for "minmax"
    table       a slot for each layer and suffix
    """

    def __init__(
        self, tensor: str, names: Sequence[str], observer: str | Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self.tensor, self.ran, self.names = tensor, set[str](), list(names)
        self.algorithm = partial(_of_batches, observer, self.names) if callable(observer) else OBSERVERS[observer]
        self.look = _ends if observer == "minmax" else best_clip if observer == "mse" else ops.amax
        self.ends = ("high", "low") if observer == "minmax" else ("",)
        options = SlotOptions(ops.FP8_MAX[E4M3], 0, 1 + BATCHES, "max")  # 1 more row than batches: row 0 is always 0
        self.table = SlotTable({f"{name}{end}": options for end in self.ends for name in names}, device)

    def record(self, name: str, x: Tensor) -> None:
        """Record the numbers that `look` computes from x [M, K] or y [M, N] of a layer. Each recorded number is the maximum
        since the last `close`, and at least 0; Inf if x or y has Inf or NaN."""
        self.ran.add(name)
        found, finite = self.look(x), x.isfinite().all()  # a separate check: `ops.amax` ignores NaN
        for end, number in zip(self.ends, found if isinstance(found, tuple) else (found,), strict=True):
            staging = self.table.slot(f"{name}{end}").staging
            staging.copy_(torch.maximum(staging, torch.where(finite, number.float(), torch.inf)))

    def close(self) -> None:
        """End a forward of the model: append the maxima of the recorded numbers over all ranks to the history. All ranks
        call `close`."""
        world: ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
        shared = world is not None and world.size() > 1
        table = self.table
        table.update(agree([table.staging], world)[0] if shared and world is not None else table.staging)

    def check(self, pattern: str) -> None:
        """Raise ValueError for a layer whose scale cannot be computed: x or y was not finite or always 0, or the layer did not
        run."""
        slots = self.table.state_dict()
        for name in self.names:
            histories = torch.stack([slots[f"{name}{end}"]["history"] for end in self.ends])
            if not histories.isfinite().all():
                raise ValueError(f"calibrate: {self.tensor} of {name} was not finite in a batch: leave this batch out")
            if not histories.any():
                did = "received" if self.tensor == "x" else "returned"
                raise ValueError(
                    f"calibrate: {name} {did} only zeros or no tokens, from which no scale can be computed: calibrate "
                    f"with other batches"
                    if name in self.ran
                    else f"calibrate: {name} did not run: call the model inside dlp.calibrate, not compiled (compiled code "
                    f"skips hooks), or leave the layer out of {pattern!r}"
                )

    def buffers(self, name: str) -> dict[str, Tensor]:
        """Return the buffers of a layer by name: `x_scale`, fp32 [], the multiplier of a cast to E4M3; and `x_range`, fp32 [2],
        the smallest and the largest value ("minmax"), or minus and plus the amax; for y, `y_scale` and `y_range`."""
        found = [self._amaxes[self.table.index(f"{name}{end}")] for end in self.ends]
        high, negated_low = found[0], found[-1]
        scale = ops.scale_from_amax(torch.maximum(high, negated_low), ops.FP8_MAX[E4M3])
        return {f"{self.tensor}_scale": scale, f"{self.tensor}_range": torch.stack([-negated_low, high])}

    @cached_property
    def _amaxes(self) -> Tensor:
        """The amaxes that the observer computes from the last `BATCHES` batches, fp32 [slots]. Read this property only after
        the last batch."""
        slots = self.table.state_dict()
        window = torch.stack([slots[name]["history"][1:] for name in self.table.names], 1)
        found: Tensor = window.amax(0) if self.algorithm == "max" else self.algorithm(window)
        return found.detach().float()  # an observer function may return another dtype


@contextmanager
def calibrate(
    model: nn.Module, pattern: str = "**", observer: str | Callable[[Tensor], Tensor] = "max",
    tensors: Sequence[str] = ("x",),
) -> Iterator[dict[str, nn.Module]]:  # fmt: skip
    """Context manager: record amaxes of the inputs x, the outputs y, or both, of linears, and store static scales on exit.

    On exit each observed linear gets, for an observed x, the buffers `x_scale`, the multiplier of a cast to E4M3, and
    `x_range`, the smallest and the largest value ("minmax") or minus and plus the amax; for an observed y, `y_scale` and
    `y_range`. The buffers are equal on all ranks.

    Args:
        model: model with linears, converted or plain.
        pattern: pattern of module names.
        observer: how the amax is computed from the last 1024 batches. "max": largest amax; "minmax": smallest and largest
            value, for casts with zero points; "average": mean of the amaxes of the batches; "mse": for each batch the amax
            that minimizes the mean square error of a cast to E4M3, then the largest of these; or a function that takes
            amaxes [batches, layers] and returns one amax per layer [layers]. A column has the amaxes of the batches in which
            this layer ran, oldest first, after zeros if the layer ran in fewer batches than other layers.
        tensors: "x", "y" or both: observe inputs, outputs or both. `dlp.freeze` in static mode reads the scales of y if the
            recipe quantizes y.

    Yields:
        The observed linears by name.

    Raises:
        ValueError: for an unknown observer or tensor, an invalid result of an observer function, a pattern that matches no
            linear, a layer that did not run, and a layer whose x or y was not finite or only 0.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> with dlp.calibrate(model):
        ...     y = model(torch.randn(16, 64))
        >>> model[0].x_scale.shape
        torch.Size([])
    """
    if not callable(observer) and observer not in OBSERVERS:
        raise ValueError(f"observer must be one of {', '.join(OBSERVERS)} or a function of amaxes; got {observer!r}")
    if not tensors or isinstance(tensors, str) or set(tensors) - set(TENSORS):
        raise ValueError(f'tensors must be a sequence of "x", "y" or both, such as ("x",); got {tensors!r}')
    every = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | ParallelLinear)}
    lengths = container_lengths(model.named_modules())
    chosen = must_match(list(every), lengths, pattern, getattr(model, "base_model_prefix", ""), asked_by="calibrate")
    linears = {name: every[name] for name in chosen}
    device = next(next(iter(linears.values())).parameters()).device
    observed = {tensor: _Observed(tensor, list(linears), observer, device) for tensor in tensors}
    hooks = []
    for name, module in linears.items():
        if "x" in observed:
            records = _records_x(partial(observed["x"].record, name))
            hooks.append(module.register_forward_pre_hook(records, with_kwargs=True))
        if "y" in observed:
            hooks.append(module.register_forward_hook(_records_y(partial(observed["y"].record, name))))
    hooks.append(model.register_forward_hook(lambda *_: _close(observed)))
    try:
        yield dict(linears)
        _close(observed)  # for layers that were called outside of a forward of the model
    finally:
        for hook in hooks:
            hook.remove()
    for each in observed.values():
        each.check(pattern)
    buffers = [
        (name, *buffer) for name in linears for each in observed.values() for buffer in each.buffers(name).items()
    ]
    for name, buffer, value in buffers:  # after all are computed, since an observer function may raise
        linears[name].register_buffer(buffer, value, persistent=False)


def _records_x(record: Callable[[Tensor], None]) -> Callable[..., None]:
    """Return a forward pre-hook that passes x [M, K] of a linear to `record` and, for a converted layer with statistics, to the
    statistics."""

    @torch.no_grad()
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = _rows((*inputs, *named.values())[0])
        core = module.core if isinstance(module, ParallelLinear) else None
        if core is not None and core.stats is not None:
            core.stats.record(f"{core.spec.members[0]}.x", x, QuantizedTensor(HighPrecision(), (x,)), always=True)
        record(x)

    return hook


def _records_y(record: Callable[[Tensor], None]) -> Callable[..., None]:
    """Return a forward hook that passes y [M, N] of a linear to `record`."""

    @torch.no_grad()
    def hook(module: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
        ys = y[0] if isinstance(module, ParallelLinear) and module.core.bias_apart else y
        for each in ys if isinstance(ys, tuple) else (ys,):  # all siblings of one module: they share a scale of y
            record(_rows(each))

    return hook


def _rows(x: Tensor) -> Tensor:
    """Return x or y [..., C] as a detached matrix [M, C]."""
    x = x.detach()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@torch.no_grad()
def _close(observed: Mapping[str, _Observed]) -> None:
    """End a forward of the model. All ranks call this function."""
    for each in observed.values():
        each.close()
