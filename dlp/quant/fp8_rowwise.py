"""Rowwise FP8: one fp32 scale per row of an operand [rows, contraction].

The columnwise operand is quantized from the high-precision tensor a second time. If the contraction is sharded over ranks and
the shards are gathered, ranks agree on the amaxes of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

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
    Wanted,
    outs_of,
    wanted_parts,
)
from dlp.quant.tensor import SHARED, Format, Part, QuantizedTensor, Shape


@dataclass(frozen=True)
class Fp8Rowwise(Fp8Codes):
    """Format of FP8 codes [rows, contraction] with fp32 `scale_inv` [rows]."""

    KIND = "fp8_rowwise"
    PARTS = codes_and(Part("scale_inv", torch.float32, rows=0, contraction=SHARED))
    gemm_kind = "fp8_rowwise"
    factors = "row"
    block = (1, 0)

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return shape, shape[:1]

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale_inv = q.parts
        return (ops.decode_fp8(codes) * scale_inv[:, None]).to(dtype)

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        codes, scale_inv = q.parts
        return codes.to(torch.bfloat16), scale_inv


_format = cache(Fp8Rowwise)


@dataclass(frozen=True)
class RowwiseScaling:
    """Quantizer with one scale per row, from the agreed amax of the row: code = fp8(x * scale), with an fp32 product. A row of
    zeros has scale 1.

    element        "e4m3" or "e5m2"
    power_of_two   round scales down to powers of two
    epsilon        smallest amax; a smaller amax is replaced by epsilon
    """

    element: str = "e4m3"
    power_of_two: bool = True
    epsilon: float = 0.0
    reduces: ClassVar[tuple[int, ...]] = (1,)
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_fp8_rowwise", native=True)

    @cached_property
    def format(self) -> Format:
        return _format(self.element)

    def observe(self, x: Tensor) -> Tensor | None:
        return ops.amax(x, dim=1)

    def observe_both(self, x: Tensor, columnwise: Quantizer) -> Amaxes:
        return ops.amax_lines(x)

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        assert amax is not None, "rowwise scaling casts with observed row amaxes"
        options, given = self._options(), None if out is None else out.parts
        return self.format.fill(
            out, *ops.cast_fp8_rowwise(x, amax, ELEMENTS[self.element], **options, out=given, flag=flag)
        )

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Quantizer, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        amax, amax_t = amaxes
        assert amax is not None and amax_t is not None, "rowwise scaling casts with observed amaxes of rows and columns"
        dtype, options = ELEMENTS[self.element], self._options()
        row, col = ops.cast_fp8_rowwise_both(x, (amax, amax_t), dtype, **options, outs=outs_of(outs), flag=flag)
        return self.format.wrap(row), self.format.wrap(col)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_fp8_rowwise_batch(xs, wanted_parts(outs), flags, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"power_of_two": self.power_of_two, "epsilon": self.epsilon}
