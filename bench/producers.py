"""Time of norms, activations and the bias gradient, separate from casts and fused into casts.

    python -m bench.producers [--sizes 256] [--only "rms_norm > fp8_current"] [--json FILE]

A row `A > recipe` times the computation of both operands of that recipe from the input of producer A, including amaxes: `apart`
runs a kernel for A and then the casts; `fused` runs casts that compute A. For swiglu's gradients, `fused` casts both gradients
in one kernel. Useful bytes are the same for `apart` and `fused`: inputs are read once, codes and scales are written once. The
method is that of bench.quantize.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.quantize import Launch, Make
from bench.quantize import main as bench
from dlp.kernels import ops
from dlp.quant.quantizer import Origin, ScaleSlot, offers, one_read
from dlp.quant.recipe import Operand, load

RECIPES = ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]
APART_ONLY = ("nvfp4", "x")  # only "apart": casts of activations to nvfp4 cannot compute a producer
EPS = 1e-5


def _vector(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], device=x.device)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the rows of x into gate and up, which together have the bytes of x."""
    gate, up = x.chunk(2)
    return gate, up


def rms_norm(x: Tensor) -> Launch:
    weight = _vector(x)
    return Launch(lambda: ops.rms_norm(x, weight, EPS), (x, *ops.rms_norm(x, weight, EPS)))


def rms_norm_amax(x: Tensor) -> Launch:
    weight = _vector(x)
    return Launch(lambda: ops.amax(ops.RmsNormed(x, weight, EPS)), (x,))


def rms_norm_backward(x: Tensor) -> Launch:
    (dy, x), weight = _halves(x), _vector(x)
    rstd = ops.rms_norm(x, weight, EPS)[1]
    return Launch(lambda: ops.rms_norm_backward(dy, x, weight, rstd), (dy, x, torch.empty_like(x)))


def rms_norm_backward_added(x: Tensor) -> Launch:
    dy, x, add = x.chunk(3)
    weight = _vector(x)
    rstd = ops.rms_norm(x, weight, EPS)[1]
    return Launch(lambda: ops.rms_norm_backward(dy, x, weight, rstd, add), (dy, x, add, torch.empty_like(x)))


def layer_norm(x: Tensor) -> Launch:
    weight, bias = _vector(x), _vector(x)
    return Launch(lambda: ops.layer_norm(x, weight, bias, EPS), (x, *ops.layer_norm(x, weight, bias, EPS)))


def layer_norm_amax(x: Tensor) -> Launch:
    weight, bias = _vector(x), _vector(x)
    return Launch(lambda: ops.amax(ops.LayerNormed(x, weight, bias, EPS)), (x,))


def swiglu(x: Tensor) -> Launch:
    gate, up = _halves(x)
    return Launch(lambda: ops.swiglu(gate, up), (x, torch.empty_like(gate)))


def swiglu_amax(x: Tensor) -> Launch:
    gate, up = _halves(x)
    return Launch(lambda: ops.amax(ops.Gated(gate, up)), (x,))


def swiglu_backward(x: Tensor) -> Launch:
    gate, up = _halves(x)
    dh = torch.randn_like(gate)
    return Launch(lambda: ops.swiglu_backward(dh, gate, up), (dh, x, torch.empty_like(x)))


def column_sums(x: Tensor) -> Launch:
    return Launch(lambda: ops.column_sums(x), (x,))


def _produced(which: str, x: Tensor) -> Callable[[], ops.LazyMatrix]:
    if which in ("gelu", "srelu"):
        return partial(ops.Activated, x, which, in_cast=True)
    if which == "geglu":
        return partial(ops.GatedBy, *_halves(x), "gelu", in_cast=True)
    if which == "gelu's gradient":
        return lambda: ops.Summed(ops.ActivationGrad(*_halves(x), "gelu", in_cast=True))
    if which == "rms_norm":
        return partial(ops.RmsNormed, x, _vector(x), EPS)
    if which == "layer_norm":
        return partial(ops.LayerNormed, x, _vector(x), _vector(x), EPS)
    return partial(ops.Gated, *_halves(x)) if which == "swiglu" else partial(ops.Summed, x)


def _pipeline(which: str, quantizers: Operand, fused: bool, x: Tensor) -> Launch:
    """Return a launch that computes both operands of `which(x)`, and column sums if `which` has them."""
    make, both = _produced(which, x), one_read(quantizers.rowwise, quantizers.columnwise)
    assert both is not None
    slot = ScaleSlot(torch.ones((), device=x.device), torch.zeros((), device=x.device))
    rows, cols = make().shape
    origin = Origin(0, 0, rows, cols, 1, 2, torch.zeros((), dtype=torch.int64, device=x.device))

    def run() -> list[Tensor]:
        matrix = make()
        given = matrix if fused else matrix.value
        row, col = both.cast(given, both.observe(given), slot=slot, at=(origin, origin.t()))
        return [*row.parts, *col.parts, *([matrix.sums()] if isinstance(matrix, ops.Summed) else [])]

    return Launch(run, (x, *run()))


def _gate_grads(quantizer: Any, fused: bool, x: Tensor) -> Launch:
    """Return a launch that computes both operands of the gradients of gate and up, from dh, gate and up."""
    gate, up = _halves(x)
    dh = torch.randn_like(gate)
    slots = [ScaleSlot(torch.ones((), device=x.device), torch.zeros((), device=x.device)) for _ in range(2)]

    def run() -> list[Tensor]:
        if fused:
            grads = ops.GatedGrads(dh, gate, up, "silu")
            made = quantizer.both_grads(grads, quantizer.observe_grads(grads), slots, [None, None])
        else:
            read, given = one_read(quantizer, quantizer), ops.swiglu_backward(dh, gate, up)
            assert read is not None
            made = [read.cast(each, read.observe(each), slot=slot) for each, slot in zip(given, slots, strict=True)]
        return [part for both in made for operand in both for part in operand.parts]

    return Launch(run, (dh, x, *run()))


ALONE: dict[str, Make] = {
    "rms_norm": rms_norm,
    "rms_norm, rstd + amax": rms_norm_amax,
    "layer_norm": layer_norm,
    "layer_norm, mean + rstd + amax": layer_norm_amax,
    "rms_norm backward": rms_norm_backward,
    "rms_norm backward, added": rms_norm_backward_added,
    "swiglu": swiglu,
    "swiglu, amax": swiglu_amax,
    "swiglu backward": swiglu_backward,
    "column sums": column_sums,
}
PRODUCED = [
    ("rms_norm", "x"), ("layer_norm", "x"), ("swiglu", "x"), ("gelu", "x"), ("srelu", "x"), ("geglu", "x"),
    ("column sums", "dy"), ("gelu's gradient", "dy"),
]  # fmt: skip
PIPELINES: dict[str, Make] = {
    f"{which} > {recipe}, {how}": partial(_pipeline, which, getattr(load(recipe), operand), how == "fused")
    for which, operand in PRODUCED
    for recipe in RECIPES
    for how in (("apart",) if (recipe, operand) == APART_ONLY else ("apart", "fused"))
}
GATE_GRADS: dict[str, Make] = {
    f"swiglu's gradients > {recipe}, {how}": partial(_gate_grads, load(recipe).dy.rowwise, how == "fused")
    for recipe in RECIPES
    if offers(load(recipe).dy.rowwise, "both_grads")
    for how in ("apart", "fused")
}

main = partial(bench, kernels=ALONE | PIPELINES | GATE_GRADS, dtypes=["bfloat16"])

if __name__ == "__main__":
    sys.exit(main())
