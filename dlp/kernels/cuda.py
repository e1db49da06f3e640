"""CUDA kernels as typed functions on plain tensors: the functions check sizes of given outputs and pass pointers.

A job is a named tuple of one matrix and the outputs; an output that is not requested is None. A function runs one job. The
variant `..._batch` prepares one launch for many jobs with the same input dtype and code dtype. Preparing copies a table of jobs
to the device, so call it once, outside of training steps; calling the result launches the kernel.

    amax          max |x|                                              AmaxJob
    cast_tensor   FP8, one scale per tensor, current or delayed        TensorJob
    cast_block    FP8, one scale per 128 elements or 128x128 tile      BlockJob
    cast_mxfp8    FP8, one power of two per 32 elements or 32x32 tile  BlockJob

Other files: cuda_rowwise.py (rowwise FP8), cuda_fp4.py (NVFP4), cuda_gate_grads.py (casts of both gradients of a SwiGLU),
cuda_producers.py (norms, activations, column sums), cuda_loss.py (cross entropy), cuda_codes.py (decoding, transposes, sums).

A matrix is bf16 or fp32 [rows, cols] with adjacent columns; rows may be strided. Scales of `codes` [rows, cols] span rows of x,
scales of `codes_t` [cols, rows] span columns. A cast sets `flag`, fp32 [], to NaN if a value of x is not finite. All kernels
run on torch's current stream without a copy to the host. Amaxes and casts are bitwise equal to `dlp.kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.launches import launch, stream_of
from dlp.kernels.reference import FLT_MAX, FP8_MAX

INPUTS = (torch.bfloat16, torch.float32)
Words = tuple[int, ...]
FIRST_PIECE = 4  # index of `Matrix::first` (csrc/kernels.h) in the packed arguments of a job
MATRIX: Words = (0,) * 11  # packed arguments of no producer (`cuda_producers`): the kernel reads the matrix itself


class AmaxJob(NamedTuple):
    """Job: write max |x| of x [rows, cols] to out, fp32 []."""

    x: Tensor
    out: Tensor


class TensorJob(NamedTuple):
    """Job: quantize x [rows, cols] to codes [rows, cols], codes_t [cols, rows] or both, and write scale_inv fp32 [].

    The scale is computed from `amax`, fp32 [], or given as `scale`, fp32 []; one of the two is None. The same read of x raises
    `staging`, fp32 [], to max |x|.
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
    """Job: quantize x [rows, cols] to codes [rows, cols] with scales, codes_t [cols, rows] with scales, or both."""

    x: Tensor
    codes: Tensor | None = None
    scale: Tensor | None = None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    flag: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Prepared jobs. A call launches one kernel; the object keeps the tensors of the jobs alive."""

    launch: Callable[[int], None]
    holds: tuple[Any, ...]

    def __call__(self) -> None:
        self.launch(stream_of(self.holds[0]))


def readable(x: Tensor) -> bool:
    """Return whether columns are adjacent and rows do not overlap (unlike in an expanded tensor), or x is empty."""
    (rows, cols), (stride, step) = x.shape, x.stride()
    return ((cols <= 1 or step == 1) and (rows <= 1 or stride >= cols)) or not rows


def _matrix(x: Tensor) -> Words:
    """Return pointer, rows, columns and row stride (in elements) of a matrix that kernels can read; else raise ValueError."""
    if x.dim() != 2 or x.dtype not in INPUTS:
        raise ValueError(
            f"kernels take a matrix in bf16 or fp32; got {x.dtype} {list(x.shape)}: flatten or convert the tensor"
        )
    (rows, cols), (stride, step) = x.shape, x.stride()
    if not readable(x):
        raise ValueError(
            f"kernels take matrices whose columns are adjacent and whose rows are disjoint; got strides ({stride}, {step}): "
            f"pass x.t() with the two orientations exchanged, or x.contiguous()"
        )
    return x.data_ptr(), rows, cols, max(stride, cols)


def _flat(x: Tensor) -> Words:
    """Return `_matrix` of x as one long row if x is contiguous, else `_matrix` of x."""
    pointer, rows, cols, stride = _matrix(x)
    return (pointer, 1, rows * cols, rows * cols) if stride == cols or rows == 1 else (pointer, rows, cols, stride)


def _output(tensor: Tensor | None, shape: Sequence[int], dtypes: Sequence[torch.dtype], name: str) -> int:
    """Check an output, and return its pointer; 0 for None. Raises ValueError for another shape or dtype, or if the output is
    not contiguous."""
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
    """Return the number of tiles of x. A size of 0 counts as 1, so that kernels write the scales and sums of all lines."""
    return prod(max(1, -(-size // tile)) for size in x.shape)


def _code_dtype(job: TensorJob | BlockJob) -> torch.dtype:
    codes = job.codes if job.codes is not None else job.codes_t
    if codes is None:
        raise ValueError("a cast needs an output: pass codes, codes_t or both")
    return codes.dtype


def _same(values: Sequence[Any], what: str) -> Any:
    """Return the common value of all jobs. Raises ValueError if the values differ; `what`: name of the value in the message."""
    if len(set(values)) != 1:
        raise ValueError(f"jobs of one launch must share {what}; got {set(values) or 'no jobs'}: use separate launches")
    return values[0]


def _table(words: Sequence[Words], pieces: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Return the table of jobs on the device and the total number of pieces of work. Each row stores the number of pieces of
    previous rows (`Matrix::first` in csrc/kernels.h)."""
    rows, first = [], 0
    for row, count in zip(words, pieces, strict=True):
        rows.append([*row[:FIRST_PIECE], first, *row[FIRST_PIECE + 1 :]])
        first += count
    return torch.tensor(rows, dtype=torch.int64, device=device), first


