"""Every format, GEMM and mode for M, N and K of 0, 1, 2 and around the size of a block, for which torch's kernels may
be wrong. No ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.state import KEPT
from dlp.quant import recipe as recipes
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import Quantizer
from dlp.quant.recipe import GEMMS
from tests.cases import RECIPES as NAMES
from tests.metrics import relative_error
from tests.quantizers import RECIPES, quantize

PAIRS = list({recipe.operands(which): None for recipe in RECIPES for which in GEMMS})  # each pair of quantizers once
# Bound on the relative error, for the coarsest format. Uninitialized memory or a missing term causes much larger errors
WORST = 0.3


def sizes(block: int) -> Iterator[tuple[int, int, int]]:
    """Return sizes of M, N and K: all combinations of 0 and 1; and for each of the three, sizes that are small or
    near `block`, while the other two are block + 1."""
    yield from itertools.product((0, 1), repeat=3)
    for place, size in itertools.product(range(3), sorted({0, 1, 2, block - 1, block, block + 1})):
        yield tuple(size if i == place else block + 1 for i in range(3))  # type: ignore[misc]


def values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + 1000 * columns)).bfloat16()


int_mm = torch._int_mm


def strict_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Run `torch._int_mm`, but raise AssertionError for operands with which oneDNN on a CPU with VNNI would leave the
    result uninitialized: torch passes stride(0) as the leading dimension if stride(1) == 1, else stride(1), and this
    leading dimension may be too small."""
    for x in (a, b) if a.numel() and b.numel() else ():
        rows = x.stride(1) == 1
        leading, least = (x.stride(0), x.shape[1]) if rows else (x.stride(1), x.shape[0])
        assert leading >= least or 1 not in x.stride(), f"{tuple(x.shape)} with strides {x.stride()}"
    return int_mm(a, b)


@pytest.fixture(autouse=True)
def as_on_vnni() -> Iterator[None]:
    with mock.patch.object(torch, "_int_mm", strict_int_mm):
        yield


@pytest.mark.parametrize("left, right", PAIRS, ids=str)
def test_a_gemm_of_any_sizes_is_the_float64_product(left: Quantizer, right: Quantizer):
    """Operands are padded as their formats require. The error is at most (C + 8) 2^-24 sum |a||b|, where C is the
    padded size of the contraction."""
    blocks = [size for quantizer in (left, right) for size in quantizer.format.block if size > 1]
    for rows, cols, contraction in sizes(max([16, *blocks])):
        a, b = (
            quantize(quantizer, quantizer.format.padded(values(lines, contraction)))
            for quantizer, lines in ((left, rows), (right, cols))
        )
        x, w = a.dequantize().double(), b.dequantize().double()
        width = min(x.shape[1], w.shape[1])  # the two formats may require different padding
        if x.shape[1] != w.shape[1]:
            continue
        y = Gemm("fprop", b, torch.float32)(a)
        bound = (width + 8) * 2**-24 * (x.abs() @ w.abs().t())
        assert y.shape == (len(x), len(w)) and ((y.double() - x @ w.t()).abs() <= bound).all(), (
            rows,
            cols,
            contraction,
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_any_sizes_has_the_results_of_plain_torch(name: str):
    """The test compares y, dx and dw of each recipe, with a bound on the relative error. Layers pad their operands."""
    for place, size in itertools.product(range(3), (0, 1, 2)):
        tokens, out_features, in_features = (size if i == place else 33 for i in range(3))
        x, w, dy = values(tokens, in_features), values(out_features, in_features), values(tokens, out_features)
        layer = dlp.ColumnParallelLinear(in_features, out_features, recipe=name, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(w)
        x.requires_grad_()
        y = layer(x[None])
        y.backward(dy[None])
        for result, expected in ((y[0], x @ w.t()), (x.grad, dy @ w), (layer.weight.grad, dy.t() @ x)):
            assert result is not None
            assert relative_error(result, expected) < WORST, (tokens, out_features, in_features)


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bf16", "fp8_delayed")])
def test_a_quantized_model_of_any_sizes_has_the_results_of_plain_torch(name: str, mode: str):
    """The test uses `quantize_`, which pads codes if the format requires it, and x with three dimensions."""
    for tokens, out_features, in_features in sizes(max(16, *recipes.load(name).w.rowwise.format.block)):
        # No bias: y + bias might be near 0, and the relative error would be large
        model = nn.Sequential(nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16))
        x = values(tokens, in_features)[None]
        expected = model(x)
        dlp.quantize_(model, name, mode=mode)
        assert relative_error(model(x), expected) < WORST, (tokens, out_features, in_features)


def test_the_host_memory_of_a_layer_is_bounded_when_the_number_of_tokens_changes_in_each_step() -> None:
    """A layer plans a pass for each number of tokens; an expert, for example, gets another number in each step."""
    layer = dlp.Linear(16, 16, recipe="fp8_current")
    for tokens in range(1, 3 * KEPT):
        layer(torch.ones(tokens, 16)).sum().backward()
    bound = layer.core.bound
    assert max(map(len, (bound.cache, bound.plans, bound.plans_back))) <= KEPT
    layer.core.set_spec(layer.core.with_recipe(recipes.load("bf16")))
    assert not (bound.cache or bound.plans or bound.plans_back or bound.calls)
