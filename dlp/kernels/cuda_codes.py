"""CUDA kernels that decode and transpose codes, update delayed scales, and copy or sum rows; see cuda.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import INPUTS, Batch, Words, _batch, _output, _scalar
from dlp.kernels.launches import launch

# (dtype of codes, dtype of scales) -> number of this encoding in csrc/kernels.h
ENCODINGS = {
    (torch.float8_e4m3fn, torch.float32): 0, (torch.float8_e5m2, torch.float32): 1,
    (torch.float8_e4m3fn, torch.uint8): 2, (torch.float8_e5m2, torch.uint8): 3,
    (torch.uint8, torch.float8_e4m3fn): 4,
}  # fmt: skip


def decode(
    codes: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor, amax: Tensor | None = None
) -> None:  # fmt: skip
    """Decode codes [rows, C], or packed codes [rows, C/2], with scales [row blocks, C blocks], which may be strided -> out bf16
    [rows, C]. `amax`: amax of an NVFP4 tensor, fp32 []; None: decode without the scale of the tensor."""
    encoding = ENCODINGS.get((codes.dtype, scale.dtype))
    if encoding is None:
        raise ValueError(
            f"no kernel decodes codes of {codes.dtype} with scales of {scale.dtype}; use dlp.kernels.reference"
        )
    rows, cols = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    blocks = [-(-size // length) for size, length in zip((rows, cols), block, strict=True)]
    words = (
        _output(codes, codes.shape, [codes.dtype], "codes"), _scales(scale, blocks),
        _output(out, [rows, cols], [torch.bfloat16], "out"), rows, cols, *block, *scale.stride(),
        _scalar(amax, "amax"),
    )  # fmt: skip
    launch("decode", codes, words, encoding)


def int4_gemv(x: Tensor, codes: Tensor, scale_inv: Tensor, zero: Tensor | None, out: Tensor) -> None:
    """Multiply x, bf16 [tokens, K], by packed int4 codes [N, K/2] with scale_inv and zero point [N, K / group] -> out
    [tokens, N], bf16 or fp32 (`reference.gemm_int4_group`): at most 8 tokens, and a group of 32 times a power of two codes."""
    (tokens, cols), (rows, groups) = x.shape, scale_inv.shape
    words = (
        _output(x, x.shape, [torch.bfloat16], "x"), _output(codes, [rows, cols // 2], [torch.uint8], "codes"),
        _output(scale_inv, scale_inv.shape, [torch.float32], "scale_inv"),
        _output(zero, scale_inv.shape, [torch.int8], "zero"), _output(out, [tokens, rows], INPUTS, "out"),
        tokens, rows, cols, (cols // groups // 32).bit_length() - 1, out.dtype == torch.float32,
    )  # fmt: skip
    launch("int4_gemv", x, words)


def _scales(scale: Tensor, shape: Sequence[int]) -> int:
    """Return the address of scales, which kernels read by strides. Raises ValueError for another shape."""
    if list(scale.shape) != list(shape):
        raise ValueError(f"scales must have shape {list(shape)}, one scale per block; got {list(scale.shape)}")
    return scale.data_ptr()


def transpose(codes: Tensor, out: Tensor) -> None:
    """Transpose codes [rows, C] of one byte -> out [C, rows] of the same dtype; or packed E2M1 codes, uint8 [rows, C/2] ->
    [C, rows/2]."""
    module, packed = loader.load(), codes.dtype == torch.uint8
    rows, cols = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    if packed and rows % 2:
        raise ValueError(f"packed codes are transposed in pairs of rows; got {rows} rows: append zeros")
    data = _output(codes, codes.shape, [codes.dtype], "codes")
    target = _output(out, [cols, rows // 2 if packed else rows], [codes.dtype], "out")
    tiles = -(-rows // module.TILE) * -(-cols // module.TILE)
    if tiles:
        kernel = "transpose_nibbles" if packed else "transpose_bytes"
        launch(kernel, codes, (data, rows, cols, cols, 0, target), tiles)


def nvfp4_alpha(a_amax: Tensor, b_amax: Tensor, out: Tensor) -> None:
    """Write `reference.nvfp4_alpha` of two amaxes, fp32 [], to out, fp32 []."""
    words = (_scalar(a_amax, "a_amax"), _scalar(b_amax, "b_amax"), _scalar(out, "out"))
    launch("nvfp4_alpha", out, words)


def round_to_bf16(x: Tensor, out: Tensor) -> None:
    """Round x, fp32, to out, bf16 of the same shape; both are contiguous and aligned to 16 bytes."""
    words = (
        _output(x, x.shape, [torch.float32], "x"),
        _output(out, x.shape, [torch.bfloat16], "out"),
        x.numel(),
    )
    launch("round_to_bf16", x, words)


def swizzled_bytes(lines: int, blocks: int) -> int:
    """Return the number of bytes of tiles of 128 lines x 4 blocks, for codes of `lines` rows with `blocks` blocks per row."""
    return -(-lines // 128) * -(-blocks // 4) * 512


def swizzle(scale: Tensor, lines: int, lines_each: int, out: Tensor) -> None:
    """Rearrange scale bytes [ceil(lines / lines_each), blocks], which may be strided, into flat uint8 tiles of 128 lines x 4
    blocks, with one scale for every line. Lines are rows of the codes; `lines_each` lines share a scale."""
    blocks, byte = scale.shape[1], [torch.uint8]
    words = (
        _scales(scale, [-(-lines // lines_each), blocks]),
        _output(out, [swizzled_bytes(lines, blocks)], byte, "out"), lines, blocks, lines_each, *scale.stride(),
    )  # fmt: skip
    launch("swizzle_scales", scale, words)


class DelayedJob(NamedTuple):
    """Job: update n delayed scales with the same history length L. x: history fp32 [L, n]; scale, reduced, target, staging:
    fp32 [n]; most_recent: use the algorithm "most_recent", else "max"."""

    x: Tensor
    scale: Tensor
    reduced: Tensor
    target: Tensor
    staging: Tensor
    most_recent: bool


def _delayed_words(job: DelayedJob) -> Words:
    length, slots = job.x.shape
    fp32 = [torch.float32]
    history = _output(job.x, [length, slots], fp32, "history")
    vectors = [_output(getattr(job, name), [slots], fp32, name) for name in ("scale", "reduced", "target", "staging")]
    return (history, length, slots, slots, 0, *vectors, int(job.most_recent))


def delayed_update_batch(jobs: Sequence[DelayedJob]) -> Batch:
    """Prepare one launch that runs `reference.delayed_update` in place for all jobs and sets staging to 0."""
    words = [_delayed_words(job) for job in jobs]
    pieces = [-(-job.x.shape[1] // 32) for job in jobs]
    return _batch(loader.load().delayed_update, len(words[0]), words, pieces, jobs)


def transpose_words(matrix: Tensor, out: Tensor) -> None:
    """Transpose a matrix fp32 [rows, C] -> out [C, rows]."""
    pointer = _output(matrix, matrix.shape, [torch.float32], "matrix")
    launch("transpose_words", out, pointer, _output(out, matrix.shape[::-1], [torch.float32], "out"), *matrix.shape)


def copied_rows(x: Tensor) -> Tensor:
    """Return a contiguous copy of x [rows, n], whose rows are contiguous and may have any stride."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    nbytes = width * x.itemsize
    launch("copy_rows", x, x.data_ptr(), x.stride(0) * x.itemsize, out.data_ptr(), nbytes, nbytes, rows)
    return out


