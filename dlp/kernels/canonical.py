"""Sums whose bits depend neither on the sharding of a tensor over ranks nor on the order in which a kernel adds.

A sum over a dimension is divided into canonical segments: contiguous parts of equal length of the unsharded dimension. The sum
of a segment has the same bits in every order of addition, and the segments are added in fp32 by a binary tree:

    s0   s1   s2   s3   s4   s5   s6   s7        SEGMENTS, or the largest smaller power of two that divides the dimension
      └┬─┘      └┬─┘      └┬─┘      └┬─┘
       └────┬────┘         └────┬────┘           a rank with an aligned power-of-two number of segments owns a subtree
            └─────────┬─────────┘

A segment of a GEMM is divided into chunks of at most CHUNK terms. Within a chunk, the values of each row of an operand are
rounded to integers times one power of two, so that the largest value has BITS bits. Products and their sums are then integers
of at most 2^53, which fp64 represents exactly: every order of addition, every blocking of the GEMM and every device gives the
same bits. The sum of a chunk is rounded once to fp32, and the chunks are added in fp32 in order. Rounding changes a value by at
most 2^-22 of the largest value of the row in the chunk, an error of the size of the rounding errors of an fp32 sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SEGMENTS = 8
CHUNK = 512  # largest number of terms of an exact sum: 2^9 products of 2 * BITS = 44 bits fill the 53 bits of fp64
BITS = 22
MANTISSA = 53
DIGIT = 2.0**30
# All segments are multiplied in one batch if the products have at most this number of elements, else one after another.
ROOM = 2**22


def segments_on_rank(size: int, ranks: int = 1) -> int:
    """Return the number of segments on each of `ranks` ranks, for a dimension with `size` elements per rank. Raises ValueError
    if a segment would span several ranks."""
    segments = min(SEGMENTS, (size * ranks) & -(size * ranks)) or 1
    if segments % ranks and size:
        raise ValueError(
            f"invariant = true: a sum over {size * ranks} terms has {segments} canonical segments, which {ranks} ranks cannot "
            f"share; use a power of two of at most {SEGMENTS} ranks"
        )
    return max(segments // ranks, 1)


def tree(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power-of-two number of tensors, added by a binary tree of neighbours."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def pairwise(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of any number of tensors by the tree, one tensor at a time. A stack contains sums of 1, 2, 4, ... tensors,
    like the digits of a binary number."""
    stack: list[tuple[int, Tensor]] = []
    for total in parts:
        count = 1
        while stack and stack[-1][0] == count:
            total, count = stack.pop()[1] + total, 2 * count
        stack.append((count, total))
    total = stack[-1][1]
    for _, left in stack[-2::-1]:
        total = left + total
    return total


def products(pairs: Sequence[tuple[Tensor, Tensor]], segments: int) -> Tensor:
    """Return the sum over i of a_i [rows, C_i] @ b_i [cols, C_i].T, fp32 [rows, cols]; C_i is cut into `segments` segments.

    The products of one segment are added in the order of i, then the segments by the tree."""
    (rows, _), (cols, _) = pairs[0][0].shape, pairs[0][1].shape
    together = segments if segments * rows * cols <= ROOM else 1  # number of segments per batch of products
    sums = [_sums(pairs, range(first, first + together), segments) for first in range(0, segments, together)]
    return tree(torch.cat(sums).unbind())


