"""RMSNorm and column sums, forward and backward, in fp32 with one rounding at the end.

Sums run in a fixed order, so that the bits are the same on every device.

    rms_norm   y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) of a row     Zhang and Sennrich, arXiv 1910.07467
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels.reference.fp8 import widen

LANES, WARPS, OCTET = 32, 4, 8  # threads per warp, warps per row, adjacent elements that a thread reads at a time
NORM_PARTS = 512  # number of partial sums over rows: part i sums the rows i, i + 512, ...
TILE = 128  # rows of a tile of `tile_sums`
PATCHES = (8, 2, 8)  # rows of a tile as (warps, patches per warp, rows per patch)
GROUPS = 32  # number of intermediate sums in `sum_parts`: sum i adds the parts i, i + 32, ...


def by_halves(x: Tensor, dim: int) -> Tensor:
    """Return the sum along a dimension of size 2^n: repeatedly add the second half to the first half."""
    while x.shape[dim] > 1:
        first, second = x.chunk(2, dim)
        x = first + second
    return x.squeeze(dim)


def in_order(x: Tensor, dim: int) -> Tensor:
    """Return the sum along a dimension, from the first to the last element, starting at 0."""
    total = x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])
    for part in x.unbind(dim):
        total = total + part
    return total


def row_sums(x: Tensor) -> Tensor:
    """Return the row sums [rows] of fp32 [rows, C]. Octet i of a row belongs to thread i % 128. Sums run by halves within an
    octet, in order over the octets of a thread, by halves over lanes, and by halves over warps."""
    rows, cols = x.shape
    steps = -(-cols // (WARPS * LANES * OCTET))
    octets = _padded(x, cols=steps * WARPS * LANES * OCTET).view(rows, steps, WARPS, LANES, OCTET)
    return by_halves(by_halves(in_order(by_halves(octets, 4), 1), 2), 1)


def _row_means(x: Tensor) -> Tensor:
    sums = row_sums(x)
    return sums / torch.full_like(
        sums, x.shape[1]
    )  # a tensor as divisor, because torch on a GPU multiplies by the reciprocal of a Python number


def _sqrt(x: Tensor) -> Tensor:
    """Return the nearest fp32 to the square root, by fp64: torch's fp32 square root is not the nearest on some CPUs."""
    return x.double().sqrt().float()


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum [C] of fp32 parts [count, C]: the parts i, i + 32, ... are added in order, then the 32 sums by halves."""
    return by_halves(in_order(_groups(parts, GROUPS), 0), 0)


def _groups(x: Tensor, size: int) -> Tensor:
    """Return x [rows, C] as [groups, size, C]; the last group is zero-padded."""
    groups = -(-len(x) // size)
    return _padded(x, rows=groups * size).view(groups, size, x.shape[1])


def _padded(x: Tensor, rows: int = 0, cols: int = 0) -> Tensor:
    """Return x zero-padded to at least this number of rows and columns."""
    return F.pad(x, (0, max(0, cols - x.shape[1]), 0, max(0, rows - len(x))))


def column_sums(x: Tensor) -> Tensor:
    """Return the column sums fp32 [C] of x [rows, C]: `sum_parts` of `tile_sums`."""
    return sum_parts(tile_sums(x))


def tile_sums(x: Tensor) -> Tensor:
    """Return the column sums fp32 [tiles, C] of tiles of 128 rows of x [rows, C]. The 8 rows of a patch are added in order,
    then the 2 patches of a warp, then the 8 warps by halves."""
    tiles = _groups(widen(x), TILE).unflatten(1, PATCHES)
    eights = tiles[..., 0, :]
    for line in range(1, PATCHES[2]):
        eights = eights + tiles[..., line, :]
    return by_halves(by_halves(eights, 2), 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, rstd): y [rows, C] in the dtype of x, rstd fp32 [rows]. x is [rows, C], weight is [C]."""
    wide = widen(x)
    rstd = _sqrt(_row_means(wide * wide) + eps).reciprocal()
    return (wide * rstd[:, None] * weight.float()).to(x.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight): dx [rows, C] in the dtype of x, dweight fp32 [C]. dy and x are [rows, C], weight is [C], rstd is
    [rows]. `add` [rows, C], in the dtype of x, is added to the rounded dx.

    With g = dy * weight and n = x * rstd: dx = (g - n * mean(g * n)) * rstd, and dweight is the sum of dy * n over rows.
    """
    wide, n = widen(dy), widen(x) * rstd[:, None]
    g = wide * weight.float()
    dx = (g - n * _row_means(g * n)[:, None]) * rstd[:, None]
    dx = dx.to(x.dtype)
    return dx if add is None else dx + add, sum_parts(in_order(_groups(wide * n, NORM_PARTS), 0))
