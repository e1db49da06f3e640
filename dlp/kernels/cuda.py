"""The CUDA kernels as typed functions on plain tensors: outputs are given, sizes are checked, pointers handed over.

What is made of one matrix is a job: a named tuple of the matrix and its outputs, None for those not wanted. A function
runs one job; its twin `..._batch` prepares many, of one input and one code dtype, for a single launch: the jobs become
a table in device memory that is written once, so preparing belongs outside of a step and calling the result inside.

    amax          max |x|                                          AmaxJob
    cast_tensor   FP8, one scale a tensor, current or delayed      TensorJob
    cast_block    FP8, one scale 128 elements or 128x128 tile      BlockJob
    cast_mxfp8    FP8, one power of two 32 elements or 32x32 tile  BlockJob

Rowwise FP8 lies in cuda_rowwise.py, NVFP4 in cuda_fp4.py, what is no cast in cuda_codes.py.

The `flag` of a cast, fp32 [], becomes NaN where a value that it quantizes is not finite, and stays as it is elsewhere.

A matrix is bf16 or fp32 [rows, cols]; its rows may be strided, its columns are adjacent. `codes` [rows, cols] are
scaled along the rows of x, `codes_t` [cols, rows] along its columns. Everything runs on torch's current stream and
reads nothing back to the host. The results equal `dlp.kernels.reference` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.launches import launch, stream_of
from dlp.kernels.reference import FLT_MAX, FP8_MAX

INPUTS = (torch.bfloat16, torch.float32)
Words = tuple[int, ...]
MATRIX: Words = (0,) * 9  # what a cast makes its elements of (`cuda_producers`): its matrix, as it is


class AmaxJob(NamedTuple):
    """max |x| of x [rows, cols] -> out, fp32 []."""

    x: Tensor
    out: Tensor


class TensorJob(NamedTuple):
    """x [rows, cols] -> codes [rows, cols] and / or codes_t [cols, rows], scale_inv fp32 [].

    The scale comes from `amax` or is `scale`, fp32 [] both. `staging` fp32 []: raised to the amax of x in the same read.
    """

    x: Tensor
    scale_inv: Tensor
    codes: Tensor | None = None
    codes_t: Tensor | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    staging: Tensor | None = None
    flag: Tensor | None = None


class BlockJob(NamedTuple):
    """x [rows, cols] -> codes [rows, cols] with their scales, and / or codes_t [cols, rows] with theirs."""

    x: Tensor
    codes: Tensor | None = None
    scale: Tensor | None = None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    flag: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Prepared jobs. Calling it launches one kernel; it keeps the tensors of its jobs alive."""

    launch: Callable[[int], None]
    holds: tuple[Any, ...]

    def __call__(self) -> None:
        self.launch(stream_of(self.holds[0]))


def readable(x: Tensor) -> bool:
    """Columns are adjacent and rows do not overlap, as they would in an expanded tensor; or there is nothing to read."""
    (rows, cols), (stride, step) = x.shape, x.stride()
    return ((cols <= 1 or step == 1) and (rows <= 1 or stride >= cols)) or not rows


def _matrix(x: Tensor) -> Words:
    """Pointer, rows, columns and row stride, in elements."""
    if x.dim() != 2 or x.dtype not in INPUTS:
        raise ValueError(f"kernels take a matrix in bf16 or fp32; got {x.dtype} {list(x.shape)}: flatten or convert it")
    (rows, cols), (stride, step) = x.shape, x.stride()
    if not readable(x):
        raise ValueError(
            f"kernels take matrices whose columns are adjacent and whose rows are disjoint; got strides ({stride}, {step}): "
            f"pass x.t() with the two orientations exchanged, or x.contiguous()"
        )
    return x.data_ptr(), rows, cols, max(stride, cols)


def _flat(x: Tensor) -> Words:
    """`_matrix`, as one long row where the rows lie one after the other."""
    pointer, rows, cols, stride = _matrix(x)
    return (pointer, 1, rows * cols, rows * cols) if stride == cols or rows == 1 else (pointer, rows, cols, stride)


def _output(tensor: Tensor | None, shape: Sequence[int], dtypes: Sequence[torch.dtype], name: str) -> int:
    """The pointer of an output, 0 for None."""
    if tensor is None:
        return 0
    if list(tensor.shape) != list(shape) or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {list(shape)} of {' or '.join(map(str, dtypes))}; got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        )
    return tensor.data_ptr()


