"""From a cast to its kernel: which matrix the kernel reads, and where it writes the parts of both orientations.

Kernels read rows of adjacent elements, in bf16 or fp32. For the transposed view of such a matrix the kernel reads the matrix
itself and writes the other orientation, without a copy. A matrix that is neither is copied first, in its own dtype. Parts are
written to `out`, the tensors of one orientation (such as this rank's segment of a gather buffer), or into new storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import cuda
from dlp.kernels.registry import DEVICE_AT, NATIVE

Parts = Sequence[Tensor]
Outs = tuple[Parts, Parts] | None  # of x, of x.t()
Wanted = tuple[Parts | None, Parts | None]  # the same, None for what is not wanted
Flags = Sequence[Tensor | None]  # of many casts, see casts.py
Launch = Callable[[], None]


class Launches(NamedTuple):
    """The casts of many matrices, prepared: `observe` writes `amaxes`, of each matrix and of its transpose (None: there is
    nothing to know, or it is not wanted), and `cast` reads them. In between they may be raised in place."""

    observe: Sequence[Launch]
    amaxes: Sequence[tuple[Tensor | None, Tensor | None]]
    cast: Sequence[Launch]


def has_kernel(x: Tensor) -> bool:
    """Whether kernels can read x, a matrix on a device that they run on."""
    return DEVICE_AT[x.get_device()] in NATIVE and x.dim() == 2 and x.dtype in cuda.INPUTS


def adjacent(x: Tensor) -> tuple[Tensor, bool]:
    """A matrix that kernels can read, and whether it is the transpose of x."""
    if cuda.readable(x):
        return x, False
    return (x.t(), True) if cuda.readable(x.t()) else (x.contiguous(), False)


def rowwise(
    x: Tensor, out: Parts | None, empty: Callable[[Sequence[int]], Parts],
    launch: Callable[[Tensor, Parts | None, Parts | None], None],
) -> Parts:  # fmt: skip
    """The parts of x [rows, C]. `empty`: storage for an operand of a shape; `launch`: the kernel, for a matrix, into the
    parts of its rows and those of its columns, None where they are not wanted."""
    matrix, flipped = adjacent(x)
    made = out if out is not None else empty(x.shape)
    launch(matrix, *((None, made) if flipped else (made, None)))
    return made


def both(
    x: Tensor, outs: Outs, empty: Callable[[Sequence[int]], Parts],
    launch: Callable[[Tensor, Parts, Parts], None],
) -> tuple[Parts, Parts]:  # fmt: skip
    """The parts of x and of x.t(), by one launch."""
    matrix, flipped = adjacent(x)
    row, col = outs if outs is not None else (empty(x.shape), empty(x.shape[::-1]))
    launch(matrix, *((col, row) if flipped else (row, col)))
    return row, col


def into(out: Parts | None, parts: Parts) -> Parts:
    """Parts that a reference made, copied to where they are wanted."""
    if out is None:
        return parts
    torch._foreach_copy_(list(out), list(parts))
    return out


def both_into(outs: Outs, cast: Callable[[Tensor], Parts], x: Tensor) -> tuple[Parts, Parts]:
    """Two casts by a reference, of x and of x.t()."""
    row, col = outs if outs is not None else (None, None)
    return into(row, cast(x)), into(col, cast(x.t()))
