"""CUDA kernels of norms, activations and column sums, forward and backward; see cuda.py.

The functions `..._source` return the arguments of a producer: a cast with a producer computes the elements of the matrix while
reading the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.cuda import INPUTS, Words, _matrix, _output, _scalar, _tiles
from dlp.kernels.launches import launch

RMS_NORM, SWIGLU, COLUMN_SUMS, ACTIVATION, BESIDE, LAYER_NORM = 1, 2, 3, 4, 5, 6  # producers in kernels.h
ACTS = {"silu": 0, "gelu": 1, "relu": 2, "srelu": 3, "sigmoid": 4, "qgelu": 5}  # activations in kernels.h
# Largest number of columns for the backward of RMSNorm, limited by shared memory; for LayerNorm half of this number
MAX_NORM_COLS = 57344


def _vector(weight: Tensor, x: Tensor) -> Words:
    """Return the pointer of weight [cols], and whether weight is fp32."""
    return _output(weight, [x.shape[1]], INPUTS, "weight"), int(weight.dtype == torch.float32)


def _beside(tensor: Tensor, x: Tensor, name: str) -> Words:
    """Return pointer and row stride of a matrix with the shape and dtype of x."""
    if tensor.shape != x.shape or tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} must be {x.dtype} {list(x.shape)}, like the first input; got {tensor.dtype} {list(tensor.shape)}"
        )
    pointer, _, _, stride = _matrix(tensor)
    return pointer, stride


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rstd: Tensor, *, y: Tensor | None = None, amax: Tensor | None = None,
    more: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    """RMSNorm of x [rows, cols] with weight [cols], bf16 or fp32: write rstd fp32 [rows], and y [rows, cols] or max |y| (amax,
    fp32 []). With `more` [rows, cols] the input is x + more, rounded to the dtype of x and written to `total`."""
    words = (
        *_matrix(x), 0, *_vector(weight, x), _output(rstd, [len(x)], [torch.float32], "rstd"),
        _output(y, x.shape, [x.dtype], "y"), _scalar(amax, "amax"), *((0, 0) if more is None else _beside(more, x, "more")),
        _output(total, x.shape, [x.dtype], "total"),
    )  # fmt: skip
    launch("rms_norm", x, words, eps, x.dtype == torch.float32)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor, add: Tensor | None = None
) -> None:
    """Gradient of RMSNorm of dy and x [rows, cols], weight [cols] and rstd [rows]: write dx [rows, cols] (plus `add`, if given)
    and dweight fp32 [cols].

    Raises ValueError for more than MAX_NORM_COLS columns.
    """
    rows, cols = x.shape
    if cols > MAX_NORM_COLS:
        raise ValueError(f"the gradient of RMSNorm supports at most {MAX_NORM_COLS} features; got {cols}")
    module = loader.load()
    parts = torch.empty(min(rows, module.NORM_PARTS), cols, device=x.device)
    words = (
        *_matrix(x), 0, *_vector(weight, x), _output(rstd, [rows], [torch.float32], "rstd"), *_beside(dy, x, "dy"),
        _output(dx, x.shape, [x.dtype], "dx"), parts.data_ptr(), *((0, 0) if add is None else _beside(add, x, "add")),
    )  # fmt: skip
    launch("rms_norm_backward", x, words, x.dtype == torch.float32)
    sum_parts(parts, dweight)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, mean: Tensor, rstd: Tensor, *, y: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:  # fmt: skip
    """LayerNorm of x [rows, cols] with weight and bias [cols] of one dtype, bf16 or fp32: write mean and rstd fp32 [rows], and
    y [rows, cols] or max |y| (amax, fp32 [])."""
    pointer, wide = _vector(weight, x)
    vectors = [_output(each, [len(x)], [torch.float32], name) for each, name in ((mean, "mean"), (rstd, "rstd"))]
    words = (
        *_matrix(x), 0, pointer, _output(bias, [x.shape[1]], [weight.dtype], "bias"), wide, *vectors,
        _output(y, x.shape, [x.dtype], "y"), _scalar(amax, "amax"),
    )  # fmt: skip
    launch("layer_norm", x, words, eps, x.dtype == torch.float32)


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor
) -> None:
    """Gradient of LayerNorm of dy and x [rows, cols], weight [cols], mean and rstd [rows]: write dx [rows, cols], dweight and
    dbias fp32 [cols].

    Raises ValueError for more than MAX_NORM_COLS / 2 columns.
    """
    rows, cols = x.shape
    if cols > MAX_NORM_COLS // 2:
        raise ValueError(f"the gradient of LayerNorm supports at most {MAX_NORM_COLS // 2} features; got {cols}")
    parts = torch.empty(2, min(rows, loader.load().NORM_PARTS), cols, device=x.device)
    vectors = [_output(each, [rows], [torch.float32], name) for each, name in ((mean, "mean"), (rstd, "rstd"))]
    words = (
        *_matrix(x), 0, *_vector(weight, x), *vectors, *_beside(dy, x, "dy"), _output(dx, x.shape, [x.dtype], "dx"),
        parts[0].data_ptr(), parts[1].data_ptr(),
    )  # fmt: skip
    launch("layer_norm_backward", x, words, x.dtype == torch.float32)
    for part, out in zip(parts, (dweight, dbias), strict=True):
        sum_parts(part, out)


def swiglu(gate: Tensor, up: Tensor, *, h: Tensor | None = None, amax: Tensor | None = None) -> None:
    """Write h = silu(gate) * up [rows, cols] of gate and up [rows, cols], or max |h| to amax, fp32 []."""
    words = (
        *_matrix(gate), 0, *_beside(up, gate, "up"), _output(h, gate.shape, [gate.dtype], "h"), _scalar(amax, "amax"),
    )  # fmt: skip
    launch("swiglu", gate, words, gate.dtype == torch.float32)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Write dgate and dup [rows, cols] of dh, gate and up [rows, cols], for SwiGLU."""
    words = (
        *_matrix(gate), 0, *_beside(up, gate, "up"), *_beside(dh, gate, "dh"),
        _output(dgate, gate.shape, [gate.dtype], "dgate"), _output(dup, gate.shape, [gate.dtype], "dup"), 0,
    )  # fmt: skip
    launch("swiglu_backward", gate, words, gate.dtype == torch.float32)


