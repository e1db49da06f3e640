"""Casts to NVFP4: CUDA kernels, or the plain-torch reference with the same bits; see casts.py.

    amax_nvfp4, amax_nvfp4_both     max |x| of x, or of the Hadamard transform of x
    cast_nvfp4                      packed codes, E4M3 scales and the amax

The kernels apply the Hadamard transform to the columns of the matrix (a columnwise operand), with the signs RHT_SIGNS. Kernels
cast 16x16 tiles (blocks of weights) only without transform and with rounding to nearest. Lazy norms and activations are
computed and stored first, because these kernels are bound by instructions, and a fused producer would slow the casts down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_fp4, dispatch, reference
from dlp.kernels.cuda import Words
from dlp.kernels.cuda_fp4 import Nvfp4Job
from dlp.kernels.dispatch import Flags, Launches, Wanted
from dlp.kernels.lazy_matrix import LazyMatrix, lazy_operation, opened, stored
from dlp.kernels.reference import RHT_SIGNS, PhiloxState, watched
from dlp.kernels.reference.fp8 import Block, Outs, Parts, into
from dlp.kernels.registry import preparing

TILE = (16, 16)
Draws = tuple[PhiloxState | None, PhiloxState | None]  # for the casts of x and of x.t(); None: round to nearest
Part = tuple[Parts, Tensor]  # parts of one orientation, and the amax


def _turns(rht: bool, signs: int) -> bool:
    """Return whether the kernels support this transform: none, or the transform with RHT_SIGNS, a constant in kernels."""
    return not rht or signs == RHT_SIGNS


@lazy_operation
def amax_nvfp4(x: Tensor, *, rht: bool, signs: int = RHT_SIGNS) -> Tensor:
    """Return max |x| of x [rows, C] as fp32 [], or with `rht` the maximum of |rht16(x, signs)|."""
    return reference.amax(reference.rht16(x, signs) if rht else x)


def takes_amax_nvfp4(x: Tensor | LazyMatrix, *, rht: bool, signs: int = RHT_SIGNS) -> bool:
    return _turns(rht, signs)


def amax_nvfp4_kernel(x: Tensor | LazyMatrix, *, rht: bool, signs: int = RHT_SIGNS) -> Tensor:
    x = stored(x)
    if rht:
        return _amax_rht(_columns_of(x))[1]
    out = torch.empty((), device=x.device)
    cuda.amax(dispatch.adjacent(x)[0], out)
    return out


@lazy_operation
def amax_nvfp4_both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return max |x| and max |rht16(x.t())|, from one read."""
    return reference.amax(x), reference.amax(reference.rht16(x.t()))


def amax_nvfp4_both_kernel(x: Tensor | LazyMatrix) -> tuple[Tensor, Tensor]:
    x = stored(x)
    amaxes = _amax_rht(x if cuda.readable(x) else x.contiguous())
    return amaxes[0], amaxes[1]


def _amax_rht(matrix: Tensor) -> Tensor:
    amaxes = torch.empty(2, device=matrix.device)
    cuda_fp4.amax_rht(matrix, amaxes)
    return amaxes


def _columns_of(x: Tensor) -> Tensor:
    """Return x.t() as a matrix that kernels can read."""
    return x.t() if cuda.readable(x.t()) else x.t().contiguous()


def takes_nvfp4(
    x: Any, amax: Any, block: Block, *, rht: bool = False, signs: int = RHT_SIGNS, draw: PhiloxState | None = None, **_: Any
) -> bool:  # fmt: skip
    return _turns(rht, signs) and (block != TILE or not (rht or draw is not None))


def takes_nvfp4_both(
    x: Any, amaxes: Any, block: Block, *, rht: bool = False, draws: Draws = (None, None), **_: Any
) -> bool:
    random = {draw is not None for draw in draws}  # one launch rounds both orientations stochastically, or neither
    return len(random) == 1 and (block != TILE or not (rht or True in random))


def _empty(x: Tensor, block: Block, shape: Sequence[int]) -> Parts:
    scales = cuda_fp4.scale_shape(shape[0], shape[1], tile=block == TILE)
    return (
        torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=x.device),
        torch.empty(scales, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty((), device=x.device),
    )


def _job(x: Tensor, flag: Tensor | None, row: Part | None, col: Part | None) -> Nvfp4Job:
    given = [(None,) * 4 if each is None else (each[0][0], each[0][1], each[1], each[0][2]) for each in (row, col)]
    return Nvfp4Job(x, *given[0], *given[1])._replace(flag=flag)


def _run(job: Nvfp4Job, block: Block, rht: bool, draws: Draws, words: Words, four_over_six: bool) -> None:
    if block == TILE:
        cuda_fp4.cast_nvfp4_tile(job, four_over_six=four_over_six)
    else:
        cuda_fp4.cast_nvfp4(job, rht=rht, draws=draws, source=words, four_over_six=four_over_six)


