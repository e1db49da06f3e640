"""NVFP4: E2M1 elements, one E4M3 scale per block of 16 (or 16x16 tile), and one fp32 amax per tensor.

    S_enc = 2688 / amax (2688 = 448 * 6)    scale of the tensor: the block with the largest amax has the E4M3 scale 448
    s8    = e4m3(amax_block * fl(S_enc * fl(1/6)))      scale of a block
    q     = e2m1(x / (s8 / S_enc))          code of an element x

The order of these products is part of the format: another order changes the scales of some blocks. The amax is stored. A
decoded value is e2m1 * (s8 * amax / 2688). A GEMM multiplies e2m1 * s8, which is exact in bf16, and applies the amaxes of both
operands at the end. (arXiv 2509.25149.)

Four over six (arXiv 2512.02010, github.com/mit-han-lab/fouroversix) gives each block one of two scales: the amax of the
block becomes 6, or becomes 4, so that the gap of E2M1 between 4 and 6 is not used.

    amax'  = min(fl(1.75 * amax), FLT_MAX)     stored, and used in place of amax: S_enc becomes 1536 / amax (256 * 6)
    s6     = e4m3(amax_block * fl(S_enc * fl(1/6)))                 at most 256 (up to rounding), so that s4 fits E4M3
    s4     = e4m3(fl(1.5 * (amax_block * fl(S_enc * fl(1/6)))))
    q6, q4 = the codes of the block under each scale
    error  = sum of fl(d * d), d = fl(e2m1 * s8 - fl(x * S_enc))    in fp32, in the order of `block_sums`

A block takes the scale s4 if the error of s4 is smaller than the error of s6; ties take s6. In units of 1 / S_enc, e2m1 * s8 is
exact, and no relevant square overflows or underflows in fp32. Decoding and GEMMs do not change, because the stored amax
contains the factor. Four over six needs rounding to nearest: choosing the smaller of two random errors would bias a gradient.

The Hadamard transform rotates groups of 16 along the contraction, which spreads an outlier over the group; the transforms of
both operands of a GEMM cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce

import torch
from torch import Tensor

from dlp.kernels.reference.fp4 import decode_e2m1, encode_e2m1, encode_e2m1_stochastic, pack_e2m1
from dlp.kernels.reference.fp8 import (
    FLT_MAX,
    Block,
    amax_of_blocks,
    decode_fp8,
    encode_fp8,
    from_blocks,
    spread,
    to_blocks,
    widen,
)

GROUP = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
FOUR_OVER_SIX_AMAX = 448.0 / 256.0  # E4M3 scales of 256 leave room for a factor of 1.5
RHT_SIGNS = 0xD7E8  # bit i is set: the sign of element i changes before the transform


def nvfp4_tensor_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return S_enc and S_dec = fl(1 / S_enc), fp32, of the amax of a tensor; S_enc is 1 for an amax of 0, Inf or NaN."""
    usable = torch.isfinite(amax) & (amax > 0)
    quotient = torch.full_like(amax, E4M3_MAX * E2M1_MAX) / torch.where(usable, amax, torch.ones_like(amax))
    encode = torch.where(usable, quotient.clamp(max=FLT_MAX), torch.ones_like(amax))
    return encode, encode.reciprocal()


def nvfp4_block_scale(block_amax: Tensor, tensor_encode: Tensor) -> Tensor:
    """Return the fp32 scales of blocks, before the rounding to E4M3, from the amaxes of the blocks and S_enc."""
    return (block_amax * (tensor_encode * (1 / E2M1_MAX))).clamp(max=FLT_MAX)


def nvfp4_encode_scale(scale: Tensor, tensor_decode: Tensor) -> Tensor:
    """Return the fp32 multipliers of a cast to E2M1, from the E4M3 scales of blocks and S_dec; FLT_MAX for a scale of 0."""
    return (decode_fp8(scale) * tensor_decode).reciprocal().clamp(max=FLT_MAX)


def nvfp4_stored_amax(amax: Tensor, *, four_over_six: bool) -> Tensor:
    """Return the amax that an operand stores: `amax`, or 1.75 times `amax` with four over six; Inf and NaN do not change."""
    if not four_over_six:
        return amax
    return torch.where(torch.isfinite(amax), (amax * FOUR_OVER_SIX_AMAX).clamp(max=FLT_MAX), amax)


