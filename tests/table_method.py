"""Independent implementation of the element formats in numpy: list all code points, and choose the nearest.

The code shares nothing with dlp. It computes the expected results of test_sweeps.py and, for make_golden_rowwise.py and
make_golden_tile.py, of golden_rowwise.json and golden_tile.json. In shapes, C is the number of columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def fp8_points(exponent_bits: int, mantissa_bits: int, num_finite: int) -> npt.NDArray[np.float64]:
    """The values of the non-negative finite codes 0, 1, 2, ... of a format with subnormals and IEEE bias."""
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(num_finite)
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


POINTS = {
    "e4m3": fp8_points(4, 3, 0x7F),
    "e5m2": fp8_points(5, 2, 0x7C),
    "e2m1": fp8_points(2, 1, 8),
}
SIGN = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}
NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}


def encode(x: Floats, element: str) -> Codes:
    """Encode fp32 as codes: the nearest code point, ties to the even code, larger values to the largest code. The sign
    is kept except for NaN."""
    points = POINTS[element]
    magnitude = np.minimum(np.abs(np.where(np.isnan(x), 0, x)).astype(np.float64), points[-1])
    upper = np.clip(np.searchsorted(points, magnitude), 1, len(points) - 1)
    lower = upper - 1
    below, above = magnitude - points[lower], points[upper] - magnitude
    code = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, lower)
    signed = code | np.where(np.signbit(x), SIGN[element], 0)
    return np.where(np.isnan(x), NAN[element], signed).astype(np.uint8)


def encode_stochastic(x: Floats, random: Codes) -> Codes:
    """Encode fp32 as E2M1 codes: the upper neighbour iff floor(256 f) + random >= 256, where f is the position between
    the neighbours."""
    points = POINTS["e2m1"]
    magnitude = np.minimum(np.abs(np.where(np.isnan(x), np.inf, x)).astype(np.float64), 6.0)
    lower = np.clip(np.searchsorted(points, magnitude, side="right") - 1, 0, len(points) - 2)
    f = (magnitude - points[lower]) / (points[lower + 1] - points[lower])
    code = lower + (np.floor(256 * f) + random >= 256)
    return (code | np.where(np.signbit(x) & ~np.isnan(x), 8, 0)).astype(np.uint8)


def decode(codes: Codes, element: str) -> Floats:
    """Decode finite codes to fp32."""
    values = POINTS[element][codes & (SIGN[element] - 1)]
    return np.where(codes & SIGN[element], -values, values).astype(np.float32)


def scale_from_amax(amax: Floats, largest: float, power_of_two: bool, epsilon: float, inf_scale: float) -> Floats:
    """Return the multiplier of each amax, computed in a loop over the amaxes."""
    scales = []
    with np.errstate(over="ignore"):
        for value in amax.astype(np.float32):
            value = np.float32(epsilon) if value < np.float32(epsilon) else value
            if value == 0 or not np.isfinite(value):
                scales.append(np.float32(1))
                continue
            scale = np.float32(largest) / value
            scale = np.float32(inf_scale) if np.isinf(scale) else scale
            scales.append(np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_of_two else scale)
    return np.array(scales, dtype=np.float32)


def to_bf16(x: Floats) -> Floats:
    """Round fp32 to bf16, to nearest even (finite values and Inf)."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded, bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def blocks_of(x: Floats, width: int) -> Floats:
    """Divide x [rows, C] into [rows, blocks, width], with zeros at the end of a partial block."""
    filled = np.pad(x, ((0, 0), (0, -x.shape[1] % width)))
    return filled.reshape(x.shape[0], -1, width)


def amaxes(blocks: Floats) -> Floats:
    """The amax along the last dimension; NaN counts as 0."""
    return np.max(np.abs(np.where(np.isnan(blocks), 0, blocks)), axis=-1)


def quantize_fp8_block(x: Floats, element: str, power_of_two: bool, inf_scale: float) -> tuple[Codes, Floats]:
    """1x128 blocks: codes [rows, C] and scale_inv [rows, ceil(C / 128)]."""
    blocks = blocks_of(x, 128)
    amax = amaxes(blocks)
    scale = scale_from_amax(amax.ravel(), POINTS[element][-1], power_of_two, 0.0, inf_scale).reshape(amax.shape)
    codes = encode(scaled(blocks, scale), element)
    return codes.reshape(len(x), -1)[:, : x.shape[1]], np.float32(1) / scale


def quantize_mxfp8(x: Floats, element: str) -> tuple[Codes, Codes]:
    """1x32 blocks: codes [rows, C] and E8M0 bytes with the smallest power of two that is >= amax / max, computed
    exactly."""
    blocks = blocks_of(x, 32)
    amax = amaxes(blocks).astype(np.float64)
    fraction, exponent = np.frexp(np.where(np.isinf(amax), 1, amax) / POINTS[element][-1])  # fraction in [0.5, 1)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    exponent = np.where(amax == 0, -127, np.where(np.isinf(amax), 127, np.clip(exponent, -127, 127)))
    codes = encode(scaled(blocks, (2.0 ** -exponent.astype(np.float64)).astype(np.float32)), element)
    return codes.reshape(x.shape), (exponent + 127).astype(np.uint8)


def quantize_nvfp4(x: Floats, amax: np.float32, random: Codes | None = None) -> tuple[Codes, Codes]:
    """1x16 blocks with a tensor amax: codes [rows, C] (one per byte) and E4M3 scale codes."""
    f32, flt_max = np.float32, np.finfo(np.float32).max
    blocks = blocks_of(x, 16)
    with np.errstate(over="ignore", divide="ignore"):
        encode_scale = f32(1) if amax == 0 or np.isinf(amax) else min(f32(2688) / f32(amax), flt_max)
        decode_scale = f32(1) / encode_scale
        folded = f32(encode_scale * np.uint32(0x3E2AAAAB).view(f32))
        scale = encode(np.minimum(amaxes(blocks) * folded, flt_max), "e4m3")
        multiplier = np.minimum(f32(1) / (decode(scale, "e4m3") * decode_scale), flt_max)
    y = scaled(blocks, multiplier)
    codes = encode(y, "e2m1") if random is None else encode_stochastic(y, blocks_of(random, 16))
    return codes.reshape(x.shape), scale


def scaled(blocks: Floats, scale: Floats) -> Floats:
    """Return x * scale, rounded to fp32, with one scale per block."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (blocks * scale[..., None]).astype(np.float32)
