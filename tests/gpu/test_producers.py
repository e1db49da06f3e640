"""Kernels of RMSNorm, LayerNorm, SwiGLU and column sums, and casts fused with these functions.

Norms and the sums equal the reference bit for bit. SwiGLU, which uses the exponential function of the device, is
within a bound of float64. A fused cast has the bits of a cast of the stored matrix.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dlp
from dlp.kernels import cuda_producers, ops, reference
from dlp.quant.quantizer import caps_of, one_read
from tests.cases import BY_SCALES
from tests.gpu.inputs import DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.gpu.test_quantizers import PAIRS, at, slot
from tests.metrics import assert_bit_equal, assert_close

# Rows of the first two shapes do not fit in registers; the last shape has more rows than the kernel has partial sums
LONG = [(3, 9001), (2, 20000), (1030, 2056)]
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # bound of the relative error: bf16 rounds by at most 2^-8
EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
weights = pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
OFFERING = [pair for pair in PAIRS if one_read(*pair) is not None]


def assert_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare bits, except for the bits of NaNs, which differ between conversions on a GPU and on a CPU."""
    actual, expected = actual.cpu(), expected.cpu()
    assert_bit_equal(actual.nan_to_num(1.5, float("inf"), float("-inf")),
                     expected.nan_to_num(1.5, float("inf"), float("-inf")), what)  # fmt: skip
    assert torch.equal(actual.isnan(), expected.isnan()), what


@dtypes
@weights
@pytest.mark.parametrize("data", DATA)
def test_rms_norm_is_the_reference(device, poisoned, dtype, weight_dtype, data):
    for number, shape in enumerate([*SHAPES, *LONG]):
        x, weight = values(data, *shape, dtype), values("gauss", 1, shape[1], weight_dtype, 1)[0]
        expected, expected_rstd = reference.rms_norm(x, weight, EPS)
        stride, what = STRIDES[number % 3], f"{data} {dtype} {shape}"
        on_device = place(x, stride, device), weight.to(device), EPS
        rstd, y = poisoned((shape[0],), torch.float32), poisoned(shape, dtype)
        cuda_producers.rms_norm(*on_device, rstd, y=y)
        assert_equal(rstd, expected_rstd, f"rstd, {what}")
        assert_equal(y, expected, f"y, {what}")
        again, amax = poisoned((shape[0],), torch.float32), poisoned((), torch.float32)
        cuda_producers.rms_norm(*on_device, again, amax=amax)
        assert_equal(again, expected_rstd, f"rstd beside amax, {what}")
        assert_bit_equal(amax.cpu(), reference.amax(expected), f"amax, {what}")
        alone = poisoned((shape[0],), torch.float32)
        cuda_producers.rms_norm(*on_device, alone)
        assert_equal(alone, expected_rstd, f"rstd alone, {what}")


@dtypes
@weights
@pytest.mark.parametrize("data", ["gauss", "specials", "tiny"])
def test_rms_norm_backward_is_the_reference(device, poisoned, dtype, weight_dtype, data):
    for number, shape in enumerate([*SHAPES, *LONG]):
        x, dy = values(data, *shape, dtype), values(data, *shape, dtype, 2)
        weight = values("gauss", 1, shape[1], weight_dtype, 1)[0]
        rstd = reference.rms_norm(x, weight, EPS)[1]
        expected, stride = reference.rms_norm_backward(dy, x, weight, rstd), STRIDES[number % 3]
        dx, dweight = poisoned(shape, dtype), poisoned((shape[1],), torch.float32)
        cuda_producers.rms_norm_backward(
            place(dy, STRIDES[(number + 1) % 3], device), place(x, stride, device), weight.to(device), rstd.to(device), dx,
            dweight,
        )  # fmt: skip
        assert_equal(dx, expected[0], f"dx, {data} {dtype} {shape}")
        assert_equal(dweight, expected[1], f"dweight, {data} {dtype} {shape}")
        add = values(data, *shape, dtype, 3)
        dx = poisoned(shape, dtype)
        cuda_producers.rms_norm_backward(
            place(dy, stride, device), place(x, stride, device), weight.to(device), rstd.to(device), dx, dweight,
            place(add, STRIDES[(number + 2) % 3], device),
        )  # fmt: skip
        assert_equal(dx, expected[0] + add, f"dx + add, {data} {dtype} {shape}")