def activation(
    x: Tensor, act: str, out: Tensor | None = None, dy: Tensor | None = None, *, amax: Tensor | None = None
) -> None:
    """Write act(x) of x [rows, cols], or with dy the product dy * act'(x), to out [rows, cols]; or max |out| to amax, fp32 [].

    Results are bitwise equal to the reference on the same device, except for silu, sigmoid and qgelu. These divide
    approximately and treat a subnormal s(x) = sigmoid(x) as 0: before rounding to the dtype of x, act(x) and act'(x) lie within
    (2^-20 s(x) + 2^-126) (1 + |x|) of the reference (qgelu: with 1.702 |x|)."""
    more = (0, 0) if dy is None else _beside(dy, x, "dy")
    words = *_matrix(x), 0, *more, _output(out, x.shape, [x.dtype], "out"), _scalar(amax, "amax")
    launch("activation", x, words, ACTS[act], x.dtype == torch.float32)


def gate(gate: Tensor, up: Tensor, act: str, h: Tensor | None = None, *, amax: Tensor | None = None) -> None:
    """Write h = act(gate) * up [rows, cols] of gate and up [rows, cols], or max |h| to amax, fp32 []; accuracy as
    `activation`."""
    words = (
        *_matrix(gate), 0, *_beside(up, gate, "up"), _output(h, gate.shape, [gate.dtype], "h"), _scalar(amax, "amax"),
    )  # fmt: skip
    launch("gate", gate, words, ACTS[act], gate.dtype == torch.float32)