def _scalar(tensor: Tensor | None, name: str) -> int:
    return _output(tensor, [], [torch.float32], name)


def _tiles(x: Tensor, tile: int) -> int:
    rows, cols = x.shape
    return max(1, -(-rows // tile) * -(-cols // tile))


def _code_dtype(job: TensorJob | BlockJob) -> torch.dtype:
    codes = job.codes if job.codes is not None else job.codes_t
    if codes is None:
        raise ValueError("a cast needs an output: pass codes, codes_t or both")
    return codes.dtype


def _same(values: Sequence[Any], what: str) -> Any:
    """The one value of all jobs."""
    if len(set(values)) != 1:
        raise ValueError(
            f"jobs of one launch must share {what}; got {set(values) or 'no jobs'}: give each its own launch"
        )
    return values[0]


def _table(words: Sequence[Words], pieces: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Job rows for the device and the number of pieces of work in all; word 4 of a job counts those before it."""
    rows, first = [], 0
    for row, count in zip(words, pieces, strict=True):
        rows.append([*row[:4], first, *row[5:]])
        first += count
    return torch.tensor(rows, dtype=torch.int64, device=device), first


def _batch(kernel: Callable[..., None], width: int, words: Sequence[Words], pieces: Sequence[int], jobs: Sequence[Any],
           *options: Any) -> Batch:  # fmt: skip
    """One launch of `kernel` over all jobs."""
    table, items = _table(words, pieces, jobs[0].x.device)
    empty = (0,) * width
    return Batch(partial(_launch, kernel, (empty, table.data_ptr(), len(jobs), items, *options)), (table, *jobs))


def _launch(kernel: Callable[..., None], arguments: tuple[Any, ...], stream: int) -> None:
    kernel(*arguments, stream)


# Amax


def _amax_words(job: AmaxJob) -> Words:
    return (*_flat(job.x), 0, _scalar(job.out, "out"))


def _amax_pieces(words: Words, chunk: int) -> int:
    rows, cols = words[1:3]
    padded = rows * -(-cols // 8) * 8  # rows end in a partial octet
    return -(-padded // chunk)


def amax(x: Tensor, out: Tensor) -> None:
    """max |x| of x [rows, cols] -> out, fp32 []; NaN is ignored, an empty matrix gives 0."""
    module = loader.load()
    words = _amax_words(AmaxJob(x, out))
    pieces = _amax_pieces(words, module.AMAX_CHUNK)
    launch("amax", x, words, 0, 1, pieces, x.dtype == torch.float32, out.data_ptr())


def amax_batch(xs: Sequence[Tensor], out: Tensor) -> Batch:
    """max |x| of each matrix -> out, fp32 [number of matrices]."""
    module = loader.load()
    pointer = _output(out, [len(xs)], [torch.float32], "out")
    jobs = [AmaxJob(x, out[i]) for i, x in enumerate(xs)]
    wide = _same([x.dtype for x in xs], "the input dtype") == torch.float32
    words = [_amax_words(job) for job in jobs]
    pieces = [_amax_pieces(row, module.AMAX_CHUNK) for row in words]
    return _batch(module.amax, len(words[0]), words, pieces, jobs, wide, pointer)


def set_zero(x: Tensor) -> None:
    """0 into all of a contiguous tensor."""
    launch("set_zero", x, x.data_ptr(), x.nbytes)


# FP8, one scale a tensor


def scale_rule(
    dtype: torch.dtype, power_of_two: bool, epsilon: float, inf_scale: float = FLT_MAX
) -> tuple[float, float, float, bool]:
    """The options of `reference.scale_from_amax`, as kernels take them."""
    return FP8_MAX[dtype], epsilon, inf_scale, power_of_two


def _tensor_words(job: TensorJob, matrix: Words) -> Words:
    rows, cols = job.x.shape
    if (job.amax is None) == (job.scale is None):
        raise ValueError("a per-tensor cast takes its scale from amax or from scale: pass one of them")
    dtype = [_code_dtype(job)]
    return (
        *matrix, 0,
        _output(job.codes, (rows, cols), dtype, "codes"), _output(job.codes_t, (cols, rows), dtype, "codes_t"),
        _scalar(job.amax, "amax"), _scalar(job.scale, "scale"), _scalar(job.staging, "staging"),
        _scalar(job.scale_inv, "scale_inv"), _scalar(job.flag, "flag"),
    )  # fmt: skip


def cast_tensor(job: TensorJob, *, power_of_two: bool = False, epsilon: float = 0.0, source: Words = MATRIX) -> None:
    """Per-tensor FP8: q = enc(fl(x * scale)), in one read whatever is wanted. `source`: of cuda_producers."""
    module = loader.load()
    dtype = _code_dtype(job)
    rule = scale_rule(dtype, power_of_two, epsilon)
    wide, e5m2 = job.x.dtype == torch.float32, dtype == torch.float8_e5m2
    if job.codes_t is None and source == MATRIX:
        launch("cast_tensor", job.x, _tensor_words(job, _flat(job.x)), wide, e5m2, rule)
        return
    tiles = _tiles(job.x, module.TILE)
    observe = job.staging is not None
    words = _tensor_words(job, _matrix(job.x))
    launch("cast_transpose", job.x, words, 0, 1, tiles, wide, e5m2, rule, observe, source)


def cast_tensor_batch(jobs: Sequence[TensorJob], *, power_of_two: bool = False, epsilon: float = 0.0) -> Batch:
    """The same for many matrices, whose scales are all current or all delayed."""
    module = loader.load()
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of their codes")
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    observe = _same([job.staging is not None for job in jobs], "having staging")
    words = [_tensor_words(job, _matrix(job.x)) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    rule = scale_rule(dtype, power_of_two, epsilon)
    e5m2 = dtype == torch.float8_e5m2
    return _batch(module.cast_transpose, len(words[0]), words, tiles, jobs, wide, e5m2, rule, observe, MATRIX)


# FP8, one scale 128 elements or tile


def block_scale_shape(lines: int, contraction: int, *, tile: bool, gemm_layout: bool) -> tuple[int, int]:
    """The shape of the scales of codes [lines, contraction]: compact, or as cuBLASLt reads them.

    Compact is [lines or line tiles, contraction blocks]; VEC128_32F (not tile) reads [blocks, pad4(lines)] and
    BLK128x128_32F (tile) [line tiles, pad4(blocks)]; what fills up is 0.
    """
    blocks, down = -(-contraction // 128), -(-lines // 128) if tile else lines
    if not gemm_layout:
        return down, blocks
    return (down, -(-blocks // 4) * 4) if tile else (blocks, -(-down // 4) * 4)


def _check_together(job: BlockJob) -> None:
    if (job.codes is None) != (job.scale is None) or (job.codes_t is None) != (job.scale_t is None):
        raise ValueError("a block cast stores codes and their scales together: pass both of an orientation, or neither")


def _block_words(job: BlockJob, tile: bool, gemm_layout: bool) -> Words:
    rows, cols = job.x.shape
    dtype, fp32 = [_code_dtype(job)], [torch.float32]
    _check_together(job)
    shape, shape_t = ((lines, along) for lines, along in ((rows, cols), (cols, rows)))
    return (
        *_matrix(job.x), 0,
        _output(job.codes, shape, dtype, "codes"),
        _output(job.scale, block_scale_shape(*shape, tile=tile, gemm_layout=gemm_layout), fp32, "scale"),
        _output(job.codes_t, shape_t, dtype, "codes_t"),
        _output(job.scale_t, block_scale_shape(*shape_t, tile=tile, gemm_layout=gemm_layout), fp32, "scale_t"),
        _scalar(job.flag, "flag"),
    )  # fmt: skip


def cast_block(
    job: BlockJob, *, tile: bool, power_of_two: bool = True, epsilon: float = 0.0, gemm_layout: bool = False,
    source: Words = MATRIX,
) -> None:  # fmt: skip
    """Block FP8, a scale every 128 elements of the contraction or every 128x128 tile, both orientations in one read.

    Scales are fp32 scale_inv of `block_scale_shape`. `source`: of cuda_producers, not for tiles.
    """
    dtype = _code_dtype(job)
    kernel, more = _block_kernel("cast_block", tile, source)
    rule = scale_rule(dtype, power_of_two, epsilon, torch.finfo(job.x.dtype).max)
    words, tiles = _block_words(job, tile, gemm_layout), _tiles(job.x, loader.load().TILE)
    wide, e5m2 = job.x.dtype == torch.float32, dtype == torch.float8_e5m2
    launch(kernel, job.x, words, 0, 1, tiles, wide, e5m2, rule, gemm_layout, *more)


def _block_kernel(name: str, tile: bool, source: Words) -> tuple[str, tuple[Words, ...]]:
    """The kernel for blocks along the contraction or for tiles, and what it takes beside: tiles are of weights, which
    nothing produces."""
    assert not tile or source == MATRIX
    return (f"{name}_2d", ()) if tile else (f"{name}_1d", (source,))


def cast_block_batch(
    jobs: Sequence[BlockJob], *, tile: bool, power_of_two: bool = True, epsilon: float = 0.0, gemm_layout: bool = False
) -> Batch:
    """The same for many matrices."""
    module = loader.load()
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of their codes")
    x_dtype = _same([job.x.dtype for job in jobs], "the input dtype")
    kernel, more = _block_kernel("cast_block", tile, MATRIX)
    rule = scale_rule(dtype, power_of_two, epsilon, torch.finfo(x_dtype).max)
    words = [_block_words(job, tile, gemm_layout) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    wide, e5m2 = x_dtype == torch.float32, dtype == torch.float8_e5m2
    return _batch(getattr(module, kernel), len(words[0]), words, tiles, jobs, wide, e5m2, rule, gemm_layout, *more)


# MXFP8


def mx_scale_shape(lines: int, contraction: int, *, tile: bool, blocks_first: bool = False) -> tuple[int, int]:
    """The shape of the E8M0 bytes of codes [lines, contraction]: [lines or line tiles, contraction blocks], or blocks first,
    [blocks, pad4(lines)], which only 1x32 blocks know."""
    blocks = -(-contraction // 32)
    return (blocks, -(-lines // 4) * 4) if blocks_first else ((-(-lines // 32) if tile else lines), blocks)


def _mx_words(job: BlockJob, tile: bool, blocks_first: bool) -> Words:
    rows, cols = job.x.shape
    dtype, byte = [_code_dtype(job)], [torch.uint8]
    _check_together(job)
    scales, scales_t = (
        mx_scale_shape(lines, along, tile=tile, blocks_first=blocks_first)
        for lines, along in ((rows, cols), (cols, rows))
    )
    return (
        *_matrix(job.x), 0,
        _output(job.codes, (rows, cols), dtype, "codes"), _output(job.scale, scales, byte, "scale"),
        _output(job.codes_t, (cols, rows), dtype, "codes_t"), _output(job.scale_t, scales_t, byte, "scale_t"),
        _scalar(job.flag, "flag"),
    )  # fmt: skip


def _mx_kernel(tile: bool, blocks_first: bool, source: Words) -> tuple[str, tuple[Any, ...]]:
    """`_block_kernel`; tiles have few scales, which are compact."""
    assert not tile or not blocks_first
    kernel, more = _block_kernel("cast_mxfp8", tile, source)
    return kernel, more if tile else (blocks_first, *more)


def cast_mxfp8(
    job: BlockJob, *, tile: bool, rule: str = "ceil", blocks_first: bool = False, source: Words = MATRIX
) -> None:
    """MXFP8, an E8M0 byte every 32 elements of the contraction or every 32x32 tile, both orientations in one read.

    rule: "ceil" or "floor", see `reference.mx_scale`; the bytes are those of `mx_scale_shape`. `source`: of
    cuda_producers, not for tiles.
    """
    kernel, more = _mx_kernel(tile, blocks_first, source)
    words, tiles = _mx_words(job, tile, blocks_first), _tiles(job.x, loader.load().TILE)
    wide, e5m2 = job.x.dtype == torch.float32, _code_dtype(job) == torch.float8_e5m2
    launch(kernel, job.x, words, 0, 1, tiles, wide, e5m2, rule == "floor", *more)


def cast_mxfp8_batch(jobs: Sequence[BlockJob], *, tile: bool, rule: str = "ceil", blocks_first: bool = False) -> Batch:
    """The same for many matrices."""
    module = loader.load()
    e5m2 = _same([_code_dtype(job) for job in jobs], "the dtype of their codes") == torch.float8_e5m2
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    kernel, more = _mx_kernel(tile, blocks_first, MATRIX)
    words = [_mx_words(job, tile, blocks_first) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    return _batch(getattr(module, kernel), len(words[0]), words, tiles, jobs, wide, e5m2, rule == "floor", *more)
