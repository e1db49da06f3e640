"""FP8 elements and casts: E4M3 (max 448, no Inf) and E5M2 (max 57344). A cast saturates and never returns Inf.

torch's conversion rounds to nearest even, but depending on version and format does not saturate, and preserves the sign of NaN:
the code clamps before and corrects NaN after the conversion.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels.reference.scales import (
    Block,
    amax,
    amax_of_blocks,
    from_blocks,
    scale_from_amax,
    spread,
    to_blocks,
    widen,
)

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def encode_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP8 codes of fp32 values: nearest even, saturating (also Inf), NaN -> 0x7F without sign, with the sign of zero."""
    largest = FP8_MAX[dtype]
    codes = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    not_nan_sign = (codes & 0x7F).add_(1).bitwise_and_(0x80).bitwise_not_()  # NaN is 0x7F or 0xFF: adding 1 carries
    return codes.bitwise_and_(not_nan_sign).view(dtype)


@lru_cache(maxsize=8)
def _decode_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


def decode_fp8(codes: Tensor) -> Tensor:
    """Return the exact fp32 values of FP8 codes, by a table: torch's conversion is five times slower on a CPU."""
    table = _decode_table(codes.dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def cast_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous codes `encode(fl(x * scale))` of x [rows, C] in any float dtype and a broadcastable fp32 scale."""
    return encode_fp8(widen(x) * scale, dtype)


class Fp8Scale(NamedTuple):
    """Source of the scale of a tensor: `scale_from_amax` of `amax`, fp32 [], or the given `scale`, fp32 []. A cast raises
    `staging`, fp32 [], to max |x|."""

    amax: Tensor | None = None
    scale: Tensor | None = None
    staging: Tensor | None = None
    power_of_two: bool = False
    epsilon: float = 0.0


def cast_fp8_tensor(x: Tensor, dtype: torch.dtype, source: Fp8Scale) -> tuple[Tensor, Tensor]:
    """Return codes [rows, C] of `dtype` and fp32 scale_inv [] of x [rows, C]."""
    if (source.amax is None) == (source.scale is None):
        raise ValueError("a per-tensor cast takes the scale from amax or from scale: pass exactly one of the two")
    scale = source.scale
    if source.amax is not None:
        scale = scale_from_amax(source.amax, FP8_MAX[dtype], power_of_two=source.power_of_two, epsilon=source.epsilon)
    assert scale is not None
    if source.staging is not None:
        source.staging.copy_(torch.maximum(source.staging, amax(x)))
    return cast_fp8(x, scale, dtype), scale.reciprocal()


def cast_fp8_block(
    x: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return codes [rows, C] of `dtype` and fp32 scale_inv [row blocks, C blocks] of x [rows, C]; edge blocks may be partial.

    If the quotient max/amax overflows, the scale is the largest finite value of the dtype of x.
    """
    wide = to_blocks(widen(x), block)
    scale = scale_from_amax(
        amax_of_blocks(wide), FP8_MAX[dtype], power_of_two=power_of_two, epsilon=epsilon,
        inf_scale=torch.finfo(x.dtype).max,
    )  # fmt: skip
    codes = encode_fp8(wide * spread(scale), dtype)
    return from_blocks(codes, (x.shape[0], x.shape[1])), scale.reciprocal()


def decode_fp8_block(codes: Tensor, scale_inv: Tensor, block: Block) -> Tensor:
    """Return fp32 values [rows, C] of codes [rows, C] with fp32 scale_inv [row blocks, C blocks]."""
    wide = to_blocks(decode_fp8(codes), block)
    return from_blocks(wide * spread(scale_inv), (codes.shape[0], codes.shape[1]))
