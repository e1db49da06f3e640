"""Static scales of rows: casts with one calibrated range per tensor, in place of the range that each cast observes.

    slot    fp32 [], the amax of the tensor; for a quantizer with zero points fp32 [2], the largest value and minus the smallest
    cast    the cast of `inner`, in which every row has this range, so that formats and GEMMs are those of `inner`

No cast reads x for an amax, and no ranks agree. The static scale of per-tensor FP8 is `dlp.quant.fp8.static`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.kernels.launches import by_torch
from dlp.quant.fp8 import unchanged
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.integers import IntScaling
from dlp.quant.quantizer import Quantizer, QuantizerCaps, ScaleSlot, SlotOptions, Wrapped, caps_of
from dlp.quant.tensor import QuantizedTensor


def _filled(value: Tensor, *, out: Tensor) -> None:
    out.copy_(value)


@dataclass(frozen=True)
class StaticScaling(Wrapped):
    """Quantizer that casts by `inner`, with the static range in the slot for every row.

    Raises ValueError for a quantizer without one scale per row (`fits`).
    """

    def __post_init__(self) -> None:
        if not fits(self.inner):
            raise ValueError(
                f"a static scale is one per tensor, and {self.inner} scales blocks: use a quantizer with one scale per row"
            )

    @cached_property
    def caps(self) -> QuantizerCaps:
        slot = SlotOptions(1.0, 0, 1, unchanged, 1 + has_zero_points(self.inner))
        return replace(caps_of(self.inner), slot=slot)

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        **how: Any,
    ) -> QuantizedTensor:  # fmt: skip
        assert slot is not None, "a static cast reads the range in a slot"
        reach = slot.scale
        rows = torch.empty(*reach.shape, x.shape[0], device=x.device)
        return self.inner.cast(x, by_torch(_filled, rows, reach[..., None]), out=out, **how)


def fits(quantizer: Quantizer) -> bool:
    """Return whether a quantizer scales rows by amaxes that a static range can replace."""
    return isinstance(quantizer, RowwiseScaling | IntScaling) and quantizer.reduces == (1,)


def has_zero_points(quantizer: Quantizer) -> bool:
    """Return whether a quantizer casts from the smallest and the largest value, to codes with a zero point."""
    return isinstance(quantizer, IntScaling) and not quantizer.symmetric


def reach_of(quantizer: Quantizer, low: Tensor, high: Tensor) -> Tensor:
    """Return the range of a tensor with values from `low` to `high`, fp32 [], as the slot of a static cast by `quantizer`."""
    reach = torch.stack([high, -low]).clamp(min=0)
    return reach if has_zero_points(quantizer) else reach.amax(0)
