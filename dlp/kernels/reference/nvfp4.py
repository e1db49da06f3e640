"""NVFP4: E2M1 elements, an E4M3 scale a block of 16 (or a 16x16 tile), and one fp32 amax a tensor.

    S_enc = 2688 / amax (2688 = 448 * 6)    scales the tensor so that its largest block gets the E4M3 scale 448
    s8    = e4m3(amax_block * fl(S_enc * fl(1/6)))
    q     = e2m1(x / (s8 / S_enc))

The order of these products is part of the format: folding the 1/6 elsewhere changes the scale of one block in 1,500.
What is stored is the amax; a decoded value is e2m1 * (s8 * amax / 2688), and a GEMM multiplies e2m1 * s8, which is
exact in bf16, and applies the amaxes of both operands at the end. (arXiv 2509.25149.)

The Hadamard transform rotates groups of 16 along the contraction, so that an outlier is shared by its group; done to
both operands of a GEMM it cancels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dlp.kernels.reference.fp4 import decode_e2m1, encode_e2m1, encode_e2m1_stochastic, pack_e2m1
from dlp.kernels.reference.fp8 import decode_fp8, encode_fp8
from dlp.kernels.reference.scales import FLT_MAX, Block, amax_of_blocks, from_blocks, spread, to_blocks, widen

GROUP = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
RHT_SIGNS = 0xD7E8  # bit i set: element i changes sign before the transform


def nvfp4_tensor_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Tensor amax fp32 -> (S_enc, S_dec = fl(1 / S_enc)), fp32; S_enc is 1 where amax is 0 or Inf."""
    usable = torch.isfinite(amax) & (amax > 0)
    quotient = torch.full_like(amax, E4M3_MAX * E2M1_MAX) / torch.where(usable, amax, torch.ones_like(amax))
    encode = torch.where(usable, quotient.clamp(max=FLT_MAX), torch.ones_like(amax))
    return encode, encode.reciprocal()


def nvfp4_block_scale(block_amax: Tensor, tensor_encode: Tensor) -> Tensor:
    """Block amaxes and S_enc, fp32 -> the block scales before they are rounded to E4M3."""
    return (block_amax * (tensor_encode * (1 / E2M1_MAX))).clamp(max=FLT_MAX)


def nvfp4_encode_scale(scale: Tensor, tensor_decode: Tensor) -> Tensor:
    """E4M3 block scales and S_dec -> the fp32 multipliers into E2M1; FLT_MAX where a scale is 0."""
    return (decode_fp8(scale) * tensor_decode).reciprocal().clamp(max=FLT_MAX)


def cast_nvfp4(x: Tensor, amax: Tensor, block: Block, *, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, C] and the agreed tensor amax (fp32 []) -> packed codes [rows, C/2] and E4M3 scales [row blocks, C/16].

    `random`: bytes [rows, C] for stochastic rounding, None rounds to nearest.
    """
    wide = to_blocks(widen(x), block)
    tensor_encode, tensor_decode = nvfp4_tensor_scale(amax)
    scale = encode_fp8(nvfp4_block_scale(amax_of_blocks(wide), tensor_encode), torch.float8_e4m3fn)
    scaled = from_blocks(wide * spread(nvfp4_encode_scale(scale, tensor_decode)), (x.shape[0], x.shape[1]))
    codes = encode_e2m1(scaled) if random is None else encode_e2m1_stochastic(scaled, random)
    return pack_e2m1(codes), scale


def decode_nvfp4(packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None) -> Tensor:
    """Packed codes [rows, C/2], E4M3 scales [row blocks, C/16] -> fp32 [rows, C].

    With the tensor amax: the values, fl(e2m1 * fl(fl(scale * amax) * fl(1/2688))). Without: e2m1 * scale, what a GEMM
    multiplies, exact in bf16.
    """
    factor = decode_fp8(scale)
    if amax is not None:
        factor = factor * amax * (1 / (E4M3_MAX * E2M1_MAX))
    wide = to_blocks(decode_e2m1(packed), block)
    return from_blocks(wide * spread(factor), (packed.shape[0], 2 * packed.shape[1]))


def nvfp4_alpha(a_amax: Tensor, b_amax: Tensor) -> Tensor:
    """What the accumulator of a GEMM is multiplied by: fl(fl(amaxA * amaxB) * fl(1 / (36 * 448 * 448)))."""
    return a_amax * b_amax * (1 / (E2M1_MAX * E2M1_MAX * E4M3_MAX * E4M3_MAX))


@lru_cache(maxsize=8)
def _signs(device: torch.device, signs: int) -> Tensor:
    """+1 or -1 for the elements of a group, fp32 [16, 1]."""
    flipped = (torch.full((GROUP,), signs, device=device) >> torch.arange(GROUP, device=device)) & 1
    return (1.0 - 2.0 * flipped)[:, None]


def rht16(x: Tensor, signs: int = RHT_SIGNS) -> Tensor:
    """x [rows, C], C a multiple of 16 -> bf16 [rows, C]: in each group of 16 along C, y = x D H16 / 4, rounded once.

    D flips the signs of `signs`, H16 is the Sylvester matrix; an fp32 butterfly with strides 1, 2, 4, 8, in that
    order. x is rounded to bf16 first if it is wider. A transposed view is the fast case: its groups lie along memory
    rows, and each butterfly adds whole rows.
    """
    rows, cols = x.shape
    lanes = x.detach().bfloat16().t().contiguous().view(cols // GROUP, GROUP, rows) * _signs(x.device, signs)
    for stride in (1, 2, 4, 8):
        left, right = lanes.view(cols // GROUP, GROUP // 2 // stride, 2, stride, rows).unbind(2)
        difference = left - right
        left.add_(right)
        right.copy_(difference)
    return lanes.mul_(0.25).bfloat16().view(cols, rows).t().contiguous()