@dtypes
@weights
@pytest.mark.parametrize("data", ["gauss", "tiny"])
def test_layer_norm_and_its_gradients_are_the_reference(device, poisoned, dtype, weight_dtype, data):
    for number, shape in enumerate([*SHAPES, *LONG]):
        x, dy = values(data, *shape, dtype), values(data, *shape, dtype, 2)
        weight, bias = (values("gauss", 1, shape[1], weight_dtype, seed)[0] for seed in (1, 3))
        expected = reference.layer_norm(x, weight, bias, EPS)
        placed, grad = place(x, STRIDES[number % 3], device), place(dy, STRIDES[(number + 1) % 3], device)
        y, mean, rstd = poisoned(shape, dtype), *(poisoned((shape[0],), torch.float32) for _ in range(2))
        amax, on_device = poisoned((), torch.float32), (placed, weight.to(device), bias.to(device), EPS)
        for out in ({"amax": amax}, {}, {"y": y}):
            for each in (mean, rstd):
                each.fill_(torch.nan)
            cuda_producers.layer_norm(*on_device, mean, rstd, **out)
            for made, right, name in zip((mean, rstd), expected[1:], ("mean", "rstd"), strict=True):
                assert_equal(made, right, f"{name} beside {[*out]}, {data} {dtype} {shape}")
        assert_equal(y, expected[0], f"y, {data} {dtype} {shape}")
        assert_bit_equal(amax.cpu(), reference.amax(expected[0]), f"amax, {data} {dtype} {shape}")
        expected = reference.layer_norm_backward(dy, x, weight, *expected[1:])
        dx, dweight, dbias = poisoned(shape, dtype), *(poisoned((shape[1],), torch.float32) for _ in range(2))
        cuda_producers.layer_norm_backward(grad, placed, weight.to(device), mean, rstd, dx, dweight, dbias)
        for made, right, name in zip((dx, dweight, dbias), expected, ("dx", "dweight", "dbias"), strict=True):
            assert_equal(made, right, f"{name}, {data} {dtype} {shape}")


@dtypes
def test_column_sums_are_the_reference(device, poisoned, dtype):
    for number, (shape, data) in enumerate(product([*SHAPES, *LONG, (5000, 40)], ("gauss", "specials"))):
        x, out = values(data, *shape, dtype), poisoned((shape[1],), torch.float32)
        cuda_producers.column_sums(place(x, STRIDES[number % 3], device), out)
        assert_equal(out, reference.column_sums(x), f"{data} {dtype} {shape}")


