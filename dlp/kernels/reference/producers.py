"""What makes a linear's x, RMSNorm and SwiGLU, their gradients, and sums of columns: in fp32, rounded once at the end.

Sums run in a fixed order, so that RMSNorm and the sums of columns have the same bits on every device. The exponential in
SwiGLU differs between devices by units in the last place: there bits are equal on one device only.

    rms_norm   y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) of a row     Zhang and Sennrich, arXiv 1910.07467
    swiglu     h = silu(gate) * up, silu(g) = g / (1 + exp(-g))                     Shazeer, arXiv 2002.05202
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels.reference.scales import widen

LANES, WARPS, OCTET = 32, 4, 8  # of the threads that share a row, and what each takes at a time
NORM_PARTS = 512  # sums over every 512th row
TILE = 128
PATCHES = (8, 2, 8)  # a tile's rows: warps, patches of a warp, rows of a patch
GROUPS = 32


def by_halves(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension of 2^n: its second half added to its first until one is left."""
    while x.shape[dim] > 1:
        first, second = x.chunk(2, dim)
        x = first + second
    return x.squeeze(dim)


def in_order(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, from 0 on, first to last."""
    total = x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])
    for part in x.unbind(dim):
        total = total + part
    return total


def row_sums(x: Tensor) -> Tensor:
    """fp32 [rows, C] -> [rows]. Octet i of a row belongs to thread i % 128: octets by halves, those of a thread in order,
    lanes by halves, warps by halves."""
    rows, cols = x.shape
    steps = -(-cols // (WARPS * LANES * OCTET))
    octets = _padded(x, cols=steps * WARPS * LANES * OCTET).view(rows, steps, WARPS, LANES, OCTET)
    return by_halves(by_halves(in_order(by_halves(octets, 4), 1), 2), 1)


def _row_means(x: Tensor) -> Tensor:
    sums = row_sums(x)
    return sums / torch.full_like(sums, x.shape[1])  # by a tensor: a GPU multiplies by the reciprocal of a number


def _sqrt(x: Tensor) -> Tensor:
    """The nearest fp32 to the square root: by way of fp64, since on some CPUs torch's own of fp32 is not the nearest."""
    return x.double().sqrt().float()


def sum_parts(parts: Tensor) -> Tensor:
    """fp32 [count, C] -> [C]: every 32nd part in order, then those sums by halves."""
    return by_halves(in_order(_groups(parts, GROUPS), 0), 0)


def _groups(x: Tensor, size: int) -> Tensor:
    """[rows, C] -> [groups, size, C]; the last group is filled up with zeros."""
    groups = -(-len(x) // size)
    return _padded(x, rows=groups * size).view(groups, size, x.shape[1])


def _padded(x: Tensor, rows: int = 0, cols: int = 0) -> Tensor:
    """Zeros appended up to so many rows and columns."""
    return F.pad(x, (0, max(0, cols - x.shape[1]), 0, max(0, rows - len(x))))


def column_sums(x: Tensor) -> Tensor:
    """x [rows, C] -> fp32 [C]: `tile_sums`, then `sum_parts`."""
    return sum_parts(tile_sums(x))


def tile_sums(x: Tensor) -> Tensor:
    """x [rows, C] -> fp32 [tiles, C], of 128 rows each: eight rows in order, pairs of these, then by halves."""
    tiles = _groups(widen(x), TILE).unflatten(1, PATCHES)
    eights = tiles[..., 0, :]
    for line in range(1, PATCHES[2]):
        eights = eights + tiles[..., line, :]
    return by_halves(by_halves(eights, 2), 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, C], weight [C] -> y [rows, C] in the dtype of x, rstd fp32 [rows]."""
    wide = widen(x)
    rstd = _sqrt(_row_means(wide * wide) + eps).reciprocal()
    return (wide * rstd[:, None] * weight.float()).to(x.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy, x [rows, C], weight [C], rstd [rows] -> dx [rows, C] in the dtype of x, dweight fp32 [C]. `add` [rows, C] in its
    dtype is added to the rounded dx.

    With g = dy * weight and n = x * rstd: dx = (g - n * mean(g * n)) * rstd, dweight = the sum of dy * n over rows.
    """
    wide, n = widen(dy), widen(x) * rstd[:, None]
    g = wide * weight.float()
    dx = (g - n * _row_means(g * n)[:, None]) * rstd[:, None]
    dx = dx.to(x.dtype)
    return dx if add is None else dx + add, sum_parts(in_order(_groups(wide * n, NORM_PARTS), 0))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [rows, C] -> h [rows, C] in their dtype."""
    wide = widen(gate)
    return (wide * _sigmoid(wide) * widen(up)).to(gate.dtype)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dh, gate, up [rows, C] -> dgate, dup [rows, C] in their dtype.

    With s = 1 / (1 + exp(-gate)): dup = dh * gate * s, dgate = dh * up * s * (1 + gate * (1 - s)).
    """
    wide, d = widen(gate), widen(dh)
    s = _sigmoid(wide)
    dgate = d * widen(up) * (s * (1 + wide * (1 - s)))
    return dgate.to(gate.dtype), (d * (wide * s)).to(gate.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return (1 + (-x).exp()).reciprocal()
