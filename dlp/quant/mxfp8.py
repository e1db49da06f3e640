"""MXFP8: FP8 elements with one E8M0 scale per 32 elements of the contraction, or per 32x32 tile.

Decoded values are exact in bf16. Columnwise operands are stored transposed, as in all formats. The layout of scales that
block-scaled tensor cores read is computed right before the GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8_codes import ELEMENTS, Fp8Blocks, Fp8BlockScaling, codes_and
from dlp.quant.quantizer import QuantizerCaps, ScaleSlot, Wanted, wanted_parts
from dlp.quant.tensor import Format, Part, QuantizedTensor, Shape


@dataclass(frozen=True)
class Mxfp8(Fp8Blocks):
    """Format of FP8 codes [rows, contraction] and compact E8M0 scales, one byte each, [rows or rows/32, contraction/32].

    element   "e4m3" or "e5m2"
    tile      one scale per 32x32 tile; else per 1x32 block

    The contraction must be a multiple of 32; with `tile` also the number of rows.
    """

    KIND = "mxfp8"
    PARTS = codes_and(Part("scale_e8m0", torch.uint8, rows=0, contraction=1))
    SIZE = 32
    gemm_kind = "mxfp8"
    bf16_exact = True

    @cached_property
    def multiple(self) -> tuple[int, int]:
        return self.block

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return shape, (shape[0] // self.block[0], shape[1] // self.block[1])

    def empty(self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        codes = torch.empty(shape, dtype=ELEMENTS[self.element], device=device)
        return QuantizedTensor(self, (codes, ops.empty_mx_scales(shape, self.tile, device)))

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale = q.parts
        return ops.decode_mxfp8(codes, scale, self.block, dtype)


_format = cache(Mxfp8)


@dataclass(frozen=True)
class MxScaling(Fp8BlockScaling):
    """Quantizer with one power-of-two scale per block, from the amax of the block. Ranks need no agreement.

    scale_rounding   "ceil": scale_inv is the smallest power of two without saturation; "floor": the rule of OCP MX v1.0, which
                     may saturate
    element, tile    see `Mxfp8`

    A cast raises ValueError for a matrix with partial blocks.
    """

    element: str = "e4m3"
    scale_rounding: str = "ceil"
    tile: bool = False
    CASTS = ops.cast_mxfp8, ops.cast_mxfp8_both
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_mxfp8", native=True)

    @cached_property
    def format(self) -> Format:
        return _format(self.element, self.tile)

    def _options(self) -> dict[str, Any]:
        return {"rule": self.scale_rounding}

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_mxfp8_batch(xs, wanted_parts(outs), flags, self.format.block, **self._options())
