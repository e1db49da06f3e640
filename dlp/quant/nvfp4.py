"""NVFP4: packed E2M1 elements, one E4M3 scale per 16 elements (or 16x16 tile), one fp32 amax per tensor (arXiv 2509.25149).

The recipe nvfp4 applies a Hadamard transform along the contraction (the tokens) to both operands of wgrad, which spreads
outliers over 16 tokens. The transform is part of the format, because the two operands of a GEMM must have the same transform.
Stochastic rounding of dy keeps the gradient unbiased; its random bits depend on the position of an element in the unsharded
matrix, not on the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.ops import RHT_SIGNS
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

BLOCK = 16
# amax * FACTOR is the scale_inv of the tensor; 6 is the largest E2M1 value, and 448 is the largest E4M3 block scale
FACTOR = 1 / (6 * 448)
PARTS = (
    Part("codes", torch.uint8, rows=0, contraction=1),
    Part("scale_e4m3", torch.float8_e4m3fn, rows=0, contraction=1),
    Part("amax", torch.float32, SHARED, SHARED),
)


@dataclass(frozen=True)
class Nvfp4(Format):
    """Format of packed E2M1 codes [rows, contraction/2], compact E4M3 scales [rows or rows/16, contraction/16] and fp32 `amax`
    [].

    tile    one scale per 16x16 tile; else per 1x16 block
    rht     whether values are Hadamard-transformed in groups of 16 along the contraction
    signs   16 bits; the sign of element i of a group is flipped before the transform if bit i is set

    The contraction must be a multiple of 16; with `tile` also the number of rows.
    """

    tile: bool = False
    rht: bool = False
    signs: int = RHT_SIGNS

    gemm_kind = "nvfp4"
    factors = "tensor"
    elements_per_code = 2
    landmarks = (0x22, 0x77)
    parts = PARTS

    @property
    def name(self) -> str:
        return f"nvfp4[{self.block[0]}x{self.block[1]}{f', {self.basis}' if self.rht else ''}]"

    @cached_property
    def block(self) -> tuple[int, int]:
        return (BLOCK if self.tile else 1), BLOCK

    @cached_property
    def multiple(self) -> tuple[int, int]:
        return self.block

    @property
    def transposable(self) -> bool:
        return self.tile and not self.rht

    @property
    def basis(self) -> str:
        return ("rht" if self.signs == RHT_SIGNS else f"rht {self.signs:#06x}") if self.rht else ""

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return (shape[0], shape[1] // 2), (shape[0] // self.block[0], shape[1] // self.block[1]), ()

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale, amax = q.parts
        return ops.decode_nvfp4(codes, scale, self.block, amax, dtype)

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        codes, scale, amax = q.parts
        return ops.decode_nvfp4(codes, scale, self.block, dtype=torch.bfloat16), amax * FACTOR

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        if not self.transposable:
            return super().transpose(q)
        codes, scale, amax = q.parts
        return QuantizedTensor(self, (ops.transpose_e2m1(codes), scale.t().contiguous(), amax))


_format = cache(Nvfp4)


@dataclass(frozen=True)
class Nvfp4Scaling:
    """Quantizer with block scales and an agreed amax of the tensor.

    tile            one scale per 16x16 tile, for weights; else per 1x16 block
    rht             apply the Hadamard transform before the cast. The amax is computed from the transformed values; fp32 values
                    are rounded to bf16 before the transform
    signs           see `Nvfp4`
    stochastic      round stochastically; casts need the argument `at`
    four_over_six   choose the scale of each block from two scales, which map the largest value of the block to 6 or to 4: the
                    scale with the smaller squared error; the scale to 6 if the errors are equal (arXiv 2512.02010,
                    `dlp.kernels.reference.nvfp4`). The stored amax is amax * 448/256

    Raises ValueError for `four_over_six` with `stochastic`. A cast raises ValueError for a matrix with partial blocks, and for
    stochastic rounding without `at`.
    """

    tile: bool = False
    rht: bool = False
    stochastic: bool = False
    signs: int = RHT_SIGNS
    four_over_six: bool = False
    reduces: ClassVar[tuple[int, ...]] = (0, 1)

    def __post_init__(self) -> None:
        if self.four_over_six and self.stochastic:
            raise ValueError(
                "nvfp4: four_over_six needs rounding to nearest, because the smaller of two random errors would bias the "
                "operand; set four_over_six or stochastic, not both"
            )

    @cached_property
    def caps(self) -> QuantizerCaps:
        """Caps of the quantizer. Kernels support tiles only with rounding to nearest and without transform, and the transform
        only with the signs RHT_SIGNS."""
        plain = not self.rht and not self.stochastic
        kernel = (not self.rht or self.signs == RHT_SIGNS) and (plain or not self.tile)
        return QuantizerCaps(op="cast_nvfp4" if kernel else "", origin=self.stochastic, native=kernel)

    def pairs_with(self, columnwise: Quantizer) -> bool:
        """Return whether `both` accepts this columnwise quantizer: an equal quantizer, or without `tile` also the same one with
        the Hadamard transform. The rowwise quantizer (self) must not have the transform."""
        return not self.rht and columnwise in ((self,) if self.tile else (self, replace(self, rht=True)))

    @cached_property
    def format(self) -> Format:
        return _format(self.tile, self.rht, self.signs if self.rht else RHT_SIGNS)

    def values(self, x: Tensor) -> Tensor:
        """Return the matrix that a cast of x quantizes: x, or with `rht` the transformed x."""
        self.format.check((x.shape[0], x.shape[1]))
        return ops.rht16(x, self.signs) if self.rht else x

    def observe(self, x: Tensor) -> Tensor | None:
        self.format.check((x.shape[0], x.shape[1]))
        return ops.amax_nvfp4(x, rht=self.rht, signs=self.signs)

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        self.format.check((x.shape[0], x.shape[1]))
        assert amax is not None, "nvfp4 casts with an observed tensor amax"
        made = ops.cast_nvfp4(
            x, amax, self.format.block, rht=self.rht, signs=self.signs, draw=self._draw(at),
            out=None if out is None else out.parts, flag=flag, four_over_six=self.four_over_six,
        )  # fmt: skip
        return self.format.fill(out, *made)

    def observe_both(self, x: Tensor, columnwise: Nvfp4Scaling) -> Amaxes:
        self._check_both(x, columnwise)
        if columnwise.rht:
            return ops.amax_nvfp4_both(x)
        amax = ops.amax_nvfp4(x, rht=False)
        return amax, amax

    def both(
        self, x: Tensor, amaxes: Amaxes, *, columnwise: Nvfp4Scaling, outs: Operands | None = None,
        slot: ScaleSlot | None = None, at: Origins | None = None, flag: Tensor | None = None,
    ) -> Operands:  # fmt: skip
        self._check_both(x, columnwise)
        amax, amax_t = amaxes
        assert amax is not None and amax_t is not None, "nvfp4 casts with observed tensor amaxes"
        origins = at or (None, None)
        row, col = ops.cast_nvfp4_both(
            x, (amax, amax_t), self.format.block, rht=columnwise.rht,
            draws=(self._draw(origins[0]), self._draw(origins[1])), outs=outs_of(outs), flag=flag,
            four_over_six=self.four_over_six,
        )  # fmt: skip
        return self.format.wrap(row), columnwise.format.wrap(col)

    def batch(
        self, xs: Sequence[Tensor], outs: Sequence[Wanted], slots: Sequence[ScaleSlot | None], flags: ops.Flags
    ) -> ops.Launches:
        return ops.cast_nvfp4_batch(xs, wanted_parts(outs), flags, self.format.block, four_over_six=self.four_over_six)

    def _check_both(self, x: Tensor, columnwise: Nvfp4Scaling) -> None:
        self.format.check((x.shape[0], x.shape[1]))
        columnwise.format.check((x.shape[1], x.shape[0]))

    def _draw(self, at: Origin | None) -> ops.PhiloxState | None:
        if not self.stochastic:
            return None
        if at is None:
            raise ValueError(
                "nvfp4 with stochastic rounding draws bits for a position in the unsharded matrix: "
                "pass at=Origin(...), or set disable_stochastic_rounding"
            )
        if at.column % BLOCK:
            raise ValueError(
                f"nvfp4: a shard starts at column {at.column} of the contraction, inside a block of {BLOCK}; "
                f"shard the contraction at multiples of {BLOCK}, or keep this operand in high precision"
            )
        return ops.PhiloxState(at.row, at.column, at.columns, at.orientation, at.counter, (at.seed, at.tensor_id))
