"""Amaxes, and casts to FP8 with one scale per tensor or per row: CUDA kernels, or the plain-torch reference with the same bits.

    amax, amax_lines        max |x| of the matrix, or of every row and column
    cast_fp8_tensor         one scale per tensor, computed from an amax or given
    cast_fp8_rowwise        one scale per row, computed from the row's amax

An operation without a kernel for its arguments runs the reference, for example for input dtypes other than bf16 and fp32. A
matrix may be a `LazyMatrix`, whose elements the kernel computes while reading the inputs (lazy_matrix.py).

A cast returns the parts of the operand, written into `out` if given. A cast sets `flag`, fp32 [], to NaN if a value of x is not
finite; the host may read the flag later, so that the host does not wait for the cast. `..._both` returns the operands of x and
of x.t() from one read, bitwise equal to two casts. `..._batch` prepares launches that cast many matrices into existing
outputs, on CUDA only. Casts with a scale per block are in casts_blocks.py, NVFP4 casts in casts_fp4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_rowwise, dispatch, reference
from dlp.kernels.cuda import MATRIX, TensorJob, Words
from dlp.kernels.cuda_rowwise import RowwiseJob
from dlp.kernels.dispatch import Flags, Launch, Launches, Wanted
from dlp.kernels.lazy_matrix import LazyMatrix, lazy_operation, opened
from dlp.kernels.reference.fp8 import Fp8Scale, Outs, Parts
from dlp.kernels.registry import preparing

RowwisePart = tuple[Parts, Tensor]  # parts of one orientation, and the amaxes


amax = lazy_operation(reference.amax)
amax_lines = lazy_operation(reference.amax_lines)
cast_fp8_tensor = lazy_operation(reference.cast_fp8_tensor)
cast_fp8_tensor_both = lazy_operation(reference.cast_fp8_tensor_both)
cast_fp8_rowwise = lazy_operation(reference.cast_fp8_rowwise)
cast_fp8_rowwise_both = lazy_operation(reference.cast_fp8_rowwise_both)


def has_batches(x: Tensor) -> bool:
    """Return whether batched casts can read matrices with the device, dtype and strides of x without a copy."""
    return dispatch.has_kernel(x) and cuda.readable(x)


def amax_kernel(x: Tensor | LazyMatrix, dim: int | None = None) -> Tensor:
    if isinstance(x, LazyMatrix):
        found = x.amax() if dim is None else None
        return amax(x.value, dim) if found is None else found
    matrix, flipped = dispatch.adjacent(x)
    if dim is not None:
        rows, cols = _amaxes_of_lines(matrix, (dim % 2 == 1) != flipped, (dim % 2 == 0) != flipped)
        return cols if rows is None else rows
    out = torch.empty((), device=x.device)
    cuda.amax(matrix, out)
    return out


def amax_lines_kernel(x: Tensor | LazyMatrix) -> tuple[Tensor, Tensor]:
    x, words = opened(x)
    matrix, flipped = dispatch.adjacent(x)
    lines = _amaxes_of_lines(matrix, True, True, words)
    return lines[::-1] if flipped else lines


def _amaxes_of_lines(matrix: Tensor, rows: bool, cols: bool, words: Words = MATRIX) -> tuple[Any, Any]:
    """Return the amaxes of the rows and of the columns, as requested, of a matrix that kernels can read.

    words   packed arguments of the producer that computes the elements (`cuda_producers`); MATRIX: none
    """
    sizes = [size if wanted else 0 for size, wanted in zip(matrix.shape, (rows, cols), strict=True)]
    whole = torch.empty(sum(sizes), device=matrix.device)
    cuda.set_zero(whole)
    lines = whole.split(sizes)
    made = lines[0] if rows else None, lines[1] if cols else None
    cuda_rowwise.amax_lines(matrix, *made, words)
    return made


# One scale per tensor


def _tensor_job(x: Tensor, row: Parts | None, col: Parts | None, source: Fp8Scale, flag: Tensor | None) -> TensorJob:
    codes, codes_t = (parts[0] if parts else None for parts in (row, col))
    scale_inv = (row or col or ())[1]
    return TensorJob(x, scale_inv, codes, codes_t, source.amax, source.scale, source.staging, flag)


def _launch_tensor(
    source: Fp8Scale, flag: Tensor | None, words: Words, x: Tensor, row: Parts | None, col: Parts | None
) -> None:
    job = _tensor_job(x, row, col, source, flag)
    cuda.cast_tensor(job, power_of_two=source.power_of_two, epsilon=source.epsilon, source=words)
    if row and col and col[1].data_ptr() != row[1].data_ptr():
        col[1].copy_(row[1])


def _empty_tensor(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), torch.empty((), device=x.device)


def _empty_tensor_both(x: Tensor, dtype: torch.dtype) -> tuple[Parts, Parts]:
    """Allocate the operands of x and of x.t(), with one common scale."""
    codes, scale_inv = row = _empty_tensor(x, dtype, x.shape)
    return row, (torch.empty(codes.shape[::-1], dtype=dtype, device=x.device), scale_inv)


def prepare_tensor(xs: Sequence[Tensor], outs: Sequence[Wanted], sources: Sequence[Fp8Scale], flags: Flags) -> Launches:
    assert all(row[1].data_ptr() == col[1].data_ptr() for row, col in outs if row and col)
    observe = []
    if sources[0].scale is None:
        flat = torch.empty(len(xs), device=xs[0].device)
        observe.append(cuda.amax_batch(xs, flat))
        sources = [source._replace(amax=amax) for source, amax in zip(sources, flat.unbind(), strict=True)]
    jobs = [_tensor_job(x, *out, source, flag) for x, out, source, flag in zip(xs, outs, sources, flags, strict=True)]
    options = sources[0]
    cast = cuda.cast_tensor_batch(jobs, power_of_two=options.power_of_two, epsilon=options.epsilon)
    return Launches(observe, [(source.amax, source.amax) for source in sources], [cast])


def cast_fp8_tensor_kernel(
    x: Tensor | LazyMatrix,
    dtype: torch.dtype,
    source: Fp8Scale,
    *,
    out: Parts | None = None,
    flag: Tensor | None = None,
) -> Parts:
    x, words = opened(x, dtype)
    return dispatch.rowwise(x, out, partial(_empty_tensor, x, dtype), partial(_launch_tensor, source, flag, words))


def cast_fp8_tensor_both_kernel(
    x: Tensor | LazyMatrix, dtype: torch.dtype, source: Fp8Scale, *, outs: Outs = None, flag: Tensor | None = None
) -> tuple[Parts, Parts]:
    x, words = opened(x, dtype)
    outs = outs or _empty_tensor_both(x, dtype)
    return dispatch.both(x, outs, partial(_empty_tensor, x, dtype), partial(_launch_tensor, source, flag, words))


def cast_fp8_tensor_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], sources: Sequence[Fp8Scale], flags: Flags
) -> Launches:
    """Prepare launches of `cast_fp8_tensor_both` for many matrices for which `has_batches` holds.

    Both orientations of an output must share the memory of scale_inv. If the first source has no scale, the launches compute
    the amax of each matrix, and an amax in a source is not read.
    """
    return preparing("cast_fp8_tensor", xs[0])(xs, outs, sources, flags)


# One scale per row


def _empty_rowwise(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), torch.empty(shape[0], device=x.device)


def _rowwise_job(x: Tensor, flag: Tensor | None, row: RowwisePart | None, col: RowwisePart | None) -> RowwiseJob:
    given = [(None,) * 3 if each is None else (each[0][0], each[1], each[0][1]) for each in (row, col)]
    return RowwiseJob(x, *given[0], *given[1])._replace(flag=flag)


def _zero(x: Tensor) -> None:
    x.zero_()


def prepare_rowwise(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, *, power_of_two: bool, epsilon: float = 0.0
) -> Launches:
    lines = torch.zeros(sum(sum(x.shape) for x in xs), device=xs[0].device)
    pieces = iter(lines.split([size for x in xs for size in x.shape]))
    jobs = []
    for x, (row, col), flag in zip(xs, outs, flags, strict=True):
        given = [None if parts is None else (parts, amax) for parts, amax in ((row, next(pieces)), (col, next(pieces)))]
        jobs.append(_rowwise_job(x, flag, *given))
    amaxes = [(job.amax, job.amax_t) for job in jobs]
    observe: list[Launch] = [partial(_zero, lines), cuda_rowwise.amax_lines_batch(xs, amaxes)]
    return Launches(
        observe, amaxes, [cuda_rowwise.cast_rowwise_batch(jobs, power_of_two=power_of_two, epsilon=epsilon)]
    )


def cast_fp8_rowwise_kernel(
    x: Tensor | LazyMatrix, amax: Tensor, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    x, words = opened(x, dtype)
    matrix, flipped = dispatch.adjacent(x)
    made = out if out is not None else _empty_rowwise(x, dtype, x.shape)
    job = _rowwise_job(matrix, flag, *((None, (made, amax)) if flipped else ((made, amax), None)))
    cuda_rowwise.cast_rowwise(job, power_of_two=power_of_two, epsilon=epsilon, source=words)
    return made


def cast_fp8_rowwise_both_kernel(
    x: Tensor | LazyMatrix, amaxes: tuple[Tensor, Tensor], dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    outs: Outs = None, flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    x, words = opened(x, dtype)
    matrix, flipped = dispatch.adjacent(x)
    row, col = outs if outs is not None else (_empty_rowwise(x, dtype, shape) for shape in (x.shape, x.shape[::-1]))
    given = (row, amaxes[0]), (col, amaxes[1])
    job = _rowwise_job(matrix, flag, *(given[::-1] if flipped else given))
    cuda_rowwise.cast_rowwise(job, power_of_two=power_of_two, epsilon=epsilon, source=words)
    return row, col


def cast_fp8_rowwise_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, *, power_of_two: bool, epsilon: float = 0.0
) -> Launches:
    """Prepare launches of `cast_fp8_rowwise_both` for many matrices."""
    prepare = preparing("cast_fp8_rowwise", xs[0])
    return prepare(xs, outs, flags, power_of_two=power_of_two, epsilon=epsilon)
