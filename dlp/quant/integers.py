"""Integers of 2 to 8 bits: codes, and one scale per row or per group of the contraction, with or without a zero point.

Casts convert x to fp32 and use `dlp.quant.affine`. Codes of fewer than 8 bits are stored without gaps: eight codes of 3 bits
fill three bytes (`pack_bits`). If the contraction is sharded, ranks agree on scales of rows, as for rowwise FP8; scales of
groups need no agreement. A row or group with a non-finite value decodes to non-finite values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.quant import affine
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.tensor import SHARED, Format, Part, QuantizedTensor, Shape


@dataclass(frozen=True)
class Int(Format):
    """Format of integer codes [rows, contraction * bits / 8] with fp32 `scale_inv` [rows] or [rows, contraction / group], and
    an int8 `zero_point` of the same shape if not symmetric. Values are (code - zero_point) * scale_inv.

    bits        2 to 8. Codes of 8 bits are stored as int8, other codes are packed into bytes
    group       number of elements of the contraction that share a scale; 0: one scale per row
    symmetric   True: no zero points

    GEMMs of 8-bit codes with one scale per row multiply the codes, and subtract zero points in the integer sums. All other
    GEMMs decode, with one exception: a GPU kernel for few tokens and 4-bit weights in groups of 32, 64, 128, ...

    Raises ValueError for other bits, and for a negative group.
    """

    bits: int = 8
    group: int = 0
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"integers of {self.bits} bits are not supported: choose 2 to 8 bits")
        if self.group < 0:
            raise ValueError(f"group must be a positive number of codes, or 0 for one scale per row; got {self.group}")

    @property
    def name(self) -> str:
        return f"int{self.bits}[{self.group or 'row'}{'' if self.symmetric else ', zero points'}]"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        along = 1 if self.group else SHARED
        codes = Part("codes", torch.int8 if self.bits == 8 else torch.uint8, rows=0, contraction=1)
        scale, zero = (
            Part(*what, rows=0, contraction=along)
            for what in (("scale_inv", torch.float32), ("zero_point", torch.int8))
        )
        return (codes, scale) if self.symmetric else (codes, scale, zero)

    @cached_property
    def element(self) -> str:
        return f"int{self.bits}"

    @property
    def block(self) -> tuple[int, int]:
        return 1, self.group

    @cached_property
    def multiple(self) -> tuple[int, int]:
        return 1, lcm(self.group or 1, _unit(self.bits))

    @property
    def gemm_kind(self) -> str:
        if self.bits == 4 and self.group >= 32 and self.group.bit_count() == 1:
            return "int4_group"
        if self.group or self.bits != 8:
            return "decode"
        return "int8_rowwise" if self.symmetric else "int8_zero_point"

    @property
    def factors(self) -> str | None:
        return None if self.group else "row"

    def elements(self, entries: int) -> int:
        return entries * 8 // self.bits

    @cached_property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return affine.code_range(self.bits)

    @cached_property
    def landmarks(self) -> tuple[int, int] | None:
        if not self.symmetric or 8 % self.bits:
            return None
        one, largest = (pack(torch.full((1, 8 // self.bits), n), self.bits) for n in (1, self.codes[1]))
        return int(one), int(largest)

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        rows, contraction = shape
        scales = (rows, contraction // self.group) if self.group else (rows,)
        return ((rows, contraction * self.bits // 8), scales, scales)[: len(self.parts)]

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        codes, scale_inv, *zero = q.parts
        unpacked = unpack(codes, self.bits)
        zeros = zero[0] if zero else torch.zeros_like(scale_inv)
        return affine.dequantize_affine(unpacked, self.block, scale_inv, zeros).to(dtype)

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        codes, scale_inv, *zero = q.parts
        counted = unpack(codes, self.bits).to(torch.bfloat16)
        return (counted - zero[0].to(torch.bfloat16)[:, None] if zero else counted), scale_inv


def _unit(bits: int) -> int:
    """Return the smallest number of codes that fills complete bytes."""
    return 8 // gcd(bits, 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return int8 codes [rows, C] as `Int` stores them: codes of 8 bits unchanged, other codes packed by `pack_bits`."""
    return codes if bits == 8 else pack_bits(codes, bits)


