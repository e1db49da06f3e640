"""The casts to FP8 with a scale a block of a matrix: by the CUDA kernels where the device has them, else by the reference,
same bits; see casts.py. Blocks of other sizes than those of TILE_OF and MX_TILE_OF have no kernel.

    cast_fp8_block          one fp32 scale 128 elements or 128x128 tile
    cast_mxfp8              one power of two 32 elements or 32x32 tile

Scales are compact to a caller. In memory they may be a part of what a GEMM reads, or lie blocks first, as the kernel stores
them best (`empty_block_scales`, `empty_mx_scales`); a kernel writes them as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, dispatch, reference, registry
from dlp.kernels.cuda import BlockJob
from dlp.kernels.dispatch import Flags, Launch, Launches, Outs, Parts, Wanted, both_into, into
from dlp.kernels.lazy_matrix import LazyMatrix, opened, stored
from dlp.kernels.reference import watched
from dlp.kernels.reference.scales import Block
from dlp.kernels.registry import operation, preparing

TILE_OF = {(1, 128): False, (128, 128): True}  # the blocks that kernels know
MX_TILE_OF = {(1, 32): False, (32, 32): True}


def is_known_block(x: Any, block: Block, *_: Any, **__: Any) -> bool:
    return block in TILE_OF


def is_known_mx_block(x: Any, block: Block, *_: Any, **__: Any) -> bool:
    return block in MX_TILE_OF


def _block_job(x: Tensor, flag: Tensor | None, row: Parts | None, col: Parts | None) -> BlockJob:
    return BlockJob(x, *(row or (None, None)), *(col or (None, None)))._replace(flag=flag)


def _launch_block(
    cast: Callable[..., None], tile: bool, flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None
) -> None:
    """Launch the cast; scales are written in the layout of their memory."""
    job, gemm_layout = _laid_out(x, row, col, flag, partial(_as_gemms_read, tile=tile))
    cast(job, gemm_layout=gemm_layout)


def _laid_out(
    x: Tensor, row: Parts | None, col: Parts | None, flag: Tensor | None, whole: Callable[[Parts], Parts | None]
) -> tuple[BlockJob, bool]:
    """The job of a cast into these parts, and whether all their scales are in the layout that `whole` recognises, for which it
    returns codes and the whole memory of the scales; else they are compact."""
    views = [parts and whole(parts) for parts in (row, col)]
    if all(parts is None or view for parts, view in zip((row, col), views, strict=True)):
        return _block_job(x, flag, *views), True
    return _block_job(x, flag, row, col), False


def _as_gemms_read(parts: Parts, tile: bool) -> Parts | None:
    """Codes, and the whole memory of their scales if these are in the layout that GEMMs read."""
    codes, scale_inv = parts
    shape = cuda.block_scale_shape(codes.shape[0], codes.shape[1], tile=tile, gemm_layout=True)
    return _whole(codes, scale_inv, shape, flipped=not tile)


def _whole(codes: Tensor, scale: Tensor, shape: tuple[int, int], flipped: bool) -> Parts | None:
    """Codes, and the memory of this shape of which the scales, transposed if `flipped`, are a view; None where they are no such
    view."""
    strides = (1, shape[1]) if flipped else (shape[1], 1)
    return (codes, scale.as_strided(shape, (shape[1], 1))) if scale.stride() == strides else None


def empty_block_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Uninitialised fp32 scale_inv [row blocks, C blocks] of codes of this shape. Where GEMMs apply block scales themselves, a
    view of what these read, so that nothing is rearranged for them."""
    down, across = cuda.block_scale_shape(shape[0], shape[1], tile=tile, gemm_layout=False)
    if registry.kind_of(device) != "sm_90":
        return torch.empty(down, across, device=device)
    whole = torch.empty(cuda.block_scale_shape(shape[0], shape[1], tile=tile, gemm_layout=True), device=device)
    return whole[:, :across] if tile else whole.t()[:down]


def _empty_block(x: Tensor, tile: bool, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), empty_block_scales(shape, tile, x.device)


def prepare_block(xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, **options: Any) -> Launches:
    tile = TILE_OF[block]
    batch = partial(cuda.cast_block_batch, tile=tile, **options)
    return _batch_laid_out(xs, outs, flags, partial(_as_gemms_read, tile=tile), batch, "gemm_layout")


@operation
def cast_fp8_block(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """x [rows, C] -> codes [rows, C] of `dtype` and fp32 scale_inv [row blocks, C blocks]; edge blocks may be partial.

    A quotient max/amax that overflows becomes the largest finite value of x's dtype.
    """
    x = watched(stored(x), flag)
    return into(out, reference.cast_fp8_block(x, block, dtype, power_of_two=power_of_two, epsilon=epsilon))


def cast_fp8_block_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, out: Parts | None = None, flag: Tensor | None = None,
    **options: Any,
) -> Parts:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 128))
    tile = TILE_OF[block]
    cast = partial(cuda.cast_block, tile=tile, source=words, **options)
    return dispatch.rowwise(x, out, partial(_empty_block, x, tile, dtype), partial(_launch_block, cast, tile, flag))


