"""The CUDA kernels of NVFP4, see cuda.py: the two amaxes in one read, then codes and scales of both orientations."""

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
    """x [rows, cols] -> codes [rows, cols/2], scale [rows or rows/16, cols/16] by amax [], and / or those of x.t().

    `amax_out`: receives the amax that decodes the codes: `amax`, or 1.75 times `amax` with four over six.
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
    """x [rows, cols] -> out fp32 [2]: max |x|, and max |x.t()| after its Hadamard transform along rows of x.

    Raises ValueError where rows is no multiple of 16.
    """
    module = loader.load()
    if x.shape[0] % 16:
        raise ValueError(f"the Hadamard transform takes 16 rows at a time; got {x.shape[0]}: append zeros")
    pointer = _output(out, [2], [torch.float32], "out")
    words = (*_matrix(x), 0, pointer, pointer + 4)
    launch("amax_rht", x, words, _tiles(x, module.TILE), x.dtype == torch.float32)


def scale_shape(lines: int, contraction: int, *, tile: bool) -> tuple[int, int]:
    """The shape of the E4M3 scales of packed codes [lines, contraction / 2]."""
    return (-(-lines // 16) if tile else lines), contraction // 16


def _words(job: Nvfp4Job, tile: bool) -> Words:
    words: list[int] = [*_matrix(job.x), 0]
    for (lines, along), parts in zip((job.x.shape, job.x.shape[::-1]), (job[1:5], job[5:9]), strict=True):
        codes, scale, amax, amax_out = parts
        if len({part is None for part in parts[:3]}) == 2:
            raise ValueError("an nvfp4 cast takes codes, scale and amax of an orientation together, or none of them")
        if codes is not None and (along % 16 or (tile and lines % 16)):
            raise ValueError(
                f"nvfp4 takes blocks of {'16x16' if tile else '1x16'}; got [{lines}, {along}]: append zeros"
            )
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
            f"random bits are drawn by an int64 [] counter on {x.device}, from a multiple of 16 columns on; got "
            f"{counter.dtype} {list(counter.shape)} on {counter.device}, column {draw.column}"
        )
    seed, tensor = draw.key
    across = -(-draw.total_columns // 16)
    return counter.data_ptr(), draw.row, draw.column // 16, across, draw.direction, seed & WORD, tensor & WORD


def cast_nvfp4(
    job: Nvfp4Job,
    *,
    rht: bool = False,
    draws: tuple[PhiloxState | None, PhiloxState | None] = (None, None),
    source: Words = MATRIX,
    four_over_six: bool = False,
) -> None:
    """NVFP4 in blocks of 16, both orientations in one read. `rht`: the columns are transformed first; `draws`: where the
    random bits of each orientation come from, None rounds to nearest; `source`: of cuda_producers; `four_over_six`: two
    candidate scales for each block, only to nearest."""
    if four_over_six and draws != (None, None):
        raise ValueError("four over six is defined for rounding to nearest; pass no draws, or four_over_six=False")
    module = loader.load()
    words, tiles = _words(job, False), _tiles(job.x, module.TILE)
    draw, draw_t = (_draw_words(draw, job.x) for draw in draws)
    wide = job.x.dtype == torch.float32
    launch("cast_nvfp4_1d", job.x, words, 0, 1, tiles, wide, rht, four_over_six, draw, draw_t, source)


def cast_nvfp4_tile(job: Nvfp4Job, *, four_over_six: bool = False) -> None:
    """NVFP4 in tiles of 16x16, both orientations in one read, by one amax for both."""
    module = loader.load()
    wide, words = job.x.dtype == torch.float32, _one_amax(_words(job, True))
    launch("cast_nvfp4_2d", job.x, words, 0, 1, _tiles(job.x, module.TILE), wide, four_over_six)


def _one_amax(words: Words) -> Words:
    """The kernel of tiles reads the first amax."""
    return (*words[:7], words[7] or words[11], *words[8:])


def cast_nvfp4_batch(jobs: Sequence[Nvfp4Job], *, tile: bool, four_over_six: bool = False) -> Batch:
    """The same for many matrices, to nearest and not transformed."""
    module = loader.load()
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    words, tiles = [_words(job, tile) for job in jobs], [_tiles(job.x, module.TILE) for job in jobs]
    if tile:
        rows = [_one_amax(row) for row in words]
        return _batch(module.cast_nvfp4_2d, len(words[0]), rows, tiles, jobs, wide, four_over_six)
    nothing = _draw_words(None, jobs[0].x)
    options = (wide, False, four_over_six, nothing, nothing, MATRIX)
    return _batch(module.cast_nvfp4_1d, len(words[0]), words, tiles, jobs, *options)
