"""Per-tensor FP8: one fp32 scale per tensor, so that the codes may be transposed, and gathered in either orientation.

Current scaling computes the scale from the amax of the tensor, which needs a read of the tensor before the cast. Delayed
scaling computes the scale from the amaxes of earlier steps; the cast also computes the amax of this step in the same read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8_codes import ELEMENTS, Fp8Codes, codes_and
from dlp.quant.quantizer import (
    Amaxes,
    Operands,
    Origin,
    Origins,
    Quantizer,
    QuantizerCaps,
    ScaleSlot,
    SlotOptions,
    Wanted,
    outs_of,
    wanted_parts,
)
from dlp.quant.tensor import SHARED, Format, Part, QuantizedTensor, Shape

Fp8Format = Literal["HYBRID", "E4M3"]
FP8_FORMATS = {"HYBRID": ("e4m3", "e5m2"), "E4M3": ("e4m3", "e4m3")}  # element types of x and w, and of dy


@dataclass(frozen=True)
class Fp8Tensor(Fp8Codes):
    """Format of FP8 codes [rows, contraction] with one fp32 `scale_inv` []."""

    KIND = "fp8_tensor"
    PARTS = codes_and(Part("scale_inv", torch.float32, SHARED, SHARED))
    transposable = True
    gemm_kind = "fp8_tensor"
    factors = "tensor"
    block = (0, 0)

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return shape, ()

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale_inv = q.parts
        return (ops.decode_fp8(codes) * scale_inv).to(dtype)

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        codes, scale_inv = q.parts
        return codes.to(torch.bfloat16), scale_inv

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        codes, scale_inv = q.parts
        return QuantizedTensor(self, (ops.transpose_codes(codes), scale_inv))


FORMATS = {element: Fp8Tensor(element) for element in ELEMENTS}


class _TensorScaling:
    """Base of quantizers with one scale per tensor: from the amax of the tensor if `needs_amax`, else the delayed scale of a
    slot."""

    element: str
    power_of_two: bool = False
    epsilon: float = 0.0
    needs_amax: ClassVar[bool]
    reduces: ClassVar[tuple[int, ...]] = (0, 1)

    @cached_property
    def format(self) -> Format:
        return FORMATS[self.element]

    def _source(self, amax: Tensor | None, slot: ScaleSlot | None) -> ops.Fp8Scale:
        """Return the `Fp8Scale` of a cast: the amax if `needs_amax`, else the scale of the slot. In the second case the cast
        also writes max(slot.staging, max |x|) to `slot.staging`."""
        if self.needs_amax:
            assert amax is not None, "current scaling casts with an observed amax"
            return ops.Fp8Scale(amax, None, None, self.power_of_two, self.epsilon)
        assert slot is not None, "delayed scaling casts with the scale of a slot"
        return ops.Fp8Scale(None, slot.scale, slot.staging)

    def observe(self, x: Tensor) -> Tensor | None:
        return ops.amax(x) if self.needs_amax else None

    def observe_both(self, x: Tensor, columnwise: Quantizer) -> Amaxes:
        amax = ops.amax(x) if self.needs_amax else None
        return amax, amax

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        source, given = self._source(amax, slot), None if out is None else out.parts
        parts = ops.cast_fp8_tensor(x, ELEMENTS[self.element], source, out=given, flag=flag)
        return QuantizedTensor(self.format, tuple(parts)) if out is None else self.format.fill(out, *parts)

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Quantizer, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        source = self._source(amaxes[0], slot)
        row, col = ops.cast_fp8_tensor_both(x, ELEMENTS[self.element], source, outs=outs_of(outs), flag=flag)
        return QuantizedTensor(self.format, tuple(row)), QuantizedTensor(self.format, tuple(col))

    def both_grads(
        self, grads: ops.GatedGrads, amaxes: Sequence[Amaxes], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> list[Operands]:
        sources = [self._source(amax, slot) for (amax, _), slot in zip(amaxes, slots, strict=True)]
        made = ops.cast_gate_grads_fp8_tensor(grads, ELEMENTS[self.element], sources, flags)
        return [(self.format.wrap(row), self.format.wrap(col)) for row, col in made]


@dataclass(frozen=True)
class CurrentScaling(_TensorScaling):
    """Quantizer with one scale per tensor, from the agreed amax of the tensor: code = fp8(x * scale), with an fp32 product.

    element        "e4m3" or "e5m2"
    power_of_two   round the scale down to a power of two
    epsilon        smallest amax; a smaller amax is replaced by epsilon
    """

    element: str = "e4m3"
    power_of_two: bool = False
    epsilon: float = 0.0
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_fp8_tensor", native=True)
    needs_amax = True

    def observe_grads(self, grads: ops.GatedGrads) -> tuple[Amaxes, Amaxes]:
        of_gate, of_up = ops.amax_gate_grads(grads)
        return (of_gate, of_gate), (of_up, of_up)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        source = ops.Fp8Scale(power_of_two=self.power_of_two, epsilon=self.epsilon)
        return ops.cast_fp8_tensor_batch(xs, wanted_parts(outs), [source] * len(xs), flags)


@dataclass(frozen=True)
class DelayedScaling(_TensorScaling):
    """Quantizer with one delayed scale per tensor: code = fp8(x * slot.scale), with an fp32 product. The cast writes
    max(slot.staging, max |x|) to `slot.staging`.

    Ranks need no agreement before a cast, because all ranks of the amax group have the same scale. `element`: "e4m3" or "e5m2".
    `margin`, `amax_history_len`, `amax_compute_algo`: see `SlotOptions`.
    """

    element: str = "e4m3"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    needs_amax = False

    def __post_init__(self) -> None:
        _ = self.caps  # raises ValueError for wrong options at construction

    @cached_property
    def caps(self) -> QuantizerCaps:
        fp8_max = ops.FP8_MAX[ELEMENTS[self.element]]
        slot = SlotOptions(fp8_max, self.margin, self.amax_history_len, self.amax_compute_algo)
        return replace(CurrentScaling.caps, slot=slot)

    def observe_grads(self, grads: ops.GatedGrads) -> tuple[Amaxes, Amaxes]:
        return (None, None), (None, None)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_fp8_tensor_batch(xs, wanted_parts(outs), [self._source(None, slot) for slot in slots], flags)


def unchanged(window: Tensor) -> Tensor:
    """Return zero amaxes. Static scales have this function as `amax_compute_algo`, because an amax of 0 does not change the
    scale."""
    return torch.zeros_like(window[0])


def static(element: str = "e4m3") -> DelayedScaling:
    """Return a quantizer with one static scale per tensor: the caller sets the scale of the slot once, and no update changes
    it."""
    return DelayedScaling(element, amax_history_len=1, amax_compute_algo=unchanged)