def place_rows(x: Tensor, out: Tensor) -> None:
    """Copy x [rows, ...], contiguous, to `out` of the same size, whose rows may have any stride."""
    width = x.nbytes // len(x)
    distance = out.stride(0) * out.itemsize
    launch("copy_rows", x, x.data_ptr(), width, out.data_ptr(), distance, width, len(x))


def side_by_side(whole: Tensor, dim: int) -> Tensor:
    """Return the R pieces of a tensor [R, *shape], concatenated along `dim`."""
    ranks, *shape = whole.shape
    out = torch.empty((*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]), dtype=whole.dtype, device=whole.device)
    height, width = prod(shape[:dim]), prod(shape[dim:])
    lines = out.view(height, ranks, width)
    for rank, piece in enumerate(whole):
        place_rows(piece.view(height, width), lines[:, rank])
    return out


def end_to_end(xs: Sequence[Tensor]) -> Tensor:
    """Return the elements of contiguous tensors of one dtype in one flat tensor."""
    out = torch.empty(sum(x.numel() for x in xs), dtype=xs[0].dtype, device=xs[0].device)
    for x, place in zip(xs, out.split([x.numel() for x in xs]), strict=True):
        place_rows(x.view(1, -1), place.view(1, -1))
    return out


def sum_in_order(
    contributions: Tensor, out: Tensor, own: tuple[int, Tensor] | None = None, divisor: int = 1
) -> None:  # fmt: skip
    """Add contributions [R, ...], bf16 or fp32, in fp32 from the first to the last, divide by `divisor` and round once into
    `out` [...], bf16 or fp32. `own`: index of a contribution that is stored elsewhere, and that contribution."""
    pointer = _output(contributions, contributions.shape, INPUTS, "contributions")
    target = _output(out, contributions.shape[1:], INPUTS, "out")
    index, apart = own or (0, contributions[0])
    words = pointer, _output(apart, out.shape, [contributions.dtype], "own"), index, target
    wide = contributions.dtype == torch.float32, out.dtype == torch.float32
    launch("sum_in_order", out, *words, len(contributions), out.numel(), *wide, divisor)


def sum_by_tree(parts: Tensor, out: Tensor) -> None:
    """Add parts [1, 2, 4 or 8, ...], fp32, by a binary tree of neighbours, and round once into `out` [...], bf16 or fp32."""
    pointer = _output(parts, parts.shape, [torch.float32], "parts")
    target = _output(out, parts.shape[1:], INPUTS, "out")
    launch("sum_by_tree", out, pointer, target, len(parts), out.numel(), out.dtype == torch.float32)


def add_checksums(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Add the checksum of each contiguous tensor (`reference.checksums`) to `out`, int64 [number of tensors]."""
    target = _output(out, [len(tensors)], [torch.int64], "out")
    ranges = [(_output(tensor, tensor.shape, [tensor.dtype], "a tensor"), tensor.nbytes) for tensor in tensors]
    launch("checksums", out, ranges, target)
