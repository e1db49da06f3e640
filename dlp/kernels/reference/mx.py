"""MXFP8: FP8 elements in blocks of 32 with a common power of two, stored as one E8M0 byte b with the value 2^(b-127).

There are two rules for scales. "ceil" is the smallest power of two without saturation; "floor" is the rule of the OCP MX
specification v1.0, which saturates amaxes in the upper part of a binade; training with "floor" diverges. torch's conversion to
E8M0 rounds to nearest; this module therefore computes the bytes from the bits of the binary32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dlp.kernels.reference.fp8 import (
    FP8_MAX,
    Block,
    Outs,
    Parts,
    amax_of_blocks,
    decode_fp8,
    encode_fp8,
    from_blocks,
    into,
    spread,
    to_blocks,
    watched,
    widen,
)

LARGEST, NAN = 0xFE, 0xFF
MANTISSA = 0x7FFFFF
LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def _exponent(v: Tensor) -> Tensor:
    return (v.view(torch.int32) >> 23) & 0xFF


def encode_e8m0(v: Tensor, *, round_up: bool) -> Tensor:
    """Return E8M0 bytes (uint8) of fp32 v >= 0: v rounded up or down to a power of two; saturating, NaN -> 0xFF.

    Values from 0 to 2^-127 give 0x00, and Inf gives 0xFE.
    """
    exponent, mantissa = _exponent(v), v.view(torch.int32) & MANTISSA
    exact = torch.where(exponent == 0, 0x400000, 0)  # the denormal 2^-127 has the mantissa 0x400000
    byte = exponent + (mantissa > exact) if round_up else exponent
    return byte.clamp(max=LARGEST).masked_fill(torch.isnan(v), NAN).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """Return fp32 2^(b-127) of E8M0 bytes; 0x00 is the denormal 2^-127, 0xFF is NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 0x00400000, bits)
    return bits.masked_fill(byte == NAN, 0x7FC00000).view(torch.float32)


def reciprocal_e8m0(byte: Tensor) -> Tensor:
    """Return fp32 2^(127-b) of E8M0 bytes, the multiplier of a cast; 0xFE gives the denormal 2^-127, 0xFF gives NaN."""
    return decode_e8m0((LARGEST - byte.int()).clamp(min=0).to(torch.uint8)).masked_fill(byte == NAN, torch.nan)


def mx_scale(amax: Tensor, dtype: torch.dtype, rule: str) -> Tensor:
    """Return E8M0 bytes of fp32 amaxes of blocks, for elements of FP8 `dtype`, by the rule "ceil" or "floor".

    "ceil": 2^ceil(log2(amax/max)), as the exact round-up of fl(amax * fl(1/max)); Inf gives 0xFE.
    "floor": 2^(floor(log2 amax) - emax); Inf and NaN give 0xFF: all values of the block are NaN.
    """
    if rule == "ceil":
        return encode_e8m0(amax * (1 / FP8_MAX[dtype]), round_up=True)
    byte = (_exponent(amax) - LARGEST_EXPONENT[dtype]).clamp(min=0)
    return byte.masked_fill(~torch.isfinite(amax), NAN).to(torch.uint8)


def cast_mxfp8(
    x: Tensor, block: Block, dtype: torch.dtype, *, rule: str = "ceil", out: Parts | None = None, flag: Tensor | None = None
) -> Parts:  # fmt: skip
    """Return codes [rows, C] of `dtype` and E8M0 bytes [row blocks, C blocks] of x [rows, C]; `rule`: "ceil" or "floor".

    The amax of a block ignores NaN under "ceil"; under "floor" it is NaN if an element is NaN.
    """
    wide = to_blocks(widen(watched(x, flag)), block)
    amax = amax_of_blocks(wide) if rule == "ceil" else wide.abs().amax((1, 3))
    scale = mx_scale(amax, dtype, rule)
    codes = encode_fp8(wide * spread(reciprocal_e8m0(scale)), dtype)
    return into(out, (from_blocks(codes, (x.shape[0], x.shape[1])), scale))


def cast_mxfp8_both(
    x: Tensor, block: Block, dtype: torch.dtype, *, rule: str = "ceil", outs: Outs = None, flag: Tensor | None = None
) -> tuple[Parts, Parts]:
    """Return `cast_mxfp8` of x and of x.t()."""
    row, col = outs or (None, None)
    cast = partial(cast_mxfp8, block=block, dtype=dtype, rule=rule)
    return cast(x, out=row, flag=flag), cast(x.t(), out=col)


def decode_mxfp8(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return fp32 values [rows, C] of codes [rows, C] with E8M0 bytes [row blocks, C blocks].

    The values are exact in bf16 for bytes of 10..246 (E4M3) or 17..239 (E5M2), and for blocks of zeros.
    """
    wide = to_blocks(decode_fp8(codes), block)
    return from_blocks(wide * spread(decode_e8m0(scale)), (codes.shape[0], codes.shape[1]))