@dtypes
@weights
def test_a_sum_that_is_normed_is_the_reference(device, poisoned, dtype, weight_dtype):
    for number, shape in enumerate([*SHAPES, *LONG]):
        x, more = values("gauss", *shape, dtype), values("gauss", *shape, dtype, 2)
        weight = values("gauss", 1, shape[1], weight_dtype, 1)[0]
        expected, expected_rstd = reference.rms_norm(x + more, weight, EPS)
        placed = [place(each, STRIDES[(number + i) % 3], device) for i, each in enumerate((x, more))]
        for wants in ("y", "amax", "rstd"):
            rstd, total, y = poisoned((shape[0],), torch.float32), poisoned(shape, dtype), poisoned(shape, dtype)
            amax = poisoned((), torch.float32)
            out = {"y": y} if wants == "y" else {"amax": amax} if wants == "amax" else {}
            cuda_producers.rms_norm(placed[0], weight.to(device), EPS, rstd, more=placed[1], total=total, **out)
            assert_equal(total, x + more, f"sum, {dtype} {shape}")
            assert_equal(rstd, expected_rstd, f"rstd, {dtype} {shape}")
            if wants == "y":
                assert_equal(y, expected, f"y, {dtype} {shape}")
            if wants == "amax":
                assert_bit_equal(amax.cpu(), reference.amax(expected), f"amax, {dtype} {shape}")


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@dtypes
def test_swiglu_is_that_of_float64(device, poisoned, dtype):
    for number, shape in enumerate([*SHAPES, *LONG]):
        gate, up, dh = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
        placed = [place(x, STRIDES[(number + i) % 3], device) for i, x in enumerate((gate, up, dh))]
        wide = gate.double().requires_grad_(), up.double().requires_grad_()
        expected = F.silu(wide[0]) * wide[1]
        gradients = torch.autograd.grad(expected, wide, dh.double())
        h, dgate, dup = (poisoned(shape, dtype) for _ in range(3))
        amax = poisoned((), torch.float32)
        cuda_producers.swiglu(placed[0], placed[1], h=h)
        cuda_producers.swiglu(placed[0], placed[1], amax=amax)
        cuda_producers.swiglu_backward(placed[2], placed[0], placed[1], dgate, dup)
        assert_bit_equal(amax.cpu(), reference.amax(h.cpu()), f"amax, {dtype} {shape}")
        for name, made, right in zip(("h", "dgate", "dup"), (h, dgate, dup), (expected, *gradients), strict=True):
            assert_close(made.cpu(), right, ROUNDED[dtype], f"{name}, {dtype} {shape}")
            bound = ROUNDED[dtype] * 2 * right.abs() + 1e-6 * (1 + gate.double().abs()) * dh.double().abs().clamp(min=1)
            assert bool(((made.cpu().double() - right).abs() <= bound * (1 + up.double().abs())).all()), name