def unpack(stored: Tensor, bits: int) -> Tensor:
    """Return the int8 codes [rows, C] of codes that `Int` stores: the inverse of `pack`. Rows must fill complete bytes."""
    return stored if bits == 8 else unpack_bits(stored, bits, stored.shape[1] * 8 // bits)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes [rows, C] into uint8 [rows, ceil(C * bits / 8)].

    The smallest code is subtracted from each code. The result for code i of a row is stored from bit i * bits of the packed row
    on, least significant bit first. Unused bits at the end of a row are 0."""
    unit, columns = _unit(bits), codes.shape[1]
    counted = F.pad(codes.to(torch.int16) - affine.code_range(bits)[0], (0, -columns % unit)).unflatten(1, (-1, unit))
    packed = counted.new_zeros(*counted.shape[:2], unit * bits // 8)
    for i in range(unit):
        byte, shift = divmod(i * bits, 8)
        shifted = counted[..., i] << shift
        packed[..., byte] |= shifted & 0xFF
        if shift + bits > 8:
            packed[..., byte + 1] |= shifted >> 8
    return packed.to(torch.uint8).flatten(1)[:, : -(-columns * bits // 8)].contiguous()


def unpack_bits(stored: Tensor, bits: int, columns: int) -> Tensor:
    """Return the int8 codes [rows, columns] of packed bytes: the inverse of `pack_bits`."""
    unit = _unit(bits)
    bytes_ = (
        F.pad(stored, (0, -stored.shape[1] % (unit * bits // 8))).to(torch.int16).unflatten(1, (-1, unit * bits // 8))
    )
    codes = []
    for i in range(unit):
        byte, shift = divmod(i * bits, 8)
        word = bytes_[..., byte] | (bytes_[..., byte + 1] << 8) if shift + bits > 8 else bytes_[..., byte]
        codes.append((word >> shift) & (2**bits - 1))
    counted = torch.stack(codes, -1).flatten(1)[:, :columns]
    return (counted + affine.code_range(bits)[0]).to(torch.int8)


_format = cache(Int)


@dataclass(frozen=True)
class IntScaling:
    """Quantizer to integers with current scales. For one scale per row, ranks agree on the amaxes of rows; scales of groups
    need no agreement.

    Args:
        bits: number of bits of a code.
        group: number of elements of the contraction that share a scale; 0: one scale per row.
        symmetric: True: scales from the largest magnitude, without zero points. False: the codes span the smallest to the
            largest value, with a zero point.
        narrow: do not use the smallest code, so that x and -x have opposite codes. False: the scale maps the largest magnitude
            to half a code beyond the largest code, as in torchao.
        epsilon: smallest scale_inv; 0: the smallest normal fp32 number.

    Raises:
        ValueError: for `narrow` without `symmetric`, and for bits or a group that the format does not support.

    Examples:
        >>> dlp.quant.integers.IntScaling(bits=4, group=32).format.name
        'int4[32]'
    """

    bits: int = 8
    group: int = 0
    symmetric: bool = True
    narrow: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.narrow and not self.symmetric:
            raise ValueError("narrow codes need symmetric scales: set symmetric=True, or narrow=False")
        _ = self.format

    @cached_property
    def format(self) -> Int:
        return _format(self.bits, self.group, self.symmetric)

    @property
    def reduces(self) -> tuple[int, ...]:
        return () if self.group else (1,)

    @cached_property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest code that casts use."""
        first, last = self.format.codes
        return first + self.narrow, last

    def observe(self, x: Tensor) -> Tensor | None:
        if self.group:
            return None
        if not x.shape[1]:
            reach = x.new_zeros(2, len(x), dtype=torch.float32)
        else:
            low, high = torch.aminmax(x, dim=1)
            reach = torch.stack([high, -low]).float()
            reach = reach.nan_to_num(torch.inf, torch.inf)  # because a maximum over ranks may drop NaN
            reach = torch.where(reach > 0, reach, 0.0)  # because ranks compare bits; codes span 0 in any case
        return reach.amax(0) if self.symmetric else reach

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        self.format.check((x.shape[0], x.shape[1]))
        x, block = x.float(), self.format.block
        scale_inv, zero = self._chosen(x, amax)
        codes = affine.quantize_affine(x, block, scale_inv, zero, self.codes)
        parts = (pack(codes, self.bits), scale_inv, zero)[: len(self.format.parts)]
        return self.format.fill(out, *[part.contiguous() for part in parts])  # x may be a transposed view

    def clipped(self, x: Tensor, amax: Tensor | None) -> Tensor:
        """Return the mask of values that the cast of x clips: bool [rows, contraction]."""
        x = x.float()
        return affine.clipped_affine(x, self.format.block, *self._chosen(x, amax), self.codes)

    def _chosen(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scale_inv and zero point of each row or group of x."""
        how: dict[str, Any] = {"symmetric": self.symmetric, "eps": self.epsilon or None, "zero_point_dtype": torch.int8}
        if self.group:
            return affine.choose_qparams_affine(x, self.format.block, self.codes, **how)
        assert amax is not None, "scales of rows need observed amaxes"
        high, low = (amax, -amax) if self.symmetric else (amax[0], -amax[1])
        return affine.choose_qparams_affine_with_min_max(low, high, self.codes, **how)
