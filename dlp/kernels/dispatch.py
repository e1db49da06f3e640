"""Choice of the input matrix and of the outputs of a cast kernel.

Kernels read rows of adjacent elements, in bf16 or fp32. If x is the transposed view of such a matrix, the kernel reads the
underlying matrix, and the rowwise and columnwise outputs are exchanged; nothing is copied. Any other matrix is copied first, in
the same dtype. The kernel writes parts to `out` (for example this rank's segment of a gather buffer), or to new storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from dlp.kernels import cuda
from dlp.kernels.reference.fp8 import Outs, Parts
from dlp.kernels.registry import DEVICE_AT, NATIVE

Wanted = tuple[Parts | None, Parts | None]  # parts of x and of x.t(); None: not requested
Flags = Sequence[Tensor | None]  # flag of each cast, fp32 [], which a non-finite value sets to NaN; None: not requested
Launch = Callable[[], None]


class Launches(NamedTuple):
    """Prepared casts of many matrices.

    observe   launches that write `amaxes`
    amaxes    for each matrix the amaxes of the matrix and of the transpose; None: not needed, or not requested
    cast      launches that read `amaxes`; between `observe` and `cast`, the caller may replace the amaxes in place by the
              maximum over ranks
    """

    observe: Sequence[Launch]
    amaxes: Sequence[tuple[Tensor | None, Tensor | None]]
    cast: Sequence[Launch]


def has_kernel(x: Tensor) -> bool:
    """Return whether kernels can read x: a bf16 or fp32 matrix on a device with kernels."""
    return DEVICE_AT[x.get_device()] in NATIVE and x.dim() == 2 and x.dtype in cuda.INPUTS


def is_readable(x: Tensor, *_: object) -> bool:
    """Return whether kernels can read x without a copy; for the kernel table, which passes further arguments."""
    return cuda.readable(x)


def adjacent(x: Tensor) -> tuple[Tensor, bool]:
    """Return a matrix that kernels can read, and whether the matrix is the transpose of x."""
    if cuda.readable(x):
        return x, False
    return (x.t(), True) if cuda.readable(x.t()) else (x.contiguous(), False)


def rowwise(
    x: Tensor, out: Parts | None, empty: Callable[[Sequence[int]], Parts],
    launch: Callable[[Tensor, Parts | None, Parts | None], None],
) -> Parts:  # fmt: skip
    """Return the parts of the rowwise operand of x [rows, C].

    empty    function: shape of an operand -> newly allocated parts
    launch   function of a matrix, rowwise parts and columnwise parts, which launches the cast; None: parts not requested
    """
    matrix, flipped = adjacent(x)
    made = out if out is not None else empty(x.shape)
    launch(matrix, *((None, made) if flipped else (made, None)))
    return made


def both(
    x: Tensor, outs: Outs, empty: Callable[[Sequence[int]], Parts],
    launch: Callable[[Tensor, Parts, Parts], None],
) -> tuple[Parts, Parts]:  # fmt: skip
    """Return the parts of the operands of x and of x.t(), from one launch."""
    matrix, flipped = adjacent(x)
    row, col = outs if outs is not None else (empty(x.shape), empty(x.shape[::-1]))
    launch(matrix, *((col, row) if flipped else (row, col)))
    return row, col