def gate_backward(dh: Tensor, gate: Tensor, up: Tensor, act: str, dgate: Tensor, dup: Tensor) -> None:
    """Write dgate and dup [rows, cols] of dh, gate and up [rows, cols], for act(gate) * up; accuracy as `activation`."""
    words = (
        *_matrix(gate), 0, *_beside(up, gate, "up"), *_beside(dh, gate, "dh"),
        _output(dgate, gate.shape, [gate.dtype], "dgate"), _output(dup, gate.shape, [gate.dtype], "dup"), 0,
    )  # fmt: skip
    launch("gate_backward", gate, words, ACTS[act], gate.dtype == torch.float32)


def column_sums(x: Tensor, out: Tensor) -> None:
    """Write the column sums of x [rows, cols] to out, fp32 [cols]."""
    module, parts = loader.load(), empty_parts(x)
    tiles = _tiles(x, module.TILE)
    launch("tile_sums", x, (*_matrix(x), 0), tiles, parts.data_ptr(), x.dtype == torch.float32)
    sum_parts(parts, out)


def empty_parts(x: Tensor) -> Tensor:
    """Allocate column sums for each row of tiles of x, fp32 [ceil(rows / TILE), cols]."""
    return torch.empty(_tiles_down(x), x.shape[1], device=x.device)


def _tiles_down(x: Tensor) -> int:
    return max(1, -(-len(x) // loader.load().TILE))


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Write `reference.sum_parts` of parts fp32 [count, cols] to out [cols]."""
    count, cols = parts.shape
    target = _output(out, [cols], [torch.float32], "out")
    launch("sum_parts", parts, parts.data_ptr(), count, cols, target)


def rms_norm_source(x: Tensor, weight: Tensor, rstd: Tensor) -> Words:
    """Return the producer of x [rows, cols] * rstd [rows] * weight [cols]."""
    vector = _output(rstd, [len(x)], [torch.float32], "rstd")
    return RMS_NORM, vector, *_vector(weight, x), 0, 0, 0, 0, 0, 0, 0


def layer_norm_source(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Words:
    """Return the producer of (x [rows, cols] - mean [rows]) * rstd [rows] * weight [cols] + bias [cols]."""
    vectors = [_output(each, [len(x)], [torch.float32], name) for each, name in ((rstd, "rstd"), (mean, "mean"))]
    shift = _output(bias, [x.shape[1]], [weight.dtype], "bias")
    return LAYER_NORM, vectors[0], *_vector(weight, x), 0, 0, 0, 0, 0, vectors[1], shift


def swiglu_source(gate: Tensor, up: Tensor) -> Words:
    """Return the producer of silu(gate) * up."""
    return SWIGLU, 0, 0, 0, *_beside(up, gate, "up"), 0, 0, 0, 0, 0


def activation_source(act: str) -> Words:
    """Return the producer of act(x)."""
    return ACTIVATION, 0, 0, 0, 0, 0, 0, ACTS[act], 0, 0, 0


def beside_source(x: Tensor, up: Tensor, act: str, *, slope: bool = False, parts: Tensor | None = None) -> Words:
    """Return the producer of act(x) * up, or with `slope` of act'(x) * up. If `parts` is given, the producer also writes column
    sums of tiles to `parts` (`empty_parts`)."""
    shape = [_tiles_down(x), x.shape[1]]
    sums = _output(parts, shape, [torch.float32], "parts")
    return BESIDE, 0, 0, 0, *_beside(up, x, "up"), sums, ACTS[act], int(slope), 0, 0


def column_sums_source(x: Tensor, parts: Tensor) -> Words:
    """Return the producer of x that also writes column sums of tiles to `parts` (`empty_parts`)."""
    shape = [_tiles_down(x), x.shape[1]]
    return COLUMN_SUMS, 0, 0, 0, 0, 0, _output(parts, shape, [torch.float32], "parts"), 0, 0, 0, 0
