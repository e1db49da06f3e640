"""E2M1, the FP4 element: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, two elements per byte, the even element in the low nibble.

Between 2^k and 2^(k+1) the grid has the step 2^(k-1), and below 1 the step 0.5. The code of a magnitude is magnitude / step,
plus 0 for the step 0.5, 2 for the step 1 and 4 for the step 2. A negative element adds 8 to the code. Casts saturate at 6,
preserve the sign of zero, and map NaN to +6.

Stochastic rounding takes 8 random bits per element from Philox4x32-10. The counter contains the index of the block of 16
elements in the unsharded matrix, so that shards round like the unsharded matrix, and recomputation repeats the rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels.reference.fp8 import EXPONENT

LARGEST = 6.0
ONE = 0x3F800000  # 1.0 as a binary32
WORD = 0xFFFFFFFF
PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
BLOCK = 16


def _nearest_code(y: Tensor) -> Tensor:
    """Return the nearest codes 0..15 (int32) of fp32 values, ties to the even code: the definition of the cast."""
    y = y.nan_to_num(nan=LARGEST)
    magnitude = y.abs().clamp(max=LARGEST)
    binade = (magnitude.view(torch.int32) & EXPONENT).clamp(min=ONE)
    # 2^22 times the power of two at or below the magnitude: fp32 numbers of this size are one grid step apart, so that adding
    # this number rounds the magnitude to the grid
    pusher = binade + (22 << 23)
    index = (magnitude + pusher.view(torch.float32)).view(torch.int32) - pusher
    return ((y.view(torch.int32) >> 28) & 8) | (index + ((binade - ONE) >> 22))


@lru_cache(maxsize=8)
def _encode_table(device: torch.device) -> Tensor:
    """Return the codes of all 65,536 upper halves of a binary32."""
    halves = torch.arange(65536, dtype=torch.int32, device=device) << 16
    return _nearest_code(halves.view(torch.float32)).to(torch.uint8)


def encode_e2m1(y: Tensor) -> Tensor:
    """Return the nearest E2M1 codes 0..15 of fp32 values, one code per byte (uint8): ties to even, saturating, NaN -> +6.

    The upper 16 bits of y are rounded to odd (the lowest bit is set if a dropped bit is 1), which preserves the result of the
    rounding to 2 bits; the code follows from a table.
    """
    bits = y.contiguous().view(torch.int32)
    odd = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    return _encode_table(y.device).index_select(0, odd.view(-1)).view(y.shape)


def encode_e2m1_stochastic(y: Tensor, random: Tensor) -> Tensor:
    """Return E2M1 codes 0..15, one code per byte, of fp32 y and random bytes (uint8) of the same shape.

    With grid neighbours lo <= |y| < hi and f = (|y| - lo) / (hi - lo), y is rounded away from zero iff
    floor(256 f) + random >= 256, i.e. with probability floor(256 f) / 256. |y| >= 6 gives 6, NaN gives +6.
    """
    y = y.nan_to_num(nan=LARGEST)
    magnitude = y.abs().clamp_(max=LARGEST)
    binade = (magnitude.view(torch.int32) & EXPONENT).clamp_(min=ONE)
    steps_256 = (0x44000000 + ONE - binade).view(torch.float32)  # 256 / step = 512 / binade, a power of two
    index = magnitude.mul_(steps_256).int().add_(random).bitwise_right_shift_(8)
    index.add_(binade.sub_(ONE).bitwise_right_shift_(22))
    return index.bitwise_or_((y.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack codes 0..15 [..., C], C even, into bytes [..., C/2], with even elements in the low nibbles."""
    # the low byte of a pair is the even element; codes are flattened first, because view(dtype) refuses some strides of empty
    # tensors
    pairs = codes.contiguous().view(-1).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack bytes into codes: the inverse of `pack_e2m1`."""
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def transpose_e2m1(packed: Tensor) -> Tensor:
    """Transpose packed codes [rows, C/2] of a matrix [rows, C] -> packed codes [C, rows/2]; the number of rows is even."""
    return pack_e2m1(unpack_e2m1(packed).t())


@lru_cache(maxsize=8)
def _pair_table(device: torch.device) -> Tensor:
    """Return a table of the two values (64 bits) of all 256 bytes: one look-up decodes two elements."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    values = torch.cat([values, -values])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).view(torch.int64).view(-1)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Return the exact fp32 values [rows, C] of packed bytes [rows, C/2]."""
    pairs = _pair_table(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(packed.shape[0], 2 * packed.shape[1])


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return Philox4x32-10 of four int64 tensors of 32-bit counter words and two key words: four int64 tensors of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = (
            c0 * PHILOX_MULTIPLIERS[0],
            c2 * PHILOX_MULTIPLIERS[1],
        )  # a product may overflow into the sign bit, but its 64 bits are correct
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & WORD, (k1 + PHILOX_KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def random_bytes(
    rows: int, columns: int, *, row: int, column: int, total_columns: int, orientation: int, counter: Tensor,
    key: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Return the random bytes [rows, columns] (uint8) of the shard at (row, column) of a matrix with `total_columns` columns.

    Each block of 16 elements along a row takes one Philox call. Counter words: the block's index in the unsharded matrix
    (row-major; low and high word), `orientation`, and `counter` (int64 []); key words: seed and tensor id. Byte b of
    output word w belongs to element 4w+b of the block. `columns` and `column` are multiples of 16.
    """
    device = counter.device
    first = column // BLOCK
    across = torch.arange(first, first + columns // BLOCK, device=device)
    index = torch.arange(row, row + rows, device=device)[:, None] * -(-total_columns // BLOCK) + across
    counters = index & WORD, index >> 32, torch.full_like(index, orientation), (counter & WORD).expand_as(index)
    words = torch.stack(philox_4x32(counters, (key[0] & WORD, key[1] & WORD)), -1)
    return words.to(torch.int32).view(torch.uint8).view(rows, columns)


class PhiloxState(NamedTuple):
    """Arguments of `random_bytes` for a shard: position in the unsharded matrix, orientation, counter and key."""

    row: int
    column: int
    total_columns: int
    orientation: int
    counter: Tensor
    key: tuple[int, int]

    def bytes(self, rows: int, columns: int) -> Tensor:
        """Return the random bytes [rows, columns] of the shard."""
        return random_bytes(rows, columns, **self._asdict())
