"""Base classes of formats with FP8 codes: `Fp8Codes`, and `Fp8Blocks` for formats with block scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from dlp.kernels import ops
from dlp.quant.tensor import Format, Part, QuantizedTensor

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LANDMARKS = {"e4m3": (0x38, 0x7E), "e5m2": (0x3C, 0x7B)}  # codes of 1 and of the largest value
PartsByElement = Mapping[str, tuple[Part, ...]]


def codes_and(scale: Part) -> PartsByElement:
    """Return the parts of a format for each element type: FP8 codes [rows, contraction], and the part `scale`."""
    return {element: (Part("codes", dtype, rows=0, contraction=1), scale) for element, dtype in ELEMENTS.items()}


@dataclass(frozen=True)
class Fp8Codes(Format):
    """Base of formats with FP8 codes [rows, contraction] and one tensor of scales.

    element   "e4m3" or "e5m2"
    KIND      beginning of the name of the format; defined by the subclass
    PARTS     element type -> parts; defined by the subclass, with `codes_and`
    """

    element: str = "e4m3"
    KIND: ClassVar[str]
    PARTS: ClassVar[PartsByElement]

    @property
    def name(self) -> str:
        return f"{self.KIND}[{self.element}]"

    @cached_property  # cached, because it is read for every operand
    def parts(self) -> tuple[Part, ...]:
        return self.PARTS[self.element]

    @property
    def landmarks(self) -> tuple[int, int]:
        return LANDMARKS[self.element]


@dataclass(frozen=True)
class Fp8Blocks(Fp8Codes):
    """Base of formats with one scale per 1 x SIZE block, or with `tile` per SIZE x SIZE tile.

    With `tile`, codes and scales may be transposed. Otherwise the columnwise operand is quantized from the high-precision
    tensor a second time.
    """

    tile: bool = False
    SIZE: ClassVar[int]

    @property
    def name(self) -> str:
        return f"{self.KIND}[{self.element}, {self.block[0]}x{self.block[1]}]"

    @cached_property
    def block(self) -> tuple[int, int]:
        return (self.SIZE if self.tile else 1), self.SIZE

    @property
    def transposable(self) -> bool:
        return self.tile

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        if not self.tile:
            return super().transpose(q)
        codes, scale = q.parts
        return QuantizedTensor(self, (ops.transpose_codes(codes), scale.t().contiguous()))