def block_sums(errors: Tensor) -> Tensor:
    """Return the sums of blocks in fp32, in a fixed order that is the same for a transposed tile.

    errors [row blocks, block rows, C blocks, 16] -> [row blocks, C blocks]. Blocks of one row: elements 0 to 15 are
    added in order. Tiles of 16x16: the sum of each 8x8 quarter adds the terms e[i, i] and fl(e[i, j] + e[j, i]) of the upper
    triangle, row by row; the sums q of the quarters are added as fl(fl(q[0, 0] + q[1, 1]) + fl(q[0, 1] + q[1, 0])).
    """
    down, height, across, width = errors.shape
    if height == 1:
        return _sum_in_order(errors[:, 0, :, i] for i in range(width))
    quarters = errors.view(down, 2, height // 2, across, 2, width // 2).permute(2, 5, 0, 3, 1, 4)
    pairs = [(i, j) for i in range(height // 2) for j in range(i, width // 2)]
    sums = _sum_in_order(quarters[i, j] if i == j else quarters[i, j] + quarters[j, i] for i, j in pairs)
    return (sums[..., 0, 0] + sums[..., 1, 1]) + (sums[..., 0, 1] + sums[..., 1, 0])


def _sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def _cast_by(wide: Tensor, scale: Tensor, tensor_scale: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of blocks by E4M3 scales, one code per byte, and the errors of the blocks."""
    encode, decode = tensor_scale
    codes = encode_e2m1(wide * spread(nvfp4_encode_scale(scale, decode)))
    values = decode_e2m1(pack_e2m1(codes).flatten(0, -2)).view(wide.shape)
    difference = values * spread(decode_fp8(scale)) - wide * encode
    return codes, block_sums(difference * difference)


def _cast_four_over_six(
    wide: Tensor, block_scale: Tensor, tensor_scale: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return codes of blocks, one code per byte, and the chosen E4M3 scales, from scales before the rounding to E4M3."""
    six = encode_fp8(block_scale, torch.float8_e4m3fn)
    four = encode_fp8((block_scale * 1.5).clamp(max=FLT_MAX), torch.float8_e4m3fn)
    (codes, error), (codes_four, error_four) = (_cast_by(wide, scale, tensor_scale) for scale in (six, four))
    less = error_four < error
    scale = torch.where(less, four.view(torch.uint8), six.view(torch.uint8)).view(torch.float8_e4m3fn)
    return torch.where(spread(less), codes_four, codes), scale


def cast_nvfp4(
    x: Tensor, amax: Tensor, block: Block, *, random: Tensor | None = None, four_over_six: bool = False
) -> tuple[Tensor, Tensor]:
    """Return packed codes [rows, C/2] and E4M3 scales [row blocks, C/16] of x [rows, C]. `amax`, fp32 []: amax of the tensor,
    on which the ranks of the amax group agree.

    random          bytes [rows, C] for stochastic rounding; None: round to nearest
    four_over_six   choose between two scales for each block; only with rounding to nearest

    `nvfp4_stored_amax(amax)` is the amax for decoding.
    """
    amax = nvfp4_stored_amax(amax, four_over_six=four_over_six)
    wide = to_blocks(widen(x), block)
    tensor_encode, tensor_decode = nvfp4_tensor_scale(amax)
    block_scale = nvfp4_block_scale(amax_of_blocks(wide), tensor_encode)
    if four_over_six:
        assert random is None, "four over six rounds to nearest"
        codes, scale = _cast_four_over_six(wide, block_scale, (tensor_encode, tensor_decode))
        return pack_e2m1(from_blocks(codes, (x.shape[0], x.shape[1]))), scale
    scale = encode_fp8(block_scale, torch.float8_e4m3fn)
    scaled = from_blocks(wide * spread(nvfp4_encode_scale(scale, tensor_decode)), (x.shape[0], x.shape[1]))
    codes = encode_e2m1(scaled) if random is None else encode_e2m1_stochastic(scaled, random)
    return pack_e2m1(codes), scale


def decode_nvfp4(packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None) -> Tensor:
    """Return fp32 values [rows, C] of packed codes [rows, C/2] with E4M3 scales [row blocks, C/16].

    With `amax` the result is fl(e2m1 * fl(fl(scale * amax) * fl(1/2688))). Without `amax` the result is e2m1 * scale, which
    is exact in bf16; a GEMM multiplies these values.
    """
    factor = decode_fp8(scale)
    if amax is not None:
        factor = factor * amax * (1 / (E4M3_MAX * E2M1_MAX))
    wide = to_blocks(decode_e2m1(packed), block)
    return from_blocks(wide * spread(factor), (packed.shape[0], 2 * packed.shape[1]))


def nvfp4_alpha(a_amax: Tensor, b_amax: Tensor) -> Tensor:
    """Return the factor by which a GEMM multiplies its sums: fl(fl(amaxA * amaxB) * fl(1 / (36 * 448 * 448)))."""
    return a_amax * b_amax * (1 / (E2M1_MAX * E2M1_MAX * E4M3_MAX * E4M3_MAX))


@lru_cache(maxsize=8)
def _signs(device: torch.device, signs: int) -> Tensor:
    """Return +1 or -1 for the elements of a group, fp32 [16, 1]."""
    flipped = (torch.full((GROUP,), signs, device=device) >> torch.arange(GROUP, device=device)) & 1
    return (1.0 - 2.0 * flipped)[:, None]


def rht16(x: Tensor, signs: int = RHT_SIGNS) -> Tensor:
    """Return the Hadamard transform y = x D H16 / 4, bf16 [rows, C], in each group of 16 along C of x [rows, C], rounded once.

    D changes the sign of the elements whose bit in `signs` is set, and H16 is the Sylvester matrix, computed as an fp32
    butterfly with strides 1, 2, 4, 8 in this order. A wider x is rounded to bf16 first. The transform is fastest for a
    transposed view, whose groups are stored along rows of memory, so that each butterfly adds complete rows.
    """
    rows, cols = x.shape
    lanes = x.detach().bfloat16().t().contiguous().view(cols // GROUP, GROUP, rows) * _signs(x.device, signs)
    for stride in (1, 2, 4, 8):
        left, right = lanes.view(cols // GROUP, GROUP // 2 // stride, 2, stride, rows).unbind(2)
        difference = left - right
        left.add_(right)
        right.copy_(difference)
    return lanes.mul_(0.25).bfloat16().view(cols, rows).t().contiguous()
