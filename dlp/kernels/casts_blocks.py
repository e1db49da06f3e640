"""Casts to FP8 with one scale per block: CUDA kernels, or the plain-torch reference with the same bits; see casts.py.

    cast_fp8_block          one fp32 scale per 128 elements or 128x128 tile
    cast_mxfp8              one power of two per 32 elements or 32x32 tile

Kernels exist for the blocks of TILE_OF and MX_TILE_OF. The scales of codes [rows, C] have the compact shape [row blocks, C
blocks], and may be a view of memory with another layout: the layout that a GEMM reads (`empty_block_scales`), or the block
dimension first, which kernels store fastest (`empty_mx_scales`). A cast recognises the layout by the strides, and writes scales
in that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, dispatch, reference, registry
from dlp.kernels.cuda import BlockJob
from dlp.kernels.dispatch import Flags, Launch, Launches, Wanted
from dlp.kernels.lazy_matrix import LazyMatrix, lazy_operation, opened
from dlp.kernels.reference.fp8 import Block, Outs, Parts
from dlp.kernels.registry import preparing

TILE_OF = {(1, 128): False, (128, 128): True}  # blocks of the kernels -> whether the block is a tile
MX_TILE_OF = {(1, 32): False, (32, 32): True}

cast_fp8_block = lazy_operation(reference.cast_fp8_block)
cast_fp8_block_both = lazy_operation(reference.cast_fp8_block_both)
cast_mxfp8 = lazy_operation(reference.cast_mxfp8)
cast_mxfp8_both = lazy_operation(reference.cast_mxfp8_both)


def is_known_block(x: Any, block: Block, *_: Any, **__: Any) -> bool:
    return block in TILE_OF


def is_known_mx_block(x: Any, block: Block, *_: Any, **__: Any) -> bool:
    return block in MX_TILE_OF


def _block_job(x: Tensor, flag: Tensor | None, row: Parts | None, col: Parts | None) -> BlockJob:
    return BlockJob(x, *(row or (None, None)), *(col or (None, None)))._replace(flag=flag)


def _launch_block(
    cast: Callable[..., None], tile: bool, flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None
) -> None:
    """Launch a block cast, which writes scales in the layout of the given tensors."""
    job, gemm_layout = _laid_out(x, row, col, flag, partial(_as_gemms_read, tile=tile))
    cast(job, gemm_layout=gemm_layout)


def _laid_out(
    x: Tensor, row: Parts | None, col: Parts | None, flag: Tensor | None, whole: Callable[[Parts], Parts | None]
) -> tuple[BlockJob, bool]:
    """Return the job of a cast into these parts, and whether all scales have the layout that `whole` recognises; else the
    scales are compact. `whole` returns the codes and the complete memory of the scales, or None."""
    views = [parts and whole(parts) for parts in (row, col)]
    if all(parts is None or view for parts, view in zip((row, col), views, strict=True)):
        return _block_job(x, flag, *views), True
    return _block_job(x, flag, row, col), False


def _as_gemms_read(parts: Parts, tile: bool) -> Parts | None:
    """Return the codes and the complete memory of the scales if the scales have the layout that GEMMs read, else None."""
    codes, scale_inv = parts
    shape = cuda.block_scale_shape(codes.shape[0], codes.shape[1], tile=tile, gemm_layout=True)
    return _whole(codes, scale_inv, shape, flipped=not tile)


def _whole(codes: Tensor, scale: Tensor, shape: tuple[int, int], flipped: bool) -> Parts | None:
    """Return the codes and the complete memory of this shape if the scales (transposed if `flipped`) are a view of such memory,
    else None."""
    strides = (1, shape[1]) if flipped else (shape[1], 1)
    return (codes, scale.as_strided(shape, (shape[1], 1))) if scale.stride() == strides else None


def empty_block_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Allocate fp32 scale_inv [row blocks, C blocks] for codes of this shape. On Hopper, whose GEMMs apply block scales, the
    result is a view of the layout that the GEMMs read."""
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


def cast_fp8_block_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, out: Parts | None = None, flag: Tensor | None = None,
    **options: Any,
) -> Parts:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 128))
    tile = TILE_OF[block]
    cast = partial(cuda.cast_block, tile=tile, source=words, **options)
    return dispatch.rowwise(x, out, partial(_empty_block, x, tile, dtype), partial(_launch_block, cast, tile, flag))


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
    """Prepare launches of `cast_fp8_block_both` for many matrices."""
    prepare = preparing("cast_fp8_block", xs[0], block)
    return prepare(xs, outs, flags, block, power_of_two=power_of_two, epsilon=epsilon)


def _batch_laid_out(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, whole: Callable[[Parts], Parts | None],
    batch: Callable[..., Launch], option: str,
) -> Launches:  # fmt: skip
    """Prepare one launch of `batch` for each layout of scales; `option`: the keyword of `batch` that selects the layout."""
    laid_out = [_laid_out(x, *out, flag, whole) for x, out, flag in zip(xs, outs, flags, strict=True)]
    by_layout = {which: [job for job, found in laid_out if found == which] for which in (False, True)}
    launches = [batch(jobs, **{option: which}) for which, jobs in by_layout.items() if jobs]
    return Launches([], [(None, None)] * len(xs), launches)


# MXFP8


def _launch_mx(cast: Callable[..., None], flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None) -> None:
    """Launch an MXFP8 cast, which writes scales in the layout of the given tensors."""
    job, blocks_first = _laid_out(x, row, col, flag, _with_blocks_first)
    cast(job, blocks_first=blocks_first)


def _with_blocks_first(parts: Parts) -> Parts | None:
    """Return the codes and the complete memory of the scales if the block dimension is first in memory, else None."""
    codes, scale = parts
    shape = cuda.mx_scale_shape(codes.shape[0], codes.shape[1], tile=False, blocks_first=True)
    return _whole(codes, scale, shape, flipped=True)


def empty_mx_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Allocate E8M0 bytes [row blocks, C blocks] for codes of this shape. On devices with kernels, the bytes of 1x32 blocks are
    a view of memory with the block dimension first, which the kernel stores faster."""
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


def cast_mxfp8_kernel(
    x: Tensor | LazyMatrix, block: Block, dtype: torch.dtype, *, rule: str = "ceil", out: Parts | None = None,
    flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    x, words = opened(x, dtype, makes=block == (1, 32))
    cast = partial(cuda.cast_mxfp8, tile=MX_TILE_OF[block], rule=rule, source=words)
    return dispatch.rowwise(x, out, partial(_empty_mx, x, block, dtype), partial(_launch_mx, cast, flag))


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
    """Prepare launches of `cast_mxfp8_both` for many matrices."""
    return preparing("cast_mxfp8", xs[0], block)(xs, outs, flags, block, rule=rule)
