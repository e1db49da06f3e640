"""CUDA kernels of rowwise FP8: amaxes of rows and columns from one read, casts from a second read; see cuda.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import MATRIX, Batch, Words, _batch, _matrix, _output, _same, _scalar, _tiles, scale_rule
from dlp.kernels.launches import launch


class LinesJob(NamedTuple):
    """Job: raise amax [rows] and amax_t [cols], fp32, to max |x| of rows and columns of x [rows, cols]; None: not requested."""

    x: Tensor
    amax: Tensor | None
    amax_t: Tensor | None


class RowwiseJob(NamedTuple):
    """Job: quantize x [rows, cols] to codes [rows, cols] and scale_inv [rows] by amax [rows], x.t() to the tensors `..._t`, or
    both."""

    x: Tensor
    codes: Tensor | None = None
    amax: Tensor | None = None
    scale_inv: Tensor | None = None
    codes_t: Tensor | None = None
    amax_t: Tensor | None = None
    scale_inv_t: Tensor | None = None
    flag: Tensor | None = None

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of the codes. Raises ValueError for an incomplete orientation, and if no orientation is requested."""
        orientations = (self.codes, self.amax, self.scale_inv), (self.codes_t, self.amax_t, self.scale_inv_t)
        incomplete = any(len({part is None for part in parts}) == 2 for parts in orientations)
        if incomplete or self.codes is self.codes_t:
            raise ValueError(
                "a rowwise cast takes codes, amax and scale_inv of an orientation together: pass all three, of at least one "
                "orientation"
            )
        codes = self.codes if self.codes is not None else self.codes_t
        assert codes is not None
        return codes.dtype


def _lines_words(job: LinesJob) -> Words:
    rows, cols = job.x.shape
    fp32 = [torch.float32]
    return (*_matrix(job.x), 0, _output(job.amax, [rows], fp32, "amax"), _output(job.amax_t, [cols], fp32, "amax_t"))


def amax_lines(x: Tensor, amax: Tensor | None, amax_t: Tensor | None, source: Words = MATRIX) -> None:
    """Raise amax [rows] and amax_t [cols] to max |x| of every row and column; NaN is ignored. `source`: packed
    arguments of a producer (`cuda_producers`)."""
    module = loader.load()
    words, tiles = _lines_words(LinesJob(x, amax, amax_t)), _tiles(x, module.TILE)
    launch("amax_lines", x, words, 0, 1, tiles, x.dtype == torch.float32, source)


def amax_lines_batch(xs: Sequence[Tensor], amaxes: Sequence[tuple[Tensor | None, Tensor | None]]) -> Batch:
    """Prepare a launch of `amax_lines` for many matrices."""
    module = loader.load()
    jobs = [LinesJob(x, *amax) for x, amax in zip(xs, amaxes, strict=True)]
    wide = _same([x.dtype for x in xs], "the input dtype") == torch.float32
    words, tiles = [_lines_words(job) for job in jobs], [_tiles(x, module.TILE) for x in xs]
    return _batch(module.amax_lines, len(words[0]), words, tiles, jobs, wide, MATRIX)


def _rowwise_words(job: RowwiseJob) -> Words:
    rows, cols = job.x.shape
    dtype, fp32 = [job.code_dtype], [torch.float32]
    return (
        *_matrix(job.x), 0,
        _output(job.codes, (rows, cols), dtype, "codes"),
        _output(job.amax, [rows], fp32, "amax"), _output(job.scale_inv, [rows], fp32, "scale_inv"),
        _output(job.codes_t, (cols, rows), dtype, "codes_t"),
        _output(job.amax_t, [cols], fp32, "amax_t"), _output(job.scale_inv_t, [cols], fp32, "scale_inv_t"),
        _scalar(job.flag, "flag"),
    )  # fmt: skip


def cast_rowwise(job: RowwiseJob, *, power_of_two: bool = True, epsilon: float = 0.0, source: Words = MATRIX) -> None:
    """Cast to rowwise FP8 from one read of x: one scale per row, and one scale per column in the transposed copy. `source`:
    packed arguments of a producer (`cuda_producers`)."""
    module = loader.load()
    rule = scale_rule(job.code_dtype, power_of_two, epsilon)
    wide, e5m2 = job.x.dtype == torch.float32, job.code_dtype == torch.float8_e5m2
    tiles = _tiles(job.x, module.TILE)
    launch("cast_rowwise", job.x, _rowwise_words(job), 0, 1, tiles, wide, e5m2, rule, source)


def cast_rowwise_batch(jobs: Sequence[RowwiseJob], *, power_of_two: bool = True, epsilon: float = 0.0) -> Batch:
    """Prepare a launch of `cast_rowwise` for many matrices."""
    module = loader.load()
    dtype = _same([job.code_dtype for job in jobs], "the dtype of codes")
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    words, tiles = [_rowwise_words(job) for job in jobs], [_tiles(job.x, module.TILE) for job in jobs]
    rule = scale_rule(dtype, power_of_two, epsilon)
    return _batch(
        module.cast_rowwise, len(words[0]), words, tiles, jobs, wide, dtype == torch.float8_e5m2, rule, MATRIX
    )
