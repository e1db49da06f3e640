"""Static scales for formats with one scale per row: all rows of a tensor are cast with one calibrated range of values.

    range   stored as the scale of the slot: fp32 [], the amax of the tensor; for a quantizer with zero points fp32 [2], the
            largest value and minus the smallest value
    cast    the cast of the quantizer `inner`, with this range for every row; formats and GEMMs are the same as for `inner`

A cast does not read x to compute an amax, and ranks need no agreement. For per-tensor FP8 use `dlp.quant.fp8.static`.
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
    """Quantizer that casts by `inner`, with the static range of the slot in place of the observed amax of every row.

    Raises ValueError for an `inner` that does not have one scale per row (`fits`).
    """

    def __post_init__(self) -> None:
        if not fits(self.inner):
            raise ValueError(
                f"a static scale needs a quantizer with one scale per row; got {self.inner}: use such a quantizer"
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
    """Return whether a quantizer has one scale per row, so that a static range can replace the observed amaxes."""
    return isinstance(quantizer, RowwiseScaling | IntScaling) and quantizer.reduces == (1,)


def has_zero_points(quantizer: Quantizer) -> bool:
    """Return whether a quantizer has zero points, so that its static range consists of two numbers."""
    return isinstance(quantizer, IntScaling) and not quantizer.symmetric


def reach_of(quantizer: Quantizer, low: Tensor, high: Tensor) -> Tensor:
    """Return the static range of `quantizer` for a tensor with smallest value `low` and largest value `high`, both fp32 [].

    The range is fp32 [2] for a quantizer with zero points, else fp32 []; see the top of this file."""
    reach = torch.stack([high, -low]).clamp(min=0)
    return reach if has_zero_points(quantizer) else reach.amax(0)
