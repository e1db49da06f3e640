"""Amaxes and the casts to FP8 of a matrix: by the CUDA kernels where its device has them, else by the reference, same bits.

Other input dtypes than bf16 and fp32, and blocks of other sizes, have no kernel and run the reference.

    amax, amax_lines        max |x|, of the matrix or of every row and column
    cast_fp8_tensor         one scale a tensor, made from an amax or given
    cast_fp8_rowwise        one scale a row, made from its amax
    cast_fp8_block          one fp32 scale 128 elements or 128x128 tile
    cast_mxfp8              one power of two 32 elements or 32x32 tile

Where they take a matrix they also take a `Produced` one, which a kernel makes on its way (see produced.py).

A cast returns the parts of its operand, written into `out` where that is given. A `flag`, fp32 [], becomes NaN where a value
that it quantizes is not finite: so it is known later, and nobody waits for it. Its `_both` makes the operands of x and
of x.t() in one read: the bits of two casts. Its `_batch` prepares that, or one of the two, for many matrices in one
launch, into given outputs, and exists on CUDA only. NVFP4 lies in casts_fp4.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_rowwise, dispatch, gemms, loader, reference
from dlp.kernels.cuda import MATRIX, BlockJob, TensorJob, Words
from dlp.kernels.cuda_rowwise import RowwiseJob
from dlp.kernels.dispatch import Flags, Launch, Launches, Outs, Parts, Wanted, both_into, into
from dlp.kernels.produced import Produced, opened
from dlp.kernels.reference import Fp8Scale, watched
from dlp.kernels.reference.scales import Block

WITH_KERNELS = (
    "amax", "cast_fp8_tensor", "cast_fp8_rowwise", "cast_fp8_block", "cast_mxfp8", "cast_nvfp4",
)  # fmt: skip
TILE_OF = {(1, 128): False, (128, 128): True}  # the blocks that kernels know
MX_TILE_OF = {(1, 32): False, (32, 32): True}
RowwiseWay = tuple[Parts, Tensor]  # of one orientation, with its amaxes


def quantizer_kernels(op: str, device_type: str) -> str:
    """What runs `op`, a cast of `dlp.kernels.ops` by name, on a device, as plans print it: "kernel", or "reference",
    with what is missing where kernels cannot be built. On CUDA this builds them, once a machine."""
    if device_type != "cuda" or op not in WITH_KERNELS:
        return "reference"
    missing = loader.missing()
    return f"reference ({missing})" if missing else "kernel"


def has_batches(x: Tensor) -> bool:
    """Whether matrices like x can be cast in place by the batched casts: kernels, which read it as it lies."""
    return dispatch.has_kernel(x) and cuda.readable(x)


def amax(x: Tensor | Produced, dim: int | None = None) -> Tensor:
    """max |x| as fp32, over the whole tensor (shape []) or along `dim`; NaN is ignored, an empty tensor gives 0."""
    if isinstance(x, Produced):
        found = x.amax() if dim is None else None
        return amax(x.value, dim) if found is None else found
    if not dispatch.has_kernel(x):
        return reference.amax(x, dim)
    matrix, flipped = dispatch.adjacent(x)
    if dim is not None:
        rows, cols = _amaxes_of_lines(matrix, (dim % 2 == 1) != flipped, (dim % 2 == 0) != flipped)
        return cols if rows is None else rows
    out = torch.empty((), device=x.device)
    cuda.amax(matrix, out)
    return out


def amax_lines(x: Tensor | Produced) -> tuple[Tensor, Tensor]:
    """max |x| of every row [rows] and of every column [C], fp32, in one read."""
    x, words = opened(x)
    if not dispatch.has_kernel(x):
        return reference.amax(x, 1), reference.amax(x, 0)
    matrix, flipped = dispatch.adjacent(x)
    lines = _amaxes_of_lines(matrix, True, True, words)
    return lines[::-1] if flipped else lines


def _amaxes_of_lines(matrix: Tensor, rows: bool, cols: bool, words: Words = MATRIX) -> tuple[Any, Any]:
    """The amaxes of a matrix that kernels can read, of its rows and of its columns where they are wanted. `words`: what
    makes its elements, here as below."""
    sizes = [size if wanted else 0 for size, wanted in zip(matrix.shape, (rows, cols), strict=True)]
    whole = torch.empty(sum(sizes), device=matrix.device)
    cuda.set_zero(whole)
    lines = whole.split(sizes)
    made = lines[0] if rows else None, lines[1] if cols else None
    cuda_rowwise.amax_lines(matrix, *made, words)
    return made


# One scale a tensor


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


def cast_fp8_tensor(
    x: Tensor | Produced, dtype: torch.dtype, source: Fp8Scale, *, out: Parts | None = None, flag: Tensor | None = None
) -> Parts:
    """x [rows, C] -> codes [rows, C] of `dtype` and fp32 scale_inv []; `source` says where the scale comes from."""
    x, words = opened(x, dtype)
    if not dispatch.has_kernel(x):
        return into(out, reference.cast_fp8_tensor(watched(x, flag), dtype, source))
    return dispatch.rowwise(x, out, partial(_empty_tensor, x, dtype), partial(_launch_tensor, source, flag, words))


def cast_fp8_tensor_both(
    x: Tensor | Produced, dtype: torch.dtype, source: Fp8Scale, *, outs: Outs = None, flag: Tensor | None = None
) -> tuple[Parts, Parts]:
    """`cast_fp8_tensor` of x and of x.t(); their scale_inv share memory, except in given outputs."""
    x, words = opened(x, dtype)
    if not dispatch.has_kernel(x):
        codes, scale_inv = reference.cast_fp8_tensor(watched(x, flag), dtype, source)
        row, col = outs if outs is not None else (None, None)
        return into(row, (codes, scale_inv)), into(col, (codes.t().contiguous(), scale_inv))
    if outs is None:
        row = _empty_tensor(x, dtype, x.shape)
        outs = row, (torch.empty(x.shape[::-1], dtype=dtype, device=x.device), row[1])
    return dispatch.both(x, outs, partial(_empty_tensor, x, dtype), partial(_launch_tensor, source, flag, words))


def cast_fp8_tensor_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], sources: Sequence[Fp8Scale], flags: Flags
) -> Launches:
    """Prepares `cast_fp8_tensor_both` of many matrices that `has_batches`; the scale_inv of both orientations share memory.
    A source without amax or scale takes the amax of its matrix."""
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


# One scale a row


def _empty_rowwise(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), torch.empty(shape[0], device=x.device)


def _rowwise_job(x: Tensor, flag: Tensor | None, row: RowwiseWay | None, col: RowwiseWay | None) -> RowwiseJob:
    ways = [(None,) * 3 if way is None else (way[0][0], way[1], way[0][1]) for way in (row, col)]
    return RowwiseJob(x, *ways[0], *ways[1])._replace(flag=flag)


def cast_fp8_rowwise(
    x: Tensor | Produced, amax: Tensor, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """x [rows, C], the amaxes of its rows -> codes [rows, C] of `dtype` and fp32 scale_inv [rows]."""
    x, words = opened(x, dtype)
    if not dispatch.has_kernel(x):
        return into(out, _rowwise_by_reference(watched(x, flag), amax, dtype, power_of_two, epsilon))

    matrix, flipped = dispatch.adjacent(x)
    made = out if out is not None else _empty_rowwise(x, dtype, x.shape)
    job = _rowwise_job(matrix, flag, *((None, (made, amax)) if flipped else ((made, amax), None)))
    cuda_rowwise.cast_rowwise(job, power_of_two=power_of_two, epsilon=epsilon, source=words)
    return made


def cast_fp8_rowwise_both(
    x: Tensor | Produced, amaxes: tuple[Tensor, Tensor], dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    outs: Outs = None, flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """`cast_fp8_rowwise` of x and of x.t(), by the amaxes of the rows and of the columns of x."""
    x, words = opened(x, dtype)
    if not dispatch.has_kernel(x):
        row, col = outs if outs is not None else (None, None)
        make = partial(_rowwise_by_reference, dtype=dtype, power_of_two=power_of_two, epsilon=epsilon)
        return into(row, make(watched(x, flag), amaxes[0])), into(col, make(x.t(), amaxes[1]))

    matrix, flipped = dispatch.adjacent(x)
    row, col = outs if outs is not None else (_empty_rowwise(x, dtype, shape) for shape in (x.shape, x.shape[::-1]))
    ways = (row, amaxes[0]), (col, amaxes[1])
    job = _rowwise_job(matrix, flag, *(ways[::-1] if flipped else ways))
    cuda_rowwise.cast_rowwise(job, power_of_two=power_of_two, epsilon=epsilon, source=words)
    return row, col


def _rowwise_by_reference(x: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> Parts:
    scale = reference.scale_from_amax(amax, reference.FP8_MAX[dtype], power_of_two=power_of_two, epsilon=epsilon)
    return reference.cast_fp8(x, scale[:, None], dtype), scale.reciprocal()


def _zero(x: Tensor) -> None:
    x.zero_()


def cast_fp8_rowwise_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, *, power_of_two: bool, epsilon: float = 0.0
) -> Launches:
    """Prepares `cast_fp8_rowwise_both` of many matrices."""
    lines = torch.zeros(sum(sum(x.shape) for x in xs), device=xs[0].device)
    pieces = iter(lines.split([size for x in xs for size in x.shape]))
    jobs = []
    for x, (row, col), flag in zip(xs, outs, flags, strict=True):
        ways = [None if parts is None else (parts, amax) for parts, amax in ((row, next(pieces)), (col, next(pieces)))]
        jobs.append(_rowwise_job(x, flag, *ways))
    amaxes = [(job.amax, job.amax_t) for job in jobs]
    observe: list[Launch] = [partial(_zero, lines), cuda_rowwise.amax_lines_batch(xs, amaxes)]
    return Launches(
        observe, amaxes, [cuda_rowwise.cast_rowwise_batch(jobs, power_of_two=power_of_two, epsilon=epsilon)]
    )


# One scale a block


def _block_job(x: Tensor, flag: Tensor | None, row: Parts | None, col: Parts | None) -> BlockJob:
    return BlockJob(x, *(row or (None, None)), *(col or (None, None)))._replace(flag=flag)


def _launch_block(
    kernel: Callable[..., None], tile: bool, flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None
) -> None:
    """Scales are written as they lie."""
    job, gemm_layout = _laid_out(x, row, col, flag, partial(_as_gemms_read, tile=tile))
    kernel(job, gemm_layout=gemm_layout)


def _laid_out(
    x: Tensor, row: Parts | None, col: Parts | None, flag: Tensor | None, whole: Callable[[Parts], Parts | None]
) -> tuple[BlockJob, bool]:
    """The job of a cast into these parts, and whether all their scales lie in the layout that `whole` knows, which then
    returns codes and the whole memory of the scales; else they are compact."""
    views = [parts and whole(parts) for parts in (row, col)]
    if all(parts is None or view for parts, view in zip((row, col), views, strict=True)):
        return _block_job(x, flag, *views), True
    return _block_job(x, flag, row, col), False


def _as_gemms_read(parts: Parts, tile: bool) -> Parts | None:
    """Codes, and the whole memory of their scales if these lie as GEMMs read them."""
    codes, scale_inv = parts
    shape = cuda.block_scale_shape(codes.shape[0], codes.shape[1], tile=tile, gemm_layout=True)
    return _whole(codes, scale_inv, shape, flipped=not tile)


def _whole(codes: Tensor, scale: Tensor, shape: tuple[int, int], flipped: bool) -> Parts | None:
    """Codes, and the whole memory, of this shape, of which the scales are a part, of its transpose if `flipped`; None where
    they lie otherwise."""
    lies = (1, shape[1]) if flipped else (shape[1], 1)
    return (codes, scale.as_strided(shape, (shape[1], 1))) if scale.stride() == lies else None


def empty_block_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Uninitialised fp32 scale_inv [row blocks, C blocks] of codes of this shape. Where GEMMs scale blocks themselves it is
    a view of what they read, so that nothing is rearranged for them."""
    down, across = cuda.block_scale_shape(shape[0], shape[1], tile=tile, gemm_layout=False)
    if not gemms.scales_blocks(device):
        return torch.empty(down, across, device=device)
    whole = torch.empty(cuda.block_scale_shape(shape[0], shape[1], tile=tile, gemm_layout=True), device=device)
    return whole[:, :across] if tile else whole.t()[:down]


