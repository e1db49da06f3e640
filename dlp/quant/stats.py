"""Measured: a quantizer that records how well each cast went.

    amax         largest |x|
    scale_inv    largest multiplier back
    underflow    share of the elements other than 0 that became 0
    saturation   share of them beyond the largest value that their scale can hold
    sqnr_db      10 log10(sum x^2 / sum (x - decoded)^2)

`measured(recipe, ...)` wraps all quantizers of a recipe; the bits they make stay the same. Of what is only calibrated there is
the amax alone. Numbers are summed on the
device, over all casts of a tensor in a step, into two tensors that are read once a step. scale_inv and saturation are
read off two codes of a format, its `landmarks`; a format without them lacks these numbers.
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
    """Numbers by name: `sums` fp64 [names, SUMS] and `maxima` fp32 [names, MAXIMA]. Casts count while `recording` is set;
    `close` ends a step and keeps its numbers as `last`."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = {name: row for row, name in enumerate(names)}
        self.sums = torch.zeros(len(names), len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(names), len(MAXIMA), device=device)
        self.last = self.sums, self.maxima
        self.recording = True

    def record(self, name: str, x: Tensor, quantized: QuantizedTensor, always: bool = False) -> None:
        """One cast of x [rows, contraction]. `always`: whether or not casts count now."""
        if self.recording or always:
            sums, maxima = _measure(x.detach().float(), quantized)
            row = self.names[name]
            self.sums[row] += sums
            self.maxima[row] = torch.maximum(self.maxima[row], maxima)

    def close(self) -> None:
        self.last = self.sums.clone(), self.maxima.clone()
        self.sums.zero_()
        self.maxima.zero_()
        self.recording = True


def _measure(x: Tensor, quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """The SUMS and MAXIMA of one cast."""
    decoded, nonzero, unknown = quantized.dequantize(), x != 0, x.new_tensor(math.nan)
    saturated, scale = unknown, unknown
    if quantized.format.landmarks is not None:
        one, largest = (_all_codes(quantized, code) for code in quantized.format.landmarks)
        saturated, scale = (x.abs() > largest).sum(), one.amax()
    noise = (x.double() - decoded.double()).square().sum()
    sums = (nonzero.sum(), (nonzero & (decoded == 0)).sum(), saturated, x.double().square().sum(), noise)
    return torch.stack([number.double() for number in sums]), torch.stack([x.abs().amax(), scale])


def _all_codes(quantized: QuantizedTensor, code: int) -> Tensor:
    """The values if every code were this one: what the scales are, or what they can hold."""
    payload = torch.full_like(quantized.payload.view(torch.uint8), code).view(quantized.payload.dtype)
    return QuantizedTensor(quantized.format, (payload, *quantized.parts[1:])).dequantize()


@dataclass(frozen=True)
class Measured(Wrapped):
    """`inner`, whose casts are recorded in `table` under `name`; equal to another one of an equal `inner`."""

    name: str = field(compare=False)
    table: StatsTable = field(compare=False)

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        quantized = self.inner.cast(x, amax, **more)
        self.table.record(self.name, self.values(x), quantized)
        return quantized


def names_of(layer: str) -> list[str]:
    """All names that the tensors of a layer can have, under any recipe."""
    return [f"{layer}.{operand}{suffix}" for operand in OPERANDS for suffix in ("", ".rowwise", ".columnwise")]


def measured(recipe: Recipe, layer: str, table: StatsTable) -> Recipe:
    """The recipe with all its quantizers measured, as LAYER.x, or LAYER.x.rowwise and LAYER.x.columnwise where these are
    two casts."""

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
    """The inverse of `measured`."""

    def unwrap(quantizer: Quantizer) -> Quantizer:
        return quantizer.inner if isinstance(quantizer, Measured) else quantizer

    operands = (getattr(recipe, name) for name in OPERANDS)
    x, w, dy = (Operand(unwrap(operand.rowwise), unwrap(operand.columnwise)) for operand in operands)
    return replace(recipe, x=x, w=w, dy=dy)


def summary(sums: Tensor, maxima: Tensor) -> dict[str, float | None]:
    """The numbers of one tensor in one step, from its rows of the table; None where they cannot be known."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    nonzero = max(total["nonzero"], 1.0)
    found = dict(zip(MAXIMA, maxima.tolist(), strict=True)) | {
        "underflow": total["underflow"] / nonzero,
        "saturation": total["saturated"] / nonzero,
        "sqnr_db": 10 * math.log10(total["signal"] / total["noise"]) if total["noise"] else math.inf,
    }
    return {key: number if math.isfinite(number) else None for key, number in found.items()}