@operation
def cast_fp8_block_both(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    outs: Outs = None, flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """`cast_fp8_block` of x and of x.t()."""
    options: dict[str, Any] = {"power_of_two": power_of_two, "epsilon": epsilon}
    cast = partial(reference.cast_fp8_block, block=block, dtype=dtype, **options)
    return both_into(outs, cast, watched(stored(x), flag))


def cast_fp8_block_both_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, outs: Outs = None, flag: Tensor | None = None,
    **options: Any,
) -> tuple[Parts, Parts]:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 128))
    tile = TILE_OF[block]
    cast = partial(cuda.cast_block, tile=tile, source=words, **options)
    return dispatch.both(x, outs, partial(_empty_block, x, tile, dtype), partial(_launch_block, cast, tile, flag))


def cast_fp8_block_batch(
    xs: Sequence[Tensor],
    outs: Sequence[Wanted],
    flags: Flags,
    block: Block,
    *,
    power_of_two: bool,
    epsilon: float = 0.0,
) -> Launches:
    """Prepares launches of `cast_fp8_block_both` for many matrices."""
    prepare = preparing("cast_fp8_block", xs[0], block)
    return prepare(xs, outs, flags, block, power_of_two=power_of_two, epsilon=epsilon)


def _batch_laid_out(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, whole: Callable[[Parts], Parts | None],
    batch: Callable[..., Launch], option: str,
) -> Launches:  # fmt: skip
    """A launch of `batch` for the jobs of each layout of scales."""
    laid_out = [_laid_out(x, *out, flag, whole) for x, out, flag in zip(xs, outs, flags, strict=True)]
    by_layout = {which: [job for job, found in laid_out if found == which] for which in (False, True)}
    launches = [batch(jobs, **{option: which}) for which, jobs in by_layout.items() if jobs]
    return Launches([], [(None, None)] * len(xs), launches)


# MXFP8


def _launch_mx(cast: Callable[..., None], flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None) -> None:
    """Launch the cast; scales are written in the layout of their memory."""
    job, blocks_first = _laid_out(x, row, col, flag, _with_blocks_first)
    cast(job, blocks_first=blocks_first)


def _with_blocks_first(parts: Parts) -> Parts | None:
    """Codes, and the whole memory of their scales if that has the blocks first."""
    codes, scale = parts
    shape = cuda.mx_scale_shape(codes.shape[0], codes.shape[1], tile=False, blocks_first=True)
    return _whole(codes, scale, shape, flipped=True)


def empty_mx_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Uninitialised E8M0 bytes [row blocks, C blocks] of codes of this shape. Where kernels cast, those of 1x32 blocks are a
    view of memory with the blocks first: a cast that stores them so reaches 0.9 of a copy instead of 0.84."""
    down, across = cuda.mx_scale_shape(shape[0], shape[1], tile=tile)
    if tile or registry.kind_of(device) not in registry.NATIVE:
        return torch.empty(down, across, dtype=torch.uint8, device=device)
    whole = cuda.mx_scale_shape(shape[0], shape[1], tile=False, blocks_first=True)
    return torch.empty(whole, dtype=torch.uint8, device=device).t()[:down]


def _empty_mx(x: Tensor, block: Block, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), empty_mx_scales(shape, MX_TILE_OF[block], x.device)


def prepare_mx(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, *, rule: str = "ceil"
) -> Launches:
    batch = partial(cuda.cast_mxfp8_batch, tile=MX_TILE_OF[block], rule=rule)
    return _batch_laid_out(xs, outs, flags, _with_blocks_first, batch, "blocks_first")


@operation
def cast_mxfp8(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, rule: str = "ceil", out: Parts | None = None,
    flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """x [rows, C] -> codes [rows, C] of `dtype` and E8M0 bytes [row blocks, C blocks], by scale rule "ceil" or "floor"."""
    return into(out, reference.cast_mxfp8(watched(stored(x), flag), block, dtype, rule=rule))


def cast_mxfp8_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, rule: str = "ceil", out: Parts | None = None,
    flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 32))
    cast = partial(cuda.cast_mxfp8, tile=MX_TILE_OF[block], rule=rule, source=words)
    return dispatch.rowwise(x, out, partial(_empty_mx, x, block, dtype), partial(_launch_mx, cast, flag))


@operation
def cast_mxfp8_both(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, rule: str = "ceil", outs: Outs = None,
    flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """`cast_mxfp8` of x and of x.t()."""
    cast = partial(reference.cast_mxfp8, block=block, dtype=dtype, rule=rule)
    return both_into(outs, cast, watched(stored(x), flag))


def cast_mxfp8_both_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, rule: str = "ceil", outs: Outs = None,
    flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 32))
    cast = partial(cuda.cast_mxfp8, tile=MX_TILE_OF[block], rule=rule, source=words)
    return dispatch.both(x, outs, partial(_empty_mx, x, block, dtype), partial(_launch_mx, cast, flag))


def cast_mxfp8_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, *, rule: str = "ceil"
) -> Launches:
    """Prepares launches of `cast_mxfp8_both` for many matrices."""
    return preparing("cast_mxfp8", xs[0], block)(xs, outs, flags, block, rule=rule)
