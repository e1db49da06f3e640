"""The Hopper GEMM that computes the summed dgrads of siblings, against float64: odd sizes, both FP8 dtypes, up to four
siblings; repeatable bits, CUDA graphs, and layers.

The bound is that of test_gemms.py with promotion to fp32 after 128 products: 2^-11 of sum |a||b|.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlp.kernels.launches import recording
from dlp.parallel.linear.modules import Linear
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import load
from dlp.quant.siblings import as_one
from dlp.quant.tensor import QuantizedTensor
from tests.gpu.test_gemms import excess, operands

SHAPES = [
    (256, 256, (128, 128)), (1, 128, (16, 256, 144)), (257, 264, (400, 128)), (130, 8, (16,) * 4), (1000, 1032, (272, 640, 16)),
    (8192, 2048, (1024, 256, 256)), (129, 136, (128, 8192)),
]  # fmt: skip
UNIT = 2.0**-11


@pytest.fixture(autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def siblings(
    rows: int, cols: int, contractions: tuple[int, ...], **changes: str
) -> tuple[list[QuantizedTensor], list[Gemm]]:
    recipe = load("fp8_current", **changes)
    pairs = [operands(recipe, "dgrad", rows, cols, along) for along in contractions]
    return [a for a, _ in pairs], [Gemm("dgrad", b, torch.float32, options=recipe.dgrad) for _, b in pairs]


def summed(pair: tuple[list[QuantizedTensor], list[Gemm]], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    (a,), (gemm,) = as_one(*pair, dtype)
    return Gemm("dgrad", gemm.b, dtype, options=gemm.options, out=out)(a)


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_float64_sum_within_its_bound(device, poisoned, shape, fp8_format):
    pair = siblings(*shape, fp8_format=fp8_format)
    decoded = [(a.dequantize().double(), gemm.b.dequantize().double()) for a, gemm in zip(*pair, strict=True)]
    exact, sums = sum(a @ b.t() for a, b in decoded), sum(a.abs() @ b.abs().t() for a, b in decoded)
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-22)):
        made = poisoned(tuple(exact.shape), dtype)
        with recording() as launched:
            summed(pair, dtype, made)
        assert [name for name, _, _ in launched] == ["gemm_fp8_sum"]
        assert summed(pair, dtype, made) is made
        assert excess(made, exact, UNIT * sums + unit * exact.abs()) <= 0, dtype


def test_bits_of_a_row_do_not_depend_on_the_other_rows(device):
    rows, gemms = siblings(1000, 520, (144, 256))
    whole = summed((rows, gemms), torch.float32)
    for start, stop in ((0, 17), (17, 273), (273, 1000)):
        part = [a.format.wrap([a.parts[0][start:stop], a.parts[1]]) for a in rows]
        assert torch.equal(summed((part, gemms), torch.float32), whole[start:stop])


def test_it_is_captured_and_replayed(device):
    pair, graph = siblings(304, 400, (512, 128)), torch.cuda.CUDAGraph()
    before = summed(pair, torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = summed(pair, torch.bfloat16)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, before)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_replayed_backwards_of_a_layer_have_equal_bits(device, recipe):
    """The first backward launches kernels, later backwards replay captured launches; dx has equal bits in all."""
    torch.manual_seed(0)
    layer = Linear(512, (256, 128, 128), bias=False, recipe=recipe, dtype=torch.bfloat16, device=device)
    x = torch.randn(384, 512, dtype=torch.bfloat16, device=device)
    dys = [torch.randn(384, n, dtype=torch.bfloat16, device=device) for n in (256, 128, 128)]
    exact = sum(dy.double() @ weight.detach().double() for dy, weight in zip(dys, layer.parameters(), strict=True))
    found = []
    for _ in range(6):
        mine = x.clone().requires_grad_()
        torch.autograd.backward(layer(mine), dys)
        found.append(mine.grad)
    assert all(torch.equal(each, found[0]) for each in found[1:])
    assert float((found[0].double() - exact).norm() / exact.norm()) < 0.08
