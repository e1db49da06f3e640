"""Per-tensor FP8: one fp32 scale per tensor, so that the payload may be transposed and gathered in either orientation.

Current scaling computes the scale from the amax of the tensor, which needs a read of the tensor before the cast. Delayed
scaling computes the scale from the amaxes of earlier steps, and records the amax of this step in the read of the cast.
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
    parts_of,
    parts_of_both,
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


@dataclass(frozen=True)
class CurrentScaling:
    """Quantizer with one scale per tensor, from the agreed amax of the tensor: q = enc(fl(x * scale))."""

    element: str = "e4m3"
    power_of_two: bool = False
    epsilon: float = 0.0
    reduces: ClassVar[tuple[int, ...]] = (0, 1)
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_fp8_tensor", native=True)

    @cached_property
    def format(self) -> Format:
        return FORMATS[self.element]

    def observe(self, x: Tensor) -> Tensor | None:
        return ops.amax(x)

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        made = ops.cast_fp8_tensor(x, ELEMENTS[self.element], self._scale(amax), out=parts_of(out), flag=flag)
        return self.format.fill(out, *made)

    def observe_both(self, x: Tensor, columnwise: Quantizer) -> Amaxes:
        amax = ops.amax(x)
        return amax, amax

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Quantizer, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        source, given = self._scale(amaxes[0]), parts_of_both(outs)
        row, col = ops.cast_fp8_tensor_both(x, ELEMENTS[self.element], source, outs=given, flag=flag)
        return self.format.wrap(row), self.format.wrap(col)

    def observe_grads(self, grads: ops.GatedGrads) -> tuple[Amaxes, Amaxes]:
        of_gate, of_up = ops.amax_gate_grads(grads)
        return (of_gate, of_gate), (of_up, of_up)

    def both_grads(
        self, grads: ops.GatedGrads, amaxes: Sequence[Amaxes], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> list[Operands]:
        return _both_grads(self.format, grads, [self._scale(row) for row, _ in amaxes], flags)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        source = ops.Fp8Scale(power_of_two=self.power_of_two, epsilon=self.epsilon)
        return ops.cast_fp8_tensor_batch(xs, wanted_parts(outs), [source] * len(xs), flags)

    def _scale(self, amax: Tensor | None) -> ops.Fp8Scale:
        assert amax is not None, "current scaling casts with an observed amax"
        return ops.Fp8Scale(amax=amax, power_of_two=self.power_of_two, epsilon=self.epsilon)


@dataclass(frozen=True)
class DelayedScaling:
    """Quantizer with a delayed scale per tensor: q = enc(fl(x * slot.scale)); the cast raises slot.staging to max |x|.

    Ranks agree on nothing before the cast, because all ranks of the amax group have the same slots. `margin`,
    `amax_history_len` and `amax_compute_algo` are members of `SlotOptions`.
    """

    element: str = "e4m3"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    reduces: ClassVar[tuple[int, ...]] = (0, 1)

    def __post_init__(self) -> None:
        _ = self.caps  # raises for wrong options at construction

    @cached_property
    def format(self) -> Format:
        return FORMATS[self.element]

    @cached_property
    def caps(self) -> QuantizerCaps:
        fp8_max = ops.FP8_MAX[ELEMENTS[self.element]]
        slot = SlotOptions(fp8_max, self.margin, self.amax_history_len, self.amax_compute_algo)
        return replace(CurrentScaling.caps, slot=slot)

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        made = ops.cast_fp8_tensor(x, ELEMENTS[self.element], _slot_scale(slot), out=parts_of(out), flag=flag)
        return self.format.fill(out, *made)

    def observe_both(self, x: Tensor, columnwise: Quantizer) -> Amaxes:
        return None, None

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Quantizer, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        source, given = _slot_scale(slot), parts_of_both(outs)
        row, col = ops.cast_fp8_tensor_both(x, ELEMENTS[self.element], source, outs=given, flag=flag)
        return self.format.wrap(row), self.format.wrap(col)

    def observe_grads(self, grads: ops.GatedGrads) -> tuple[Amaxes, Amaxes]:
        return (None, None), (None, None)

    def both_grads(
        self, grads: ops.GatedGrads, amaxes: Sequence[Amaxes], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> list[Operands]:
        return _both_grads(self.format, grads, [_slot_scale(slot) for slot in slots], flags)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_fp8_tensor_batch(xs, wanted_parts(outs), [_slot_scale(slot) for slot in slots], flags)


def unchanged(window: Tensor) -> Tensor:
    """Return zero amaxes: the algorithm of a static scale, which no amax changes."""
    return torch.zeros_like(window[0])


def static(element: str = "e4m3") -> DelayedScaling:
    """Return a quantizer with one static scale per tensor, which is set once in the slot."""
    return DelayedScaling(element, amax_history_len=1, amax_compute_algo=unchanged)


def _slot_scale(slot: ScaleSlot | None) -> ops.Fp8Scale:
    """Return the scale of a slot; the cast raises the staging of the slot to max |x|."""
    assert slot is not None, "delayed scaling casts with the scale of a slot"
    return ops.Fp8Scale(scale=slot.scale, staging=slot.staging)


def _both_grads(
    fmt: Format, grads: ops.GatedGrads, sources: Sequence[ops.Fp8Scale], flags: ops.Flags
) -> list[Operands]:  # fmt: skip
    made = ops.cast_gate_grads_fp8_tensor(grads, ELEMENTS[fmt.element], sources, flags)
    return [(fmt.wrap(row), fmt.wrap(col)) for row, col in made]