def _batch(kernel: Callable[..., None], width: int, words: Sequence[Words], pieces: Sequence[int], jobs: Sequence[Any],
           *options: Any) -> Batch:  # fmt: skip
    """Prepare one launch of `kernel` for all jobs."""
    table, items = _table(words, pieces, jobs[0].x.device)
    empty = (0,) * width
    return Batch(partial(_launch, kernel, (empty, table.data_ptr(), len(jobs), items, *options)), (table, *jobs))


def _launch(kernel: Callable[..., None], arguments: tuple[Any, ...], stream: int) -> None:
    kernel(*arguments, stream)


# Amax


def _amax_words(job: AmaxJob) -> Words:
    return (*_flat(job.x), 0, _scalar(job.out, "out"))


def _amax_pieces(x: Tensor, chunk: int) -> int:
    _, rows, cols, _ = _flat(x)
    padded = rows * -(-cols // 8) * 8  # number of elements, with the last octet of each row counted as complete
    return -(-padded // chunk)


def amax(x: Tensor, out: Tensor) -> None:
    """Write max |x| of x [rows, cols] to out, fp32 []; NaN is ignored, and an empty matrix gives 0."""
    module = loader.load()
    pieces = _amax_pieces(x, module.AMAX_CHUNK)
    launch("amax", x, _amax_words(AmaxJob(x, out)), 0, 1, pieces, x.dtype == torch.float32, out.data_ptr())


def amax_batch(xs: Sequence[Tensor], out: Tensor) -> Batch:
    """Prepare a launch that writes max |x| of each matrix to out, fp32 [number of matrices]."""
    module = loader.load()
    pointer = _output(out, [len(xs)], [torch.float32], "out")
    jobs = [AmaxJob(x, out[i]) for i, x in enumerate(xs)]
    wide = _same([x.dtype for x in xs], "the input dtype") == torch.float32
    words = [_amax_words(job) for job in jobs]
    pieces = [_amax_pieces(x, module.AMAX_CHUNK) for x in xs]
    return _batch(module.amax, len(words[0]), words, pieces, jobs, wide, pointer)


def set_zero(x: Tensor) -> None:
    """Fill a contiguous tensor with 0."""
    launch("set_zero", x, x.data_ptr(), x.nbytes)


# FP8, one scale per tensor


def scale_rule(
    dtype: torch.dtype, power_of_two: bool, epsilon: float, inf_scale: float = FLT_MAX
) -> tuple[float, float, float, bool]:
    """Return the options of `reference.scale_from_amax` as kernels take them."""
    return FP8_MAX[dtype], epsilon, inf_scale, power_of_two


def _tensor_words(job: TensorJob, matrix: Words) -> Words:
    rows, cols = job.x.shape
    if (job.amax is None) == (job.scale is None):
        raise ValueError("a per-tensor cast takes the scale from amax or from scale: pass exactly one of the two")
    dtype = [_code_dtype(job)]
    return (
        *matrix, 0,
        _output(job.codes, (rows, cols), dtype, "codes"), _output(job.codes_t, (cols, rows), dtype, "codes_t"),
        _scalar(job.amax, "amax"), _scalar(job.scale, "scale"), _scalar(job.staging, "staging"),
        _scalar(job.scale_inv, "scale_inv"), _scalar(job.flag, "flag"),
    )  # fmt: skip


def cast_tensor(job: TensorJob, *, power_of_two: bool = False, epsilon: float = 0.0, source: Words = MATRIX) -> None:
    """Cast to per-tensor FP8 from one read of x: codes of fl(x * scale), where fl rounds to fp32. `source`: packed
    arguments of a producer (`cuda_producers`)."""
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
    """Prepare a launch of `cast_tensor` for many matrices; all jobs have `staging`, or none has."""
    module = loader.load()
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of codes")
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    observe = _same([job.staging is not None for job in jobs], "the presence of staging")
    words = [_tensor_words(job, _matrix(job.x)) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    rule = scale_rule(dtype, power_of_two, epsilon)
    e5m2 = dtype == torch.float8_e5m2
    return _batch(module.cast_transpose, len(words[0]), words, tiles, jobs, wide, e5m2, rule, observe, MATRIX)


# FP8, one scale per 128 elements or tile


def block_scale_shape(lines: int, contraction: int, *, tile: bool, gemm_layout: bool) -> tuple[int, int]:
    """Return the shape of the scales of codes [lines, contraction]: compact, or as cuBLASLt reads scales.

    Compact scales have the shape [lines or line tiles, contraction blocks]. cuBLASLt's scale mode VEC128_32F (`tile=False`)
    reads [blocks, pad4(lines)], and BLK128x128_32F (`tile=True`) reads [line tiles, pad4(blocks)], where pad4 rounds up to a
    multiple of 4; padding is 0.
    """
    blocks, down = -(-contraction // 128), -(-lines // 128) if tile else lines
    if not gemm_layout:
        return down, blocks
    return (down, -(-blocks // 4) * 4) if tile else (blocks, -(-down // 4) * 4)


def _check_together(job: BlockJob) -> None:
    if (job.codes is None) != (job.scale is None) or (job.codes_t is None) != (job.scale_t is None):
        raise ValueError(
            "a block cast stores codes and scales of an orientation together: pass both tensors, or neither"
        )


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
    """Cast to FP8 from one read of x: one scale per 128 elements of the contraction or per 128x128 tile.

    gemm_layout   layout of scale_inv, fp32 (`block_scale_shape`)
    source        packed arguments of a producer (`cuda_producers`), not for tiles
    """
    dtype = _code_dtype(job)
    kernel, more = _block_kernel("cast_block", tile, source)
    rule = scale_rule(dtype, power_of_two, epsilon, torch.finfo(job.x.dtype).max)
    words, tiles = _block_words(job, tile, gemm_layout), _tiles(job.x, loader.load().TILE)
    wide, e5m2 = job.x.dtype == torch.float32, dtype == torch.float8_e5m2
    launch(kernel, job.x, words, 0, 1, tiles, wide, e5m2, rule, gemm_layout, *more)


def _block_kernel(name: str, tile: bool, source: Words) -> tuple[str, tuple[Words, ...]]:
    """Return the name of the kernel, for blocks along the contraction or for tiles, and further arguments. Kernels for tiles,
    which are blocks of weights, have no producer."""
    assert not tile or source == MATRIX
    return (f"{name}_2d", ()) if tile else (f"{name}_1d", (source,))


def cast_block_batch(
    jobs: Sequence[BlockJob], *, tile: bool, power_of_two: bool = True, epsilon: float = 0.0, gemm_layout: bool = False
) -> Batch:
    """Prepare a launch of `cast_block` for many matrices."""
    module = loader.load()
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of codes")
    x_dtype = _same([job.x.dtype for job in jobs], "the input dtype")
    kernel, more = _block_kernel("cast_block", tile, MATRIX)
    rule = scale_rule(dtype, power_of_two, epsilon, torch.finfo(x_dtype).max)
    words = [_block_words(job, tile, gemm_layout) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    wide, e5m2 = x_dtype == torch.float32, dtype == torch.float8_e5m2
    return _batch(getattr(module, kernel), len(words[0]), words, tiles, jobs, wide, e5m2, rule, gemm_layout, *more)


# MXFP8


def mx_scale_shape(lines: int, contraction: int, *, tile: bool, blocks_first: bool = False) -> tuple[int, int]:
    """Return the shape of the E8M0 bytes of codes [lines, contraction]: [lines or line tiles, contraction blocks], or with
    `blocks_first` [blocks, lines rounded up to a multiple of 4], only for 1x32 blocks."""
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
    """Return the name and the further arguments of the MXFP8 kernel, as `_block_kernel` does. Scales of tiles are compact."""
    assert not tile or not blocks_first
    kernel, more = _block_kernel("cast_mxfp8", tile, source)
    return kernel, more if tile else (blocks_first, *more)


def cast_mxfp8(
    job: BlockJob, *, tile: bool, rule: str = "ceil", blocks_first: bool = False, source: Words = MATRIX
) -> None:
    """Cast to MXFP8 from one read of x: one E8M0 byte per 32 elements of the contraction or per 32x32 tile.

    rule           "ceil" or "floor" (`reference.mx_scale`)
    blocks_first   layout of the bytes (`mx_scale_shape`)
    source         packed arguments of a producer (`cuda_producers`), not for tiles
    """
    kernel, more = _mx_kernel(tile, blocks_first, source)
    words, tiles = _mx_words(job, tile, blocks_first), _tiles(job.x, loader.load().TILE)
    wide, e5m2 = job.x.dtype == torch.float32, _code_dtype(job) == torch.float8_e5m2
    launch(kernel, job.x, words, 0, 1, tiles, wide, e5m2, rule == "floor", *more)


def cast_mxfp8_batch(jobs: Sequence[BlockJob], *, tile: bool, rule: str = "ceil", blocks_first: bool = False) -> Batch:
    """Prepare a launch of `cast_mxfp8` for many matrices."""
    module = loader.load()
    e5m2 = _same([_code_dtype(job) for job in jobs], "the dtype of codes") == torch.float8_e5m2
    wide = _same([job.x.dtype for job in jobs], "the input dtype") == torch.float32
    kernel, more = _mx_kernel(tile, blocks_first, MATRIX)
    words = [_mx_words(job, tile, blocks_first) for job in jobs]
    tiles = [_tiles(job.x, module.TILE) for job in jobs]
    return _batch(getattr(module, kernel), len(words[0]), words, tiles, jobs, wide, e5m2, rule == "floor", *more)