def _sums(pairs: Sequence[tuple[Tensor, Tensor]], chosen: range, segments: int) -> Tensor:
    """Return the sums of the segments with the indices `chosen`, fp32 [number of these segments, rows, cols]."""
    total = pairs[0][0].new_zeros(len(chosen), len(pairs[0][0]), len(pairs[0][1]), dtype=torch.float32)
    for a, b in pairs:
        left, right = (
            x.unflatten(1, (segments, x.shape[1] // segments))[:, chosen.start : chosen.stop].transpose(0, 1)
            for x in (a, b)
        )
        for left_part, right_part in zip(left.split(CHUNK, 2), right.split(CHUNK, 2), strict=True):
            if left_part.shape[2]:
                total += _exact_products(left_part, right_part)
    return total


def _exact_products(a: Tensor, b: Tensor) -> Tensor:
    """Return a [segments, rows, C] @ b [segments, cols, C].T for each segment, fp32 [segments, rows, cols]; C is at most CHUNK.
    The operands are rounded (`_integers`), and their products are summed exactly."""
    (left, left_unit), (right, right_unit) = _integers(a, BITS), _integers(b, BITS)
    return (left @ right.mT).mul_(left_unit).mul_(right_unit.mT).float()


def _integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return x [..., C] as integers of at most `bits` bits, fp64 [..., C], and their unit, a power of two [..., 1]."""
    exponent = _exponents(x.abs().amax(-1, keepdim=True))
    return (x.double() * _power_of_two(bits - exponent)).round_(), _power_of_two(exponent - bits)


def _exponents(largest: Tensor) -> Tensor:
    """Return the smallest e with largest < 2^e, elementwise, int64; 0 if `largest` is 0 or not finite."""
    return torch.where(largest.isfinite(), torch.frexp(largest.float()).exponent, 0).long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent of int64 exponents, exact in fp64."""
    return ((exponent + 1023) << 52).view(torch.float64)


def row_sums(x: Tensor, segments: int) -> Tensor:
    """Return the sums of x [rows, features] over rows, which are cut into `segments` segments, fp32 [features]."""
    length = len(x) // segments
    bits, sums = _bits_of_sum(length), []
    for part in x.split(max(length, 1)):
        if len(part):
            integers, unit = _integers(part.t(), bits)
            sums.append((integers.sum(1) * unit[:, 0]).float())
    if not sums:
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    return tree(sums)


def sums_by_index(x: Tensor, index: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Return fp32 [rows, features]: row r is the sum of all rows m of x [M, features] with index[m] = r and counts[m] = True.
    `index` is int64 [M], `counts` is bool [M].

    Values are rounded to integers times a power of two; the power follows from the largest value of the feature in all rows of
    x. The sums of these integers are exact."""
    integers, unit = _integers(x.t(), _bits_of_sum(len(x)))
    chosen = torch.where(counts[:, None], integers.t(), 0.0)
    sums = chosen.new_zeros(rows, x.shape[1]).index_add_(0, index, chosen)
    return sums.mul_(unit[:, 0]).float()


def _bits_of_sum(terms: int) -> int:
    """Return the largest number of bits, at most 40, of integers for which the sum of `terms` integers is exact in fp64."""
    return min(40, MANTISSA - max(terms - 1, 0).bit_length())


def square_sums(tensors: Sequence[Tensor], largest: Tensor) -> Tensor:
    """Return the sum of squares of the elements of each tensor as three digits to the base 2^30, int64 [tensors, 3]. The digits
    of several ranks may be added in any order.

    largest: fp32 [tensors], for each tensor at least the largest magnitude over all ranks that have a part of the tensor."""
    scales, digits = _power_of_two(-_exponents(largest)), []
    for tensor, scale in zip(tensors, scales, strict=True):
        rest, sums = (tensor.double() * scale).square_(), []
        for _ in range(3):
            rest = rest * DIGIT
            digit = rest.floor()
            rest = rest - digit
            sums.append(digit.long().sum())
        digits.append(torch.stack(sums))
    return torch.stack(digits)


def norm_of(digits: Tensor, largest: Tensor) -> Tensor:
    """Return the 2-norm, fp32 [], of tensors with these `square_sums`. Not finite if `largest` is not finite."""
    places = torch.tensor([DIGIT**-1, DIGIT**-2, DIGIT**-3], dtype=torch.float64, device=digits.device)
    squares = (digits * places).sum(1) * _power_of_two(2 * _exponents(largest))
    norm = squares.sum().sqrt().float()
    return torch.where(largest.isfinite().all(), norm, largest.sum())
