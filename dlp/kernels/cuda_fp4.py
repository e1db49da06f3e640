"""CUDA kernels of NVFP4: both amaxes from one read, then codes and scales of both orientations; see cuda.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import MATRIX, Batch, Words, _batch, _matrix, _output, _same, _scalar, _tiles
from dlp.kernels.launches import launch
from dlp.kernels.reference import PhiloxState

WORD = 0xFFFFFFFF


class Nvfp4Job(NamedTuple):
    """Job: quantize x [rows, cols] to codes [rows, cols/2] and scale [rows or rows/16, cols/16] by amax [], x.t() to the
    tensors `..._t`, or both.

    `amax_out` receives the amax for decoding: `amax`, or 1.75 times `amax` with four over six.
    """

    x: Tensor
    codes: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None
    amax_out: Tensor | None = None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    amax_t: Tensor | None = None
    amax_t_out: Tensor | None = None
    flag: Tensor | None = None


def amax_rht(x: Tensor, out: Tensor) -> None:
    """Write max |x| and max |rht16(x.t())| of x [rows, cols] to out, fp32 [2].

    Raises ValueError if `rows` is not a multiple of 16.
    """
    module = loader.load()
    if x.shape[0] % 16:
        raise ValueError(f"the Hadamard transform needs a multiple of 16 rows; got {x.shape[0]}: append zeros")
    pointer = _output(out, [2], [torch.float32], "out")
    words = (*_matrix(x), 0, pointer, pointer + 4)
    launch("amax_rht", x, words, _tiles(x, module.TILE), x.dtype == torch.float32)


def scale_shape(lines: int, contraction: int, *, tile: bool) -> tuple[int, int]:
    """Return the shape of the E4M3 scales of packed codes [lines, contraction / 2]."""
    return (-(-lines // 16) if tile else lines), contraction // 16


def _words(job: Nvfp4Job, tile: bool) -> Words:
    words: list[int] = [*_matrix(job.x), 0]
    row = job.codes, job.scale, job.amax, job.amax_out
    col = job.codes_t, job.scale_t, job.amax_t, job.amax_t_out
    for (lines, along), (codes, scale, amax, amax_out) in zip(
        (job.x.shape, job.x.shape[::-1]), (row, col), strict=True
    ):
        if len({part is None for part in (codes, scale, amax)}) == 2:
            raise ValueError(
                "an nvfp4 cast takes codes, scale and amax of an orientation together: pass all three, or none"
            )
        if codes is not None and (along % 16 or (tile and lines % 16)):
            raise ValueError(
                f"nvfp4 takes blocks of {'16x16' if tile else '1x16'}; got [{lines}, {along}]: append zeros"
            )
        if tile and amax is None:
            amax = job.amax_t  # the kernel for tiles reads one amax, which is passed as the rowwise amax
        words += [
            _output(codes, (lines, along // 2), [torch.uint8], "codes"),
            _output(scale, scale_shape(lines, along, tile=tile), [torch.float8_e4m3fn], "scale"),
            _scalar(amax, "amax"), _scalar(amax_out, "amax_out"),
        ]  # fmt: skip
    return *words, _scalar(job.flag, "flag")


def _draw_words(draw: PhiloxState | None, x: Tensor) -> Words:
    if draw is None:
        return (0,) * 7
    counter = draw.counter
    if counter.dtype != torch.int64 or counter.dim() or counter.device != x.device or draw.column % 16:
        raise ValueError(
            f"stochastic rounding needs an int64 [] counter on {x.device} and a first column that is a multiple of 16; got "
            f"{counter.dtype} {list(counter.shape)} on {counter.device}, column {draw.column}"
        )
    seed, tensor = draw.key
    across = -(-draw.total_columns // 16)
    return counter.data_ptr(), draw.row, draw.column // 16, across, draw.orientation, seed & WORD, tensor & WORD


def cast_nvfp4(
    job: Nvfp4Job,
    *,
    rht: bool = False,
    draws: tuple[PhiloxState | None, PhiloxState | None] = (None, None),
    source: Words = MATRIX,
    four_over_six: bool = False,
) -> None:
    """Cast to NVFP4 in blocks of 16, both orientations from one read.

    rht             cast rht16(x.t()) in place of x.t() to the tensors `..._t` of the job
    draws           random bits of each orientation; None: round to nearest
    source          packed arguments of a producer (`cuda_producers`)
    four_over_six   choose between two scales for each block; only with rounding to nearest
    """
    if four_over_six and draws != (None, None):
        raise ValueError("four over six is defined for rounding to nearest; pass no draws, or four_over_six=False")
    module = loader.load()
    words, tiles = _words(job, False), _tiles(job.x, module.TILE)
    draw, draw_t = (_draw_words(draw, job.x) for draw in draws)
    wide = job.x.dtype == torch.float32
    launch("cast_nvfp4_1d", job.x, words, 0, 1, tiles, wide, rht, four_over_six, draw, draw_t, source)


def cast_nvfp4_tile(job: Nvfp4Job, *, four_over_six: bool = False) -> None:
    """Cast to NVFP4 in tiles of 16x16. One read and one amax give both orientations."""
    module = loader.load()
    wide, words = job.x.dtype == torch.float32, _words(job, True)
    launch("cast_nvfp4_2d", job.x, words, 0, 1, _tiles(job.x, module.TILE), wide, four_over_six)


def cast_nvfp4_batch(jobs: Sequence[Nvfp4Job], *, tile: bool, four_over_six: bool = False) -> Batch:
    """Prepare a launch of NVFP4 casts for many matrices, with rounding to nearest and without transform."""
    module = loader.load()
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    words = [_words(job, tile) for job in jobs]
    if tile:
        return _batch(module.cast_nvfp4_2d, len(words[0]), words, tiles, jobs, wide, four_over_six)
    nothing = _draw_words(None, jobs[0].x)
    options = (wide, False, four_over_six, nothing, nothing, MATRIX)
    return _batch(module.cast_nvfp4_1d, len(words[0]), words, tiles, jobs, *options)