@dtypes
def test_swiglu_at_its_ends(device, dtype):
    """Compare SwiGLU with the reference for every bf16 value as the gate, including the positions of NaN and Inf."""
    gate = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256).to(dtype)
    up = torch.full_like(gate, 1.5)
    made, expected = ops.swiglu(gate.to(device), up.to(device)).cpu(), reference.swiglu(gate, up)
    assert torch.equal(made.isnan(), expected.isnan()) and torch.equal(made.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert_close(made[finite] * 2.0**-60, expected[finite].double() * 2.0**-60, ROUNDED[dtype])


def produced(which: str, shape: tuple[int, int], data: str, strides: tuple[str, str], device: str) -> ops.LazyMatrix:
    x = place(values(data, *shape, torch.bfloat16), strides[0], device)
    if which == "rms_norm":
        return ops.RmsNormed(x, values("gauss", 1, shape[1], torch.float32, 1)[0].to(device), EPS)
    if which.startswith("layer_norm"):
        dtype = torch.bfloat16 if "bf16" in which else torch.float32
        weight, bias = (values("gauss", 1, shape[1], dtype, seed)[0].to(device) for seed in (1, 3))
        return ops.LayerNormed(x, weight, bias, EPS)
    if which == "added":
        more, weight = values("gauss", *shape, torch.bfloat16, 2), values("gauss", 1, shape[1], torch.float32, 1)[0]
        return ops.AddedNormed(x, place(more, strides[1], device), weight.to(device), EPS)
    if which == "swiglu":
        return ops.Gated(x, place(values(data, *shape, torch.bfloat16, 1), strides[1], device))
    other = place(values(data, *shape, torch.bfloat16, 1), strides[1], device)
    if which == "reglu":
        return ops.GatedBy(x, other, "relu", in_cast=True)
    if which in ("gelu", "sigmoid"):
        return ops.Activated(x, which, in_cast=True)
    if "gradient" in which:
        grad = ops.ActivationGrad(other, x, which.split("'")[0], in_cast=True)
        return ops.Summed(grad) if "sums" in which else grad
    return ops.Summed(x)


def shapes_of(pair) -> list[tuple[int, int]]:
    unit = max(max(quantizer.format.multiple) for quantizer in pair)
    return [shape for shape in [*SHAPES, (192, 288), (32, 640), (640, 4096)] if all(size % unit == 0 for size in shape)]


@pytest.mark.parametrize(
    "which",
    [
        "rms_norm",
        "added",
        "layer_norm",
        "layer_norm in bf16",
        "swiglu",
        "sums",
        "gelu",
        "sigmoid",
        "reglu",
        "gelu's gradient",
        "silu's gradient and its sums",
    ],
)
@pytest.mark.parametrize("data", ["gauss", "specials", "huge"])
@pytest.mark.parametrize("pair", OFFERING, ids=str)
def test_a_fused_cast_is_that_of_the_stored_matrix(device, poisoned, pair, data, which):
    both = one_read(*pair)

    def run(matrix, outs=None):
        state = slot(device)
        made = both.cast(matrix, both.observe(matrix), slot=state, at=at(matrix, device), outs=outs)
        return [*made[0].parts, *made[1].parts, *([state.staging] if caps_of(pair[0]).slot else [])], made

    for number, shape in enumerate(shapes_of(pair)):
        matrix = produced(which, shape, data, (STRIDES[number % 3], STRIDES[number % 2]), device)
        expected, made = run(matrix.value)
        outs = tuple(q.format.wrap([poisoned(tuple(part.shape), part.dtype) for part in q.parts]) for q in made)
        fresh = produced(which, shape, data, (STRIDES[number % 3], STRIDES[number % 2]), device)
        found, _ = run(fresh, outs)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_bit_equal(a, b, f"part {i}, {which} {data} {shape}")
        if isinstance(fresh, ops.Summed):
            # A cast of tiles cannot compute column sums, so the sums are a separate launch
            inside = all(quantizer.format.block[0] <= 1 for quantizer in pair)
            assert (fresh._parts is not None) == inside
            assert_equal(fresh.sums(), reference.column_sums(matrix.value.cpu()), f"sums {shape}")
        rowwise = pair[0].cast(fresh, pair[0].observe(fresh), slot=slot(device), at=at(matrix, device)[0])
        for a, b in zip(rowwise.parts, expected, strict=False):
            assert_bit_equal(a, b, f"rowwise alone, {which} {data} {shape}")


@pytest.mark.parametrize("which", ["rms_norm", "layer_norm", "swiglu"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8"])
def test_what_recipes_cast_of_activations_is_fused(device, monkeypatch, recipe, which):
    from dlp.quant.recipe import load

    x = load(recipe).x
    both, matrix = one_read(x.rowwise, x.columnwise), produced(which, (128, 256), "gauss", STRIDES[:2], device)
    monkeypatch.setattr(type(matrix), "value", property(lambda self: pytest.fail("the matrix was computed apart")))
    both.cast(matrix, both.observe(matrix), slot=slot(device), at=at(matrix, device))


def test_gradients_of_narrow_norms_leave_wide_ones_their_shared_memory(device):
    """The gradient of a narrow norm does not lower the shared-memory limit that a wide norm needs.

    If each call set the limit of the kernel to the size that the call needs, a call could lower the limit before
    another host thread launches the kernel with more shared memory. On a GPU this race occurs by chance; the emulator
    raises an error if a limit is lowered.
    """
    for cols, stride in product((8192, 16, 12288, 13001, 28672, 17, 8192), ("contiguous", "misaligned")):
        dy, x = (values("gauss", 2, cols, torch.float32, seed) for seed in (2, 0))
        weight, what = values("gauss", 1, cols, torch.float32, 1)[0], f"{cols} {stride}"
        _, mean, rstd = reference.layer_norm(x, weight, weight, EPS)
        placed, dx = [place(each, stride, device) for each in (dy, x)], torch.empty(2, cols, device=device)
        dweight, dbias = (torch.empty(cols, device=device) for _ in range(2))
        vectors = [each.to(device) for each in (weight, mean, rstd)]
        cuda_producers.layer_norm_backward(*placed, *vectors, dx, dweight, dbias)
        assert_equal(dx, reference.layer_norm_backward(dy, x, weight, mean, rstd)[0], f"LayerNorm, {what}")
        rstd = reference.rms_norm(x, weight, EPS)[1]
        expected = reference.rms_norm_backward(dy, x, weight, rstd)[0]
        cuda_producers.rms_norm_backward(*placed, vectors[0], rstd.to(device), dx, dweight)
        assert_equal(dx, expected, f"RMSNorm, {what}")
        cuda_producers.rms_norm_backward(*placed, vectors[0], rstd.to(device), dx, dweight, placed[0])
        assert_equal(dx, expected + dy, f"RMSNorm and a residual, {what}")


def test_what_producers_refuse(device):
    x, vector = torch.zeros(4, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match=r"weight must be a contiguous \[8\]"):
        cuda_producers.rms_norm(x, vector[:4], EPS, torch.empty(4, device=device))
    with pytest.raises(ValueError, match="up must be torch.float32"):
        cuda_producers.swiglu(x, x.bfloat16(), h=torch.empty_like(x))
    wide = torch.zeros(1, cuda_producers.MAX_NORM_COLS + 8, device=device)
    with pytest.raises(ValueError, match="at most 57344 features"):
        cuda_producers.rms_norm_backward(wide, wide, wide[0], wide[:, 0], wide.clone(), torch.empty_like(wide[0]))


def sigmoid_bound(g: Tensor) -> Tensor:
    """Return the bound on the difference between kernel and reference in act(g) and act'(g), for silu, sigmoid and qgelu.
    It is the bound that `cuda_producers.activation` states, with the factor 1.702 for all three."""
    wide = g.double()
    return (2.0**-20 * wide.sigmoid() + 2.0**-126) * (1 + 1.702 * wide.abs())


@dtypes
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs_gpu) if name == "gelu" else name for name in cuda_producers.ACTS],
)
def test_activations_and_gates_are_the_reference(device, poisoned, dtype, name):
    """Activations and gates equal the reference on the same device, which uses the same tanh. silu, sigmoid and qgelu
    are within `sigmoid_bound`."""

    def check(made, expected, factor, what):
        if name not in ("silu", "sigmoid", "qgelu"):
            return assert_equal(made, expected, f"{name} {what} {dtype} {shape}")
        bound = sigmoid_bound(x) * factor.double().abs() + torch.finfo(dtype).eps * expected.double().abs() + 2.0**-126
        assert bool(((made.double() - expected.double()).abs() <= bound).all()), f"{name} {what} {dtype} {shape}"

    for number, shape in enumerate(SHAPES):
        stride = STRIDES[number % 3]
        x, up, dy = (place(values("gauss", *shape, dtype, seed), stride, device) for seed in (1, 2, 3))
        y, dx, dup = (poisoned(shape, dtype) for _ in range(3))
        cuda_producers.activation(x, name, y)
        check(y, reference.activation(x, name), torch.ones_like(x), "forward")
        cuda_producers.activation(x, name, dx, dy)
        check(dx, reference.activation_backward(dy, x, name), dy, "backward")
        cuda_producers.gate(x, up, name, y)
        check(y, reference.gated(x, up, name), up, "gate")
        cuda_producers.gate_backward(dy, x, up, name, dx, dup)
        expected = reference.gated_backward(dy, x, up, name)
        check(dx, expected[0], dy.double() * up.double(), "gate backward, dgate")
        check(dup, expected[1], dy, "gate backward, dup")


@pytest.mark.needs_gpu  # the linear calls cuBLASLt
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_gradients_are_the_reference_s(device, dtype):
    for recipe in BY_SCALES:
        layer = dlp.Linear(128, 256, True, recipe=recipe, device=device, dtype=dtype)
        for step in range(3):
            dy = torch.randn(320, 256, generator=torch.Generator().manual_seed(step)).to(dtype)
            layer.zero_grad()
            layer(torch.randn(320, 128, device=device, dtype=dtype)).backward(dy.to(device))
            assert_bit_equal(layer.bias.grad.cpu(), ops.column_sums(dy).to(dtype), f"{recipe} step {step}")
