"""MXFP8: FP8 elements in blocks of 32 that share a power of two, stored as one E8M0 byte b meaning 2^(b-127).

The scale rule is a choice. "ceil" is the smallest power of two that lets no element saturate; "floor" is the rule of
the OCP MX specification v1.0, which saturates amaxes in the upper part of a binade and diverges in training.
E8M0 has neither sign nor zero, so torch's conversion (to nearest) cannot make these bytes: they are cut from the bits
of the binary32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels.reference.fp8 import FP8_MAX, decode_fp8, encode_fp8
from dlp.kernels.reference.scales import Block, amax_of_blocks, from_blocks, spread, to_blocks, widen

MX_BLOCK = 32
SCALE_RULES = ("ceil", "floor")
LARGEST, NAN = 0xFE, 0xFF
MANTISSA = 0x7FFFFF
LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def _exponent(v: Tensor) -> Tensor:
    return (v.view(torch.int32) >> 23) & 0xFF


def encode_e8m0(v: Tensor, *, round_up: bool) -> Tensor:
    """fp32 v >= 0 -> E8M0 bytes (uint8), the next power of two not below v, or not above it; saturating, NaN -> 0xFF.

    0 and everything up to 2^-127 give 0x00, Inf gives 0xFE.
    """
    exponent, mantissa = _exponent(v), v.view(torch.int32) & MANTISSA
    exact = torch.where(exponent == 0, 0x400000, 0)  # a denormal reaches 2^-127 with half of its mantissa
    byte = exponent + (mantissa > exact) if round_up else exponent
    return byte.clamp(max=LARGEST).masked_fill(torch.isnan(v), NAN).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """E8M0 bytes -> fp32 2^(b-127); 0x00 is the denormal 2^-127, 0xFF is NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 0x00400000, bits)
    return bits.masked_fill(byte == NAN, 0x7FC00000).view(torch.float32)


def reciprocal_e8m0(byte: Tensor) -> Tensor:
    """E8M0 bytes -> fp32 2^(127-b), the multiplier into the block; 0xFE gives the denormal 2^-127, 0xFF NaN."""
    return decode_e8m0((LARGEST - byte.int()).clamp(min=0).to(torch.uint8)).masked_fill(byte == NAN, torch.nan)


def mx_scale(amax: Tensor, dtype: torch.dtype, rule: str) -> Tensor:
    """Block amaxes fp32 -> E8M0 bytes for elements of FP8 `dtype`, by rule "ceil" or "floor".

    "ceil": 2^ceil(log2(amax/max)), as the exact round-up of fl(amax * fl(1/max)); Inf gives 0xFE.
    "floor": 2^(floor(log2 amax) - emax); Inf and NaN give 0xFF, the whole block is NaN then.
    """
    if rule == "ceil":
        return encode_e8m0(amax * (1 / FP8_MAX[dtype]), round_up=True)
    byte = (_exponent(amax) - LARGEST_EXPONENT[dtype]).clamp(min=0)
    return byte.masked_fill(~torch.isfinite(amax), NAN).to(torch.uint8)


def cast_mxfp8(x: Tensor, block: Block, dtype: torch.dtype, *, rule: str = "ceil") -> tuple[Tensor, Tensor]:
    """x [rows, C] -> codes [rows, C] of `dtype` and E8M0 bytes [row blocks, C blocks].

    The amax of a block ignores NaN under "ceil" and keeps it under "floor".
    """
    wide = to_blocks(widen(x), block)
    amax = amax_of_blocks(wide) if rule == "ceil" else wide.abs().amax((1, 3))
    scale = mx_scale(amax, dtype, rule)
    codes = encode_fp8(wide * spread(reciprocal_e8m0(scale)), dtype)
    return from_blocks(codes, (x.shape[0], x.shape[1])), scale


def decode_mxfp8(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    """codes [rows, C], E8M0 bytes [row blocks, C blocks] -> fp32 [rows, C].

    The values are exact in bf16 for bytes of 10..246 (E4M3) or 17..239 (E5M2) and for the zero block's 0.
    """
    wide = to_blocks(decode_fp8(codes), block)
    return from_blocks(wide * spread(decode_e8m0(scale)), (codes.shape[0], codes.shape[1]))
