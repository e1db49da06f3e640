"""The CUDA kernels that are no casts, see cuda.py: codes back to values, codes transposed, and what ends a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import INPUTS, Batch, Words, _batch, _output, _scalar
from dlp.kernels.launches import launch

# Codes and scales, numbered as in csrc/kernels.h.
ENCODINGS = {
    (torch.float8_e4m3fn, torch.float32): 0, (torch.float8_e5m2, torch.float32): 1,
    (torch.float8_e4m3fn, torch.uint8): 2, (torch.float8_e5m2, torch.uint8): 3,
    (torch.uint8, torch.float8_e4m3fn): 4,
}  # fmt: skip


def decode(codes: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """codes [rows, C], or packed [rows, C/2], and a scale a block [row blocks, C blocks], which may be strided -> out bf16
    [rows, C]."""
    encoding = ENCODINGS.get((codes.dtype, scale.dtype))
    if encoding is None:
        raise ValueError(f"no kernel decodes codes of {codes.dtype} with scales of {scale.dtype}; ask the reference")
    rows, cols = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    blocks = [-(-size // length) for size, length in zip((rows, cols), block, strict=True)]
    words = (
        _output(codes, codes.shape, [codes.dtype], "codes"), _scales(scale, blocks),
        _output(out, [rows, cols], [torch.bfloat16], "out"), rows, cols, *block, *scale.stride(),
    )  # fmt: skip
    launch("decode", codes, words, encoding)


def _scales(scale: Tensor, shape: Sequence[int]) -> int:
    """The address of scales that kernels read by their strides. ValueError for scales of another shape."""
    if list(scale.shape) != list(shape):
        raise ValueError(f"scales must have shape {list(shape)}, one a block; got {list(scale.shape)}")
    return scale.data_ptr()


def transpose(codes: Tensor, out: Tensor) -> None:
    """codes of a byte [rows, C] -> out [C, rows], of the same dtype; or packed E2M1 (uint8) [rows, C/2] -> [C, rows/2]."""
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
    """fp32 [] all: `reference.nvfp4_alpha`."""
    words = (_scalar(a_amax, "a_amax"), _scalar(b_amax, "b_amax"), _scalar(out, "out"))
    launch("nvfp4_alpha", out, words)


def round_to_bf16(x: Tensor, out: Tensor) -> None:
    """x fp32 -> out bf16 of the same shape, both contiguous and at multiples of 16 bytes."""
    words = (
        _output(x, x.shape, [torch.float32], "x"),
        _output(out, x.shape, [torch.bfloat16], "out"),
        x.numel(),
    )
    launch("round_to_bf16", x, words)


def swizzled_bytes(lines: int, blocks: int) -> int:
    """The size of the tiles of 128 lines by 4 blocks that hold the scales of this many lines and blocks."""
    return -(-lines // 128) * -(-blocks // 4) * 512


def swizzle(scale: Tensor, lines: int, lines_each: int, out: Tensor) -> None:
    """Scale bytes [ceil(lines / lines_each), blocks], which may be strided -> out, the flat uint8 of as many tiles of
    128 lines by 4 blocks as hold a scale for every line."""
    blocks, byte = scale.shape[1], [torch.uint8]
    words = (
        _scales(scale, [-(-lines // lines_each), blocks]),
        _output(out, [swizzled_bytes(lines, blocks)], byte, "out"), lines, blocks, lines_each, *scale.stride(),
    )  # fmt: skip
    launch("swizzle_scales", scale, words)


class DelayedJob(NamedTuple):
    """Slots with one history length and algorithm: history fp32 [L, n]; scale, reduced, target, staging fp32 [n]."""

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
    """`reference.delayed_update` of all slots, in place, by one launch; staging becomes 0."""
    words = [_delayed_words(job) for job in jobs]
    return _batch(loader.load().delayed_update, len(words[0]), words, [-(-row[2] // 32) for row in words], jobs)


def transpose_words(matrix: Tensor, out: Tensor) -> None:
    """fp32 [rows, C] -> out [C, rows]."""
    pointer = _output(matrix, matrix.shape, [torch.float32], "matrix")
    launch("transpose_words", out, pointer, _output(out, matrix.shape[::-1], [torch.float32], "out"), *matrix.shape)


def copied_rows(x: Tensor) -> Tensor:
    """[rows, n], adjacent elements in each row, the rows at any distance -> the same, contiguous."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    nbytes = width * x.itemsize
    launch("copy_rows", x, x.data_ptr(), x.stride(0) * x.itemsize, out.data_ptr(), nbytes, nbytes, rows)
    return out


def place_rows(x: Tensor, out: Tensor) -> None:
    """x [rows, ...], contiguous -> `out`, of its size, whose rows begin at any distance."""
    width = x.nbytes // len(x)
    distance = out.stride(0) * out.itemsize
    launch("copy_rows", x, x.data_ptr(), width, out.data_ptr(), distance, width, len(x))


def side_by_side(whole: Tensor, dim: int) -> Tensor:
    """[R, *shape] -> the R pieces concatenated along `dim`."""
    ranks, *shape = whole.shape
    out = torch.empty((*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]), dtype=whole.dtype, device=whole.device)
    height, width = prod(shape[:dim]), prod(shape[dim:])
    lines = out.view(height, ranks, width)
    for rank, piece in enumerate(whole):
        place_rows(piece.view(height, width), lines[:, rank])
    return out


def end_to_end(xs: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors of one dtype -> their elements, one tensor after the other."""
    out = torch.empty(sum(x.numel() for x in xs), dtype=xs[0].dtype, device=xs[0].device)
    for x, place in zip(xs, out.split([x.numel() for x in xs]), strict=True):
        place_rows(x.view(1, -1), place.view(1, -1))
    return out


def sum_in_order(
    contributions: Tensor, out: Tensor, own: tuple[int, Tensor] | None = None, divisor: int = 1
) -> None:  # fmt: skip
    """Add contributions [R, ...], bf16 or fp32, in fp32 from the first to the last, divide by `divisor` and round once into
    `out` [...], bf16 or fp32. `own`: the number of a contribution that lies elsewhere, and that contribution."""
    pointer = _output(contributions, contributions.shape, INPUTS, "contributions")
    target = _output(out, contributions.shape[1:], INPUTS, "out")
    index, apart = own or (0, contributions[0])
    words = pointer, _output(apart, out.shape, [contributions.dtype], "own"), index, target
    wide = contributions.dtype == torch.float32, out.dtype == torch.float32
    launch("sum_in_order", out, *words, len(contributions), out.numel(), *wide, divisor)
