"""Statistics of casts, which the quantizer wrapper `Measured` records.

    amax         largest |x|
    scale_inv    largest scale_inv in the tensor
    underflow    share of nonzero elements whose decoded value is 0
    saturation   share of nonzero elements beyond the largest value that their scale can represent
    sqnr_db      10 log10(sum x^2 / sum (x - decoded)^2)

`measured(recipe, ...)` wraps the quantizers of x, w and dy; the codes do not change. Statistics are accumulated on the device
over all casts of a tensor in a step, in two tensors, which the host reads once per step. scale_inv and saturation are computed
from two codes of the format (`Format.landmarks`); for a format without these codes both are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dlp.quant.quantizer import Quantizer, Wrapped, caps_of
from dlp.quant.recipe import OPERANDS, Operand, Recipe
from dlp.quant.tensor import QuantizedTensor

SUMS = ("nonzero", "underflow", "saturated", "signal", "noise")
MAXIMA = ("amax", "scale_inv")


class StatsTable:
    """Table of the statistics of a step, with one row for each tensor name.

    sums        fp64 [names, SUMS]
    maxima      fp32 [names, MAXIMA]
    last        copies of `sums` and `maxima` at the end of the last step
    recording   whether `record` adds casts to the table
    in_step     whether casts were recorded since the last step boundary; the boundary itself casts weights for the next step
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = {name: row for row, name in enumerate(names)}
        self.sums = torch.zeros(len(names), len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(names), len(MAXIMA), device=device)
        self.last = self.sums, self.maxima
        self.recording, self.in_step = True, False

    def record(self, name: str, x: Tensor, quantized: QuantizedTensor, always: bool = False) -> None:
        """Add one cast of x [rows, contraction] to the row `name`, if `recording` or `always`."""
        if self.recording or always:
            self.in_step = True
            sums, maxima = _measure(x.detach().float(), quantized)
            row = self.names[name]
            self.sums[row] += sums
            self.maxima[row] = torch.maximum(self.maxima[row], maxima)

    def close(self) -> None:
        """End a step: store the statistics in `last`, zero the table, and set `recording` to True. A second boundary after the
        same passes, of a further optimizer or of `dlp.end_step`, leaves `last` and the table as they are."""
        self.recording = True
        if self.in_step:
            self.last = self.sums.clone(), self.maxima.clone()
            self.sums.zero_()
            self.maxima.zero_()


def _measure(x: Tensor, quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return the SUMS and the MAXIMA of one cast; unknown entries are NaN."""
    decoded, nonzero, unknown = quantized.dequantize(), x != 0, x.new_tensor(math.nan)
    saturated, scale = unknown, unknown
    if quantized.format.landmarks is not None:
        one, largest = (_all_codes(quantized, code) for code in quantized.format.landmarks)
        saturated, scale = (x.abs() > largest).sum(), one.amax()
    noise = (x.double() - decoded.double()).square().sum()
    sums = (nonzero.sum(), (nonzero & (decoded == 0)).sum(), saturated, x.double().square().sum(), noise)
    return torch.stack([number.double() for number in sums]), torch.stack([x.abs().amax(), scale])


def _all_codes(quantized: QuantizedTensor, code: int) -> Tensor:
    """Return the decoded values with every payload byte replaced by `code`. For the code of 1 these are the scales."""
    payload = torch.full_like(quantized.payload.view(torch.uint8), code).view(quantized.payload.dtype)
    return QuantizedTensor(quantized.format, (payload, *quantized.parts[1:])).dequantize()


@dataclass(frozen=True)
class Measured(Wrapped):
    """Quantizer that casts by `inner` and records the casts in the row `name` of `table`. Equality compares only `inner`."""

    name: str = field(compare=False)
    table: StatsTable = field(compare=False)

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        quantized = self.inner.cast(x, amax, **more)
        self.table.record(self.name, self.values(x), quantized)
        return quantized


def names_of(layer: str) -> list[str]:
    """Return all row names that a layer may have, whatever its recipe: LAYER.x, LAYER.x.rowwise, LAYER.x.columnwise, ..."""
    return [f"{layer}.{operand}{suffix}" for operand in OPERANDS for suffix in ("", ".rowwise", ".columnwise")]


def measured(recipe: Recipe, layer: str, table: StatsTable) -> Recipe:
    """Return the recipe with the quantizers of x, w and dy wrapped in `Measured`; operands in high precision are not wrapped.

    An operand that is cast once has the row LAYER.x; an operand that is cast separately for each orientation has the rows
    LAYER.x.rowwise and LAYER.x.columnwise."""

    def wrap(operand: str, orientation: str) -> Quantizer:
        quantizers: Operand = getattr(recipe, operand)
        quantizer: Quantizer = getattr(quantizers, orientation)
        name = f"{layer}.{operand}" + ("" if quantizers.derived else f".{orientation}")
        fmt = quantizer.format
        nothing = not fmt.parts or (fmt.keeps_source and caps_of(quantizer).slot is None)
        return quantizer if nothing else Measured(quantizer, name, table)

    x, w, dy = (Operand(wrap(operand, "rowwise"), wrap(operand, "columnwise")) for operand in OPERANDS)
    return replace(recipe, x=x, w=w, dy=dy)


def plain(recipe: Recipe) -> Recipe:
    """Return the recipe without `Measured`: the inverse of `measured`."""

    def unwrap(quantizer: Quantizer) -> Quantizer:
        return quantizer.inner if isinstance(quantizer, Measured) else quantizer

    return replace(recipe, **{name: getattr(recipe, name).mapped(unwrap) for name in OPERANDS})


def summary(sums: Tensor, maxima: Tensor) -> dict[str, float | None]:
    """Return the statistics of one tensor in one step by name, from its rows of `sums` and `maxima`; None for an unknown or
    infinite value."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    nonzero = max(total["nonzero"], 1.0)
    found = dict(zip(MAXIMA, maxima.tolist(), strict=True)) | {
        "underflow": total["underflow"] / nonzero,
        "saturation": total["saturated"] / nonzero,
        "sqnr_db": 10 * math.log10(total["signal"] / total["noise"]) if total["noise"] else math.inf,
    }
    return {key: number if math.isfinite(number) else None for key, number in found.items()}
