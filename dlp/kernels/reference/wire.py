"""FP8 codes for contributions of a reduction: E4M3 with one fp32 scale per 128 features, and the sum of the contributions.

Each contribution is quantized once and decoded to fp32 before it is added; partial sums stay in fp32. The error of an element x
in a block with the largest magnitude A is at most |x| * 2**-4 + A / 448 * 2**-10: half a step of E4M3 for normal numbers, or
half a step of subnormal numbers.

scale_inv also carries non-finite values: a block with a NaN has scale_inv NaN, a block with an Inf has scale_inv Inf, and no
value of such a block decodes to a finite value. A block of zeros has scale_inv 1. scale_inv is never denormal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels.reference.fp8 import FP8_MAX, decode_fp8, encode_fp8, with_own

BLOCK = 128
E4M3 = torch.float8_e4m3fn
Own = tuple[int, Tensor, Tensor]  # index of a rank whose contribution is stored elsewhere, its codes, its scale_inv
LEAST_AMAX = FP8_MAX[E4M3] * 2.0**-126  # a smaller amax would give a denormal scale_inv


def pack_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes [..., F] and fp32 scale_inv [..., ceil(F/128)] of x [..., F]; the last block may be partial."""
    features = x.shape[-1]
    blocks = F.pad(x.float(), (0, -features % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)  # NaN or Inf if the block contains NaN or Inf
    usual = amax.isfinite() & (amax > 0)
    largest = torch.full_like(
        amax, FP8_MAX[E4M3]
    )  # a tensor, because torch computes number / tensor as number * (1 / tensor), which rounds twice
    scale = torch.where(usual, largest / amax.clamp_min(LEAST_AMAX), 1.0)
    codes = encode_fp8(blocks * scale[..., None], E4M3).flatten(-2)[..., :features]
    return codes.contiguous(), torch.where(amax.isfinite(), scale.reciprocal(), amax)


def unpack_fp8(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the fp32 values [..., F] of codes: the inverse of `pack_fp8`, up to rounding."""
    features = codes.shape[-1]
    return decode_fp8(codes.contiguous()) * scale_inv.repeat_interleave(BLOCK, -1)[..., :features]


def sum_fp8(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, own: Own | None = None) -> Tensor:
    """Return the fp32 sum [..., F] over ranks 0, 1, ... of codes [R, ..., F] with scales, rounded once to `dtype`. `own`: index
    of a rank whose codes and scales are stored elsewhere, and these tensors."""
    pairs = (None, None) if own is None else ((own[0], own[1]), (own[0], own[2]))
    first, *others = zip(with_own(codes, pairs[0]), with_own(scale_inv, pairs[1]), strict=True)
    total = unpack_fp8(*first)
    for of_rank in others:
        total = total + unpack_fp8(*of_rank)
    return total.to(dtype)
