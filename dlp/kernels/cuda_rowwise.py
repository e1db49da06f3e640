"""The CUDA kernels of rowwise FP8, see cuda.py: amaxes of rows and columns in one read, casts by them in one more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import MATRIX, Batch, Words, _batch, _matrix, _output, _same, _scalar, _tiles, scale_rule
from dlp.kernels.launches import launch


class LinesJob(NamedTuple):
    """max |x| of x [rows, cols] -> raises amax [rows] and amax_t [cols], fp32; None where it is not wanted."""

    x: Tensor
    amax: Tensor | None
    amax_t: Tensor | None


class RowwiseJob(NamedTuple):
    """x [rows, cols] -> codes [rows, cols], scale_inv [rows] from amax [rows], and / or those of its columns."""

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
        """Raises ValueError where an orientation is incomplete or none is wanted."""
        ways = [self[1:4], self[4:7]]
        if any(len({part is None for part in way}) == 2 for way in ways) or self.codes is self.codes_t:
            raise ValueError(
                "a rowwise cast takes codes, amax and scale_inv of an orientation together, of one or of both"
            )
        codes = self.codes if self.codes is not None else self.codes_t
        assert codes is not None
        return codes.dtype


def _lines_words(job: LinesJob) -> Words:
    rows, cols = job.x.shape
    fp32 = [torch.float32]
    return (*_matrix(job.x), 0, _output(job.amax, [rows], fp32, "amax"), _output(job.amax_t, [cols], fp32, "amax_t"))


def amax_lines(x: Tensor, amax: Tensor | None, amax_t: Tensor | None, source: Words = MATRIX) -> None:
    """Raises amax [rows] and amax_t [cols] to max |x| of every row and column; NaN is ignored. `source`: of
    cuda_producers."""
    module = loader.load()
    words, tiles = _lines_words(LinesJob(x, amax, amax_t)), _tiles(x, module.TILE)
    launch("amax_lines", x, words, 0, 1, tiles, x.dtype == torch.float32, source)


def amax_lines_batch(xs: Sequence[Tensor], amaxes: Sequence[tuple[Tensor | None, Tensor | None]]) -> Batch:
    """The same for many matrices."""
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
    """Rowwise FP8, a scale a row from its amax, and a scale a column in the transposed copy, in one read. `source`: of
    cuda_producers."""
    module = loader.load()
    rule = scale_rule(job.code_dtype, power_of_two, epsilon)
    wide, e5m2 = job.x.dtype == torch.float32, job.code_dtype == torch.float8_e5m2
    tiles = _tiles(job.x, module.TILE)
    launch("cast_rowwise", job.x, _rowwise_words(job), 0, 1, tiles, wide, e5m2, rule, source)


def cast_rowwise_batch(jobs: Sequence[RowwiseJob], *, power_of_two: bool = True, epsilon: float = 0.0) -> Batch:
    """The same for many matrices."""
    module = loader.load()
    dtype = _same([job.code_dtype for job in jobs], "the dtype of their codes")
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    words, tiles = [_rowwise_words(job) for job in jobs], [_tiles(job.x, module.TILE) for job in jobs]
    rule = scale_rule(dtype, power_of_two, epsilon)
    return _batch(
        module.cast_rowwise, len(words[0]), words, tiles, jobs, wide, dtype == torch.float8_e5m2, rule, MATRIX
    )
