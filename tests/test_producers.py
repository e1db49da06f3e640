"""RMSNorm, SwiGLU and sums of columns: references compared with float64 and autograd; casts fused with these functions,
with emulated kernels (see test_casts.py). No device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import ops, reference
from dlp.quant.quantizer import caps_of
from tests.metrics import assert_bit_equal, assert_close
from tests.quantizers import a_slot, assert_same, origin
from tests.test_casts import OFFERING, launches, one_read  # noqa: F401

SHAPES = [(1, 1), (5, 300), (130, 1030), (600, 64), (0, 8)]
# Bound of the relative error: fp32 arithmetic, and one rounding to bf16
ROUNDED = {torch.float32: 5e-7, torch.bfloat16: 4e-3}
EPS = 1e-5
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", ROUNDED, ids=str)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def rms_norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * weight


@dtypes
@shapes
def test_rms_norm_and_its_gradients_are_those_of_float64(shape, dtype):
    x, weight, dy = draw(*shape, dtype=dtype), draw(shape[1], seed=1), draw(*shape, seed=2, dtype=dtype)
    y, rstd = ops.rms_norm(x, weight, EPS)
    dx, dweight = ops.rms_norm_backward(dy, x, weight, rstd)
    wide = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = rms_norm64(*wide)
    gradients = torch.autograd.grad(expected, wide, dy.double())
    assert y.dtype == dx.dtype == dtype and dweight.dtype == rstd.dtype == torch.float32
    assert_close(y, expected, ROUNDED[dtype], "y")
    if shape != (1, 1):  # for this shape dx is only the rounding of 0
        assert_close(dx, gradients[0], 2 * ROUNDED[dtype], "dx")
    assert_close(dweight, gradients[1], ROUNDED[torch.float32], "dweight")


def test_rstd_is_rounded_as_the_kernel_rounds():
    """The reference must round each step of rstd to the nearest fp32, as the kernel does. torch's square root does not on
    some CPUs."""
    x = draw(4000, 8)
    squares = reference.producers.row_sums(x * x) / 8 + EPS
    roots = torch.tensor([math.sqrt(value) for value in squares.tolist()])
    assert_bit_equal(reference.rms_norm(x, torch.ones(8), EPS)[1], torch.ones(4000) / roots, "rstd")


@dtypes
@shapes
def test_swiglu_and_its_gradients_are_those_of_float64(shape, dtype):
    gate, up, dh = (draw(*shape, seed=seed, dtype=dtype) for seed in range(3))
    wide = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = F.silu(wide[0]) * wide[1]
    gradients = torch.autograd.grad(expected, wide, dh.double())
    assert_close(ops.swiglu(gate, up), expected, ROUNDED[dtype], "h")
    for name, made, right in zip(("dgate", "dup"), ops.swiglu_backward(dh, gate, up), gradients, strict=True):
        assert made.dtype == dtype
        assert_close(made, right, ROUNDED[dtype], name)


WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu, "srelu": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid, "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("name", WIDE)
def test_activations_gates_and_their_gradients_are_those_of_float64(name, dtype):
    assert WIDE.keys() == reference.ACTIVATIONS.keys()
    x, up, dy = (draw(130, 300, seed=seed, dtype=dtype) for seed in range(3))
    wide = x.double().requires_grad_(), up.double().requires_grad_()
    alone, gated = WIDE[name](wide[0]), WIDE[name](wide[0]) * wide[1]
    dx, dgate, dup = ops.ActivationGrad(dy, x, name).value, *ops.gated_backward(dy, x, up, name)
    expected = [*torch.autograd.grad(alone, wide[:1], dy.double()), *torch.autograd.grad(gated, wide, dy.double())]
    assert_close(ops.Activated(x, name).value, alone, ROUNDED[dtype], "act")
    assert_close(ops.gated(x, up, name), gated, ROUNDED[dtype], "gated")
    for made, right in zip((dx, dgate, dup), expected, strict=True):
        assert made.dtype == dtype
        assert_close(made, right, ROUNDED[dtype])


@dtypes
@shapes
def test_layer_norm_and_its_gradients_are_those_of_float64(shape, dtype):
    x, dy, weight, bias = (
        draw(*shape, dtype=dtype),
        draw(*shape, seed=1, dtype=dtype),
        *(draw(shape[1], seed=s) for s in (2, 3)),
    )
    y, mean, rstd = ops.layer_norm(x, weight, bias, EPS)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.layer_norm(wide[0], shape[1:], wide[1], wide[2], EPS)
    assert_close(y, expected, ROUNDED[dtype], "y")
    right = torch.autograd.grad(expected, wide, dy.double())
    dx, dweight, dbias = ops.layer_norm_backward(dy, x, weight, mean, rstd)
    if shape != (1, 1):  # for this shape dx and dweight are only the rounding of 0
        assert_close(dx, right[0], 2 * ROUNDED[dtype], "dx")
        assert_close(dweight, right[1], 5e-6, "dweight")
    assert_close(dbias, right[2], 5e-6, "dbias")


@pytest.mark.parametrize("value", [0.0, -0.0, 100.0, -100.0, float("inf"), float("nan")])
def test_swiglu_at_its_ends(value):
    gate, one = torch.full((1, 1), value), torch.ones(1, 1)
    expected = F.silu(gate)
    assert torch.equal(ops.swiglu(gate, one).nan_to_num(7), expected.nan_to_num(7))


@dtypes
@shapes
def test_sums_of_columns_are_those_of_float64(shape, dtype):
    x = draw(*shape, dtype=dtype)
    assert_close(ops.column_sums(x), x.double().sum(0), 5e-6, "sums")


@pytest.mark.parametrize("sums", [reference.column_sums, lambda x: reference.producers.row_sums(x.t().contiguous())])
def test_sums_do_not_depend_on_zeros_around_them(sums):
    """Added zeros do not change the bits of a sum. Kernels may therefore skip elements outside of a matrix."""
    x = draw(300, 40)
    assert_bit_equal(sums(F.pad(x, (0, 0, 0, 2000))), sums(x))


def produced(rows: int = 128, cols: int = 256) -> dict[str, ops.LazyMatrix]:
    x, other = draw(rows, cols, dtype=torch.bfloat16), draw(rows, cols, seed=1, dtype=torch.bfloat16)
    weight = draw(cols, seed=2)
    return {
        "rms_norm": ops.RmsNormed(x, weight, EPS), "added": ops.AddedNormed(x, other, weight, EPS),
        "layer_norm": ops.LayerNormed(x, weight, draw(cols, seed=3), EPS),
        "swiglu": ops.Gated(x, other),
        "sums": ops.Summed(x),
        "gelu": ops.Activated(x, "gelu", in_cast=True), "reglu": ops.GatedBy(x, other, "relu", in_cast=True),
        "gelu's gradient": ops.ActivationGrad(other, x, "gelu", in_cast=True),
        "its sums": ops.Summed(ops.ActivationGrad(other, x, "gelu", in_cast=True)),
    }  # fmt: skip


@pytest.mark.parametrize("which", produced())
@pytest.mark.parametrize("pair", OFFERING, ids=str)
def test_a_produced_matrix_is_cast_as_if_it_were_stored(pair, which, launches):  # noqa: F811
    """A fused cast has the bits of a cast of the stored matrix: for both orientations, for one, and for quantizers
    whose kernel cannot compute the matrix."""
    both = one_read(*pair)
    stored = produced()[which].value
    at = origin(stored), origin(stored.t())
    for made in (produced()[which], produced()[which].value):
        slot = a_slot()
        pairs = (
            both.cast(made, both.observe(made), slot=slot, at=at),
            pair[0].cast(made, pair[0].observe(made), slot=slot, at=at[0]),
        )
        if isinstance(made, ops.LazyMatrix):
            first, staging = pairs, slot.staging
    assert_same(first[0][0], pairs[0][0])
    assert_same(first[0][1], pairs[0][1])
    assert_same(first[1], pairs[1])
    assert_bit_equal(staging, slot.staging)
    assert bool(staging) == (caps_of(pair[0]).slot is not None)


def test_a_sum_is_made_with_the_first_that_needs_it(launches):  # noqa: F811
    x, more, weight = draw(16, 64, dtype=torch.bfloat16), draw(16, 64, seed=1, dtype=torch.bfloat16), draw(64, seed=2)
    stored = reference.rms_norm(x + more, weight, EPS)
    for first in ("amax", "value", "rstd", "matrix"):
        made = ops.AddedNormed(x, more, weight, EPS)
        found = getattr(made, first)
        amax = found() if callable(found) and not isinstance(found, Tensor) else made.amax()
        assert_bit_equal(amax, reference.amax(stored[0]))
        assert_bit_equal(made.matrix, x + more)
        assert_bit_equal(made.value, stored[0])
        assert_bit_equal(made.rstd, stored[1])


@pytest.mark.parametrize("which", ["rms_norm", "layer_norm", "swiglu", "gelu", "reglu", "gelu's gradient"])
def test_a_fused_cast_stores_nothing_else(which, launches, monkeypatch):  # noqa: F811
    """Neither the cast nor the computation of its amax stores the matrix."""
    matrix, quantizers = produced()[which], OFFERING[0]
    monkeypatch.setattr(type(matrix), "value", property(lambda self: pytest.fail("the matrix was computed apart")))
    both = one_read(*quantizers)
    both.cast(matrix, both.observe(matrix), slot=a_slot())
    wide = produced()[which]
    wide.matrix = wide.matrix.float()
    with pytest.raises(pytest.fail.Exception, match="computed apart"):  # no kernel computes this matrix in fp32
        both.cast(wide, both.observe(wide), slot=a_slot())


@pytest.mark.parametrize("which", ["sums", "its sums"])
def test_a_cast_takes_the_sums_of_its_columns(which, launches):  # noqa: F811
    summed = produced()[which]
    before = len(launches)
    ops.cast_fp8_block_both(summed, (1, 128), torch.float8_e5m2, power_of_two=True)
    sums = summed.sums()
    # The cast writes column sums of tiles, and the second launch adds these
    assert [name for name, *_ in launches[before:]] == [
        "cast_block_1d",
        "sum_parts",
    ]
    assert_bit_equal(sums, reference.column_sums(summed.matrix))
    assert_bit_equal(ops.Summed(summed.matrix).sums(), sums)  # without a cast
