"""Block FP8: one fp32 scale per 128 elements of the contraction, or per 128x128 tile (arXiv 2412.19437).

By default the multiplier of a cast is rounded down to a power of two, so that scale_inv is a power of two and decoded values
are exact in bf16. The last block of a dimension may be partial.
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
from dlp.quant.quantizer import Amaxes, Operands, QuantizerCaps, ScaleSlot, Wanted, wanted_parts
from dlp.quant.tensor import Format, Part, QuantizedTensor, Shape, blocks


@dataclass(frozen=True)
class Fp8Block(Fp8Blocks):
    """Format of FP8 codes [rows, contraction] and compact fp32 `scale_inv` [rows or ceil(rows/128), ceil(contraction/128)].

    element        "e4m3" or "e5m2"
    tile           one scale per 128x128 tile; else per 1x128 block
    power_of_two   whether all scales are powers of two
    """

    power_of_two: bool = True
    KIND = "fp8_block"
    PARTS = codes_and(Part("scale_inv", torch.float32, rows=0, contraction=1))
    SIZE = 128

    @property
    def gemm_kind(self) -> str:
        return "fp8_block_2d" if self.tile else "fp8_block_1d"

    @cached_property
    def bf16_exact(self) -> bool:
        return self.power_of_two

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return shape, (blocks(shape[0], self.block[0]), blocks(shape[1], self.block[1]))

    def empty(self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        codes = torch.empty(shape, dtype=ELEMENTS[self.element], device=device)
        return QuantizedTensor(self, (codes, ops.empty_block_scales(shape, self.tile, device)))

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale_inv = q.parts
        return ops.decode_fp8_block(codes, scale_inv, self.block, dtype)


_format = cache(Fp8Block)


@dataclass(frozen=True)
class BlockScaling(Fp8BlockScaling):
    """Quantizer with one scale per block, from the amax of the block: code = fp8(x * scale), with an fp32 product. Ranks need
    no agreement.

    element, tile   see `Fp8Block`
    power_of_two    round scales down to powers of two
    epsilon         smallest amax; a smaller amax is replaced by epsilon
    """

    element: str = "e4m3"
    tile: bool = False
    power_of_two: bool = True
    epsilon: float = 0.0
    CASTS = ops.cast_fp8_block, ops.cast_fp8_block_both
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_fp8_block", native=True)

    @cached_property
    def format(self) -> Format:
        return _format(self.element, self.tile, self.power_of_two)

    def _options(self) -> dict[str, Any]:
        return {"power_of_two": self.power_of_two, "epsilon": self.epsilon}

    def observe_grads(self, grads: ops.GatedGrads) -> tuple[Amaxes, Amaxes]:
        return (None, None), (None, None)

    def both_grads(
        self, grads: ops.GatedGrads, amaxes: Sequence[Amaxes], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> list[Operands]:
        made = self._made(ops.cast_gate_grads_fp8_block, grads, flags=flags)
        return [(self.format.wrap(row), self.format.wrap(col)) for row, col in made]

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_fp8_block_batch(xs, wanted_parts(outs), flags, self.format.block, **self._options())
