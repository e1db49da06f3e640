"""Affine quantization to integers of 1 to 8 bits: codes = round(x * (1 / scale)) + zero_point, in blocks of any shape.

The functions work on plain tensors and are bitwise equal to torchao's functions of the same names. The block size is
[b_0, b_1, ...] with one entry for each dimension of x; b_i divides x.shape[i], or is 0 for the full dimension. Scales and zero
points have one entry per block: x.shape[i] / b_i entries along dimension i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def code_range(bits: int, *, signed: bool = True) -> tuple[int, int]:
    """Return the smallest and the largest integer of `bits` bits. Raises ValueError unless `bits` is 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"the bits of a code must be 1 to 8; got {bits}")
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def _blocked(x: Tensor, block: Sequence[int]) -> Tensor:
    """Return x [s_0, s_1, ...] as [s_0 / b_0, b_0, s_1 / b_1, b_1, ...]. Raises ValueError if blocks do not divide the
    shape."""
    if len(block) != x.dim() or any(b and size % b for size, b in zip(x.shape, block, strict=True)):
        raise ValueError(
            f"blocks of {tuple(block)} do not divide a tensor of shape {tuple(x.shape)}: "
            f"choose for each dimension a block size that divides the size"
        )
    return x.reshape([n for size, b in zip(x.shape, block, strict=True) for n in ((size // b, b) if b else (1, size))])


def _spread(per_block: Tensor, x: Tensor, block: Sequence[int]) -> Tensor:
    """Return a tensor that has one entry per block, in a shape that broadcasts with `_blocked(x)`."""
    return per_block.reshape([n for size, b in zip(x.shape, block, strict=True) for n in (size // b if b else 1, 1)])


def choose_qparams_affine(
    x: Tensor, block: Sequence[int], codes: tuple[int, int], *, symmetric: bool, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scale and zero point of each block of x, from the smallest and the largest value of the block
    (`choose_qparams_affine_with_min_max`)."""
    parts = _blocked(x, block)
    inside = list(range(1, parts.dim(), 2))
    return choose_qparams_affine_with_min_max(
        parts.amin(inside), parts.amax(inside), codes, symmetric=symmetric, eps=eps, scale_dtype=scale_dtype,
        zero_point_dtype=zero_point_dtype,
    )  # fmt: skip


def choose_qparams_affine_with_min_max(
    low: Tensor, high: Tensor, codes: tuple[int, int], *, symmetric: bool, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scales and zero points, in the shape of `low`.

    low, high     smallest and largest value of each block
    codes         smallest and largest code
    symmetric     True: the zero point is the middle of the codes, and the scale maps the largest magnitude to half the range of
                  the codes. False: the codes span the range from min(low, 0) to max(high, 0)
    eps           smallest scale; None: the smallest normal number of the dtype of `low`
    scale_dtype   dtype of the scales; None: the dtype of `low`
    """
    first, last = codes
    least = torch.finfo(low.dtype).smallest_normal if eps is None else eps
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        scale = _divided(torch.maximum(-low, high), (last - first) / 2).clamp(min=least)
        zero = torch.full_like(scale, int((last + first + 1) / 2))
    else:
        scale = _divided(high - low, last - first).clamp(min=least)
        zero = (first - torch.round(low / scale)).clamp(first, last)
    return scale.to(scale_dtype or low.dtype), zero.to(zero_point_dtype)


def _divided(x: Tensor, by: float) -> Tensor:
    """Return x / by, computed with a tensor of `by`. If `by` is a Python number, torch on a GPU multiplies by the reciprocal,
    which gives other bits."""
    return x / torch.full_like(x, by)


def quantize_affine(
    x: Tensor, block: Sequence[int], scale: Tensor, zero_point: Tensor, codes: tuple[int, int],
    dtype: torch.dtype = torch.int8,
) -> Tensor:  # fmt: skip
    """Return the codes of x, in the shape of x: round(x * (1 / scale)) + zero_point, clipped to `codes`, where round rounds to
    nearest even.

    Raises ValueError if `dtype` cannot represent all codes.
    """
    holds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if codes[0] < holds.min or codes[1] > holds.max:
        raise ValueError(
            f"codes of {codes[0]} to {codes[1]} do not fit {dtype}: choose another dtype, such as torch.uint8, or "
            f"other codes"
        )
    return _rounded(x, block, scale, zero_point).clamp(*codes).reshape(x.shape).to(dtype)


def clipped_affine(
    x: Tensor, block: Sequence[int], scale: Tensor, zero_point: Tensor, codes: tuple[int, int]
) -> Tensor:  # fmt: skip
    """Return a bool mask in the shape of x: true for values that `quantize_affine` clips, and for NaN."""
    made = _rounded(x, block, scale, zero_point)
    return ((made >= codes[0]) & (made <= codes[1])).logical_not().reshape(x.shape)


def _rounded(x: Tensor, block: Sequence[int], scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the codes of x before clipping, in the shape of `_blocked(x)`."""
    inverse = 1.0 / _spread(scale, x, block)
    return torch.round(_blocked(x, block) * inverse) + _spread(zero_point, x, block)


def dequantize_affine(
    q: Tensor, block: Sequence[int], scale: Tensor, zero_point: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values (q - zero_point) * scale, in `dtype` and in the shape of the codes q."""
    values = _blocked(q, block).to(dtype) - _spread(zero_point, q, block).to(dtype)
    return (values * _spread(scale, q, block)).reshape(q.shape).to(dtype)
