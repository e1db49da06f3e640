"""Base classes of formats with FP8 codes, `Fp8Codes` and for block scales `Fp8Blocks`, and of quantizers with block scales,
`Fp8BlockScaling`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.quantizer import Amaxes, Operands, Origin, Origins, Quantizer, ScaleSlot, outs_of
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


class Fp8BlockScaling:
    """Base of quantizers with one scale per block, from the amax of the block. Ranks need no agreement.

    CASTS      (operation that casts a matrix, operation that casts a matrix in both orientations); defined by the subclass
    _options   keywords of both operations; defined by the subclass
    """

    element: str
    reduces: ClassVar[tuple[int, ...]] = ()
    CASTS: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]

    @cached_property
    def format(self) -> Format:
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        raise NotImplementedError

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def observe_both(self, x: Tensor, columnwise: Quantizer) -> Amaxes:
        return None, None

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        self.format.check((x.shape[0], x.shape[1]))
        given = None if out is None else out.parts
        return self.format.fill(out, *self._made(self.CASTS[0], x, out=given, flag=flag))

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Quantizer, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        for shape in (x.shape, x.shape[::-1]):
            self.format.check((shape[0], shape[1]))
        row, col = self._made(self.CASTS[1], x, outs=outs_of(outs), flag=flag)
        return self.format.wrap(row), self.format.wrap(col)

    def _made(self, op: Callable[..., Any], x: Tensor | ops.GatedGrads, **into: Any) -> Any:
        return op(x, self.format.block, ELEMENTS[self.element], **self._options(), **into)