def _empty_block(x: Tensor, tile: bool, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), empty_block_scales(shape, tile, x.device)


def cast_fp8_block(
    x: Tensor | Produced, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0,
    out: Parts | None = None, flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """x [rows, C] -> codes [rows, C] of `dtype` and fp32 scale_inv [row blocks, C blocks]; edge blocks may be partial.

    A quotient max/amax that overflows becomes the largest finite value of x's dtype.
    """
    options: dict[str, Any] = {"power_of_two": power_of_two, "epsilon": epsilon}
    x, words = opened(x, dtype, makes=block == (1, 128))
    if block not in TILE_OF or not dispatch.has_kernel(x):
        return into(out, reference.cast_fp8_block(watched(x, flag), block, dtype, **options))
    tile = TILE_OF[block]
    kernel = partial(cuda.cast_block, tile=tile, source=words, **options)
    return dispatch.rowwise(x, out, partial(_empty_block, x, tile, dtype), partial(_launch_block, kernel, tile, flag))


def cast_fp8_block_both(
    x: Tensor | Produced,
    block: Block,
    dtype: torch.dtype,
    *,
    power_of_two: bool,
    epsilon: float = 0.0,
    outs: Outs = None,
    flag: Tensor | None = None,
) -> tuple[Parts, Parts]:
    """`cast_fp8_block` of x and of x.t()."""
    options: dict[str, Any] = {"power_of_two": power_of_two, "epsilon": epsilon}
    x, words = opened(x, dtype, makes=block == (1, 128))
    if block not in TILE_OF or not dispatch.has_kernel(x):
        return both_into(outs, partial(reference.cast_fp8_block, block=block, dtype=dtype, **options), watched(x, flag))
    tile = TILE_OF[block]
    kernel = partial(cuda.cast_block, tile=tile, source=words, **options)
    return dispatch.both(x, outs, partial(_empty_block, x, tile, dtype), partial(_launch_block, kernel, tile, flag))


def cast_fp8_block_batch(
    xs: Sequence[Tensor],
    outs: Sequence[Wanted],
    flags: Flags,
    block: Block,
    *,
    power_of_two: bool,
    epsilon: float = 0.0,
) -> Launches:
    """Prepares `cast_fp8_block_both` of many matrices."""
    tile = TILE_OF[block]
    batch = partial(cuda.cast_block_batch, tile=tile, power_of_two=power_of_two, epsilon=epsilon)
    return _batch_laid_out(xs, outs, flags, partial(_as_gemms_read, tile=tile), batch, "gemm_layout")


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


def _launch_mx(
    kernel: Callable[..., None], flag: Tensor | None, x: Tensor, row: Parts | None, col: Parts | None
) -> None:
    """Scales are written as they lie."""
    job, blocks_first = _laid_out(x, row, col, flag, _with_blocks_first)
    kernel(job, blocks_first=blocks_first)


def _with_blocks_first(parts: Parts) -> Parts | None:
    """Codes, and the whole memory of their scales if these lie blocks first."""
    codes, scale = parts
    shape = cuda.mx_scale_shape(codes.shape[0], codes.shape[1], tile=False, blocks_first=True)
    return _whole(codes, scale, shape, flipped=True)


def empty_mx_scales(shape: Sequence[int], tile: bool, device: torch.device) -> Tensor:
    """Uninitialised E8M0 bytes [row blocks, C blocks] of codes of this shape. Where kernels cast, those of 1x32 blocks are a
    view of memory with the blocks first: a cast that stores them so reaches 0.9 of a copy instead of 0.84."""
    down, across = cuda.mx_scale_shape(shape[0], shape[1], tile=tile)
    if tile or not dispatch.runs_kernels(device):
        return torch.empty(down, across, dtype=torch.uint8, device=device)
    whole = cuda.mx_scale_shape(shape[0], shape[1], tile=False, blocks_first=True)
    return torch.empty(whole, dtype=torch.uint8, device=device).t()[:down]


def _empty_mx(x: Tensor, block: Block, dtype: torch.dtype, shape: Sequence[int]) -> Parts:
    return torch.empty(shape, dtype=dtype, device=x.device), empty_mx_scales(shape, MX_TILE_OF[block], x.device)


def cast_mxfp8(
    x: Tensor | Produced, block: Block, dtype: torch.dtype, *, rule: str = "ceil", out: Parts | None = None,
    flag: Tensor | None = None,
) -> Parts:  # fmt: skip
    """x [rows, C] -> codes [rows, C] of `dtype` and E8M0 bytes [row blocks, C blocks], by scale rule "ceil" or "floor"."""
    x, words = opened(x, dtype, makes=block == (1, 32))
    if not dispatch.has_kernel(x):
        return into(out, reference.cast_mxfp8(watched(x, flag), block, dtype, rule=rule))
    kernel = partial(cuda.cast_mxfp8, tile=MX_TILE_OF[block], rule=rule, source=words)
    return dispatch.rowwise(x, out, partial(_empty_mx, x, block, dtype), partial(_launch_mx, kernel, flag))


def cast_mxfp8_both(
    x: Tensor | Produced, block: Block, dtype: torch.dtype, *, rule: str = "ceil", outs: Outs = None,
    flag: Tensor | None = None,
) -> tuple[Parts, Parts]:  # fmt: skip
    """`cast_mxfp8` of x and of x.t()."""
    x, words = opened(x, dtype, makes=block == (1, 32))
    if not dispatch.has_kernel(x):
        return both_into(outs, partial(reference.cast_mxfp8, block=block, dtype=dtype, rule=rule), watched(x, flag))
    kernel = partial(cuda.cast_mxfp8, tile=MX_TILE_OF[block], rule=rule, source=words)
    return dispatch.both(x, outs, partial(_empty_mx, x, block, dtype), partial(_launch_mx, kernel, flag))


def cast_mxfp8_batch(
    xs: Sequence[Tensor], outs: Sequence[Wanted], flags: Flags, block: Block, *, rule: str = "ceil"
) -> Launches:
    """Prepares `cast_mxfp8_both` of many matrices."""
    batch = partial(cuda.cast_mxfp8_batch, tile=MX_TILE_OF[block], rule=rule)
    return _batch_laid_out(xs, outs, flags, _with_blocks_first, batch, "blocks_first")