def _by_reference(
    x: Tensor, amax: Tensor, block: Block, signs: int | None, draw: PhiloxState | None, flag: Tensor | None, four_over_six: bool
) -> Parts:  # fmt: skip
    """Cast by the reference; `signs`: signs of the transform, None: no transform."""
    random = None if draw is None else draw.bytes(x.shape[0], x.shape[1])
    values = watched(x if signs is None else reference.rht16(x, signs), flag)
    made = reference.cast_nvfp4(values, amax, block, random=random, four_over_six=four_over_six)
    return (*made, reference.nvfp4_stored_amax(amax, four_over_six=four_over_six))


def prepare_nvfp4(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, *, four_over_six: bool = False
) -> Launches:
    flat = torch.empty(len(xs), device=xs[0].device)
    amaxes = flat.unbind()
    given = [
        [None if parts is None else (parts, amax) for parts in out] for out, amax in zip(outs, amaxes, strict=True)
    ]
    jobs = [_job(x, flag, *each) for x, each, flag in zip(xs, given, flags, strict=True)]
    cast = cuda_fp4.cast_nvfp4_batch(jobs, tile=block == TILE, four_over_six=four_over_six)
    return Launches([cuda.amax_batch(xs, flat)], [(amax, amax) for amax in amaxes], [cast])


@lazy_operation
def cast_nvfp4(
    x: Tensor, amax: Tensor, block: Block, *, rht: bool = False, signs: int = RHT_SIGNS,
    draw: PhiloxState | None = None, out: Parts | None = None, flag: Tensor | None = None, four_over_six: bool = False,
) -> Parts:  # fmt: skip
    """Return packed codes [rows, C/2], E4M3 scales [row blocks, C/16] and the amax for decoding, of x [rows, C].

    amax            amax of the tensor, fp32 [], on which the ranks of the amax group agree
    rht             cast rht16(x, signs) in place of x
    draw            random bits of stochastic rounding; None: round to nearest
    four_over_six   choose between two scales for each block (`reference.nvfp4`); only with rounding to nearest
    """
    return into(out, _by_reference(x, amax, block, signs if rht else None, draw, flag, four_over_six))


def cast_nvfp4_kernel(
    x: Tensor | LazyMatrix, amax: Tensor, block: Block, *, rht: bool = False, signs: int = RHT_SIGNS,
    draw: PhiloxState | None = None, out: Parts | None = None, flag: Tensor | None = None, four_over_six: bool = False,
) -> Parts:  # fmt: skip
    x, words = opened(x, torch.uint8, makes=not rht and block != TILE)
    matrix, flipped = (_columns_of(x), True) if rht else dispatch.adjacent(x)
    made = out if out is not None else _empty(x, block, x.shape)
    job = _job(matrix, flag, *((None, (made, amax)) if flipped else ((made, amax), None)))
    _run(job, block, rht, (None, draw) if flipped else (draw, None), words, four_over_six)
    return made


@lazy_operation
def cast_nvfp4_both(
    x: Tensor, amaxes: tuple[Tensor, Tensor], block: Block, *, rht: bool = False, draws: Draws = (None, None),
    outs: Outs = None, flag: Tensor | None = None, four_over_six: bool = False,
) -> tuple[Parts, Parts]:  # fmt: skip
    """Return `cast_nvfp4` of x, without transform, and of x.t(), with the transform if `rht`."""
    row, col = outs if outs is not None else (None, None)
    made = _by_reference(x, amaxes[0], block, None, draws[0], flag, four_over_six)
    turned = _by_reference(x.t(), amaxes[1], block, RHT_SIGNS if rht else None, draws[1], flag, four_over_six)
    return into(row, made), into(col, turned)


def cast_nvfp4_both_kernel(
    x: Tensor | LazyMatrix, amaxes: tuple[Tensor, Tensor], block: Block, *, rht: bool = False, draws: Draws = (None, None),
    outs: Outs = None, flag: Tensor | None = None, four_over_six: bool = False,
) -> tuple[Parts, Parts]:  # fmt: skip
    x, words = opened(x, torch.uint8, makes=block != TILE)
    matrix, flipped = (x if cuda.readable(x) else x.contiguous(), False) if rht else dispatch.adjacent(x)
    row, col = outs if outs is not None else (_empty(x, block, shape) for shape in (x.shape, x.shape[::-1]))
    given = (row, amaxes[0]), (col, amaxes[1])
    if flipped:
        given, draws = given[::-1], draws[::-1]
    _run(_job(matrix, flag, *given), block, rht, draws, words, four_over_six)
    return row, col


def cast_nvfp4_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, *, four_over_six: bool = False
) -> Launches:
    """Prepare launches of `cast_nvfp4_both` for many matrices, with rounding to nearest and without transform."""
    return preparing("cast_nvfp4", xs[0], None, block)(xs, outs, flags, block, four_over_six=four_over_six)
