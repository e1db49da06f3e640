"""dlp's block-scaled FP8 GEMM for Hopper against float64: odd sizes, dtypes, bias, accumulation, and the problems for
which this GEMM is chosen.

The bound is that of test_gemms.py with promotion to fp32 after 128 products: 2^-11 of sum |a||b|.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dlp.kernels import gemm_sm90, gemms
from dlp.kernels.launches import recording
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import load
from tests.gpu.test_gemms import excess, operands

SHAPES = [
    (128, 256, 128), (1, 128, 256), (257, 200, 384), (384, 1024, 1040), (1000, 264, 144), (130, 8, 16), (2048, 1536, 1024),
]  # fmt: skip
UNIT = 2.0**-11
OPTIONS = list(itertools.product((torch.bfloat16, torch.float32), (False, True), (False, True)))


@pytest.fixture(autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def scaled(a, b) -> gemms.Scales:
    layouts = gemms.block_scales(a.parts[1], tile=False), gemms.block_scales(b.parts[1], tile=True)
    return gemms.Scales(*layouts, gemms.BLOCK_1D, gemms.BLOCK_2D)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("which", "fp8_format"), [("fprop", "E4M3"), ("dgrad", "HYBRID")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_float64_product_within_its_bound(device, poisoned, shape, which, fp8_format, power_of_two):
    recipe = load("fp8_block", fp8_format=fp8_format, power_of_two=power_of_two)
    a, b = operands(recipe, which, *shape)
    left, right = a.dequantize().double(), b.dequantize().double()
    exact, sums = left @ right.t(), left.abs() @ right.abs().t()
    for dtype, biased, adds in OPTIONS:
        bias = torch.randn(b.shape[0], device=device).to(dtype) * 30 if biased else None
        into = poisoned(tuple(exact.shape), torch.float32) if adds else None
        target = exact + (0 if bias is None else bias.double())
        if into is not None:
            target += into.normal_().double()
        into_takes_bias = not (adds and biased and dtype != torch.float32)  # an fp32 result takes no bf16 bias
        assert gemm_sm90.can_take(a.payload, b.payload, dtype, bias=bias, accumulate=into) == into_takes_bias
        if not into_takes_bias:
            continue
        made = gemm_sm90.product(a.payload, b.payload, dtype, scaled(a, b), bias=bias, accumulate=into)
        rounding = target.abs() * (2.0**-8 if made.dtype == torch.bfloat16 else 2.0**-22)
        assert made is into if adds else made.dtype == dtype
        assert excess(made, target, UNIT * sums + rounding) <= 0, (dtype, biased, adds)


def test_nothing_is_written_beside_a_result(device):
    a, b = operands(load("fp8_block"), "fprop", 130, 200, 256)
    whole = torch.full((140, 256), 7.0, device=device)
    gemm_sm90.product(a.payload, b.payload, torch.float32, scaled(a, b), accumulate=whole[:130, :200])
    assert bool((whole[130:] == 7).all()) and bool((whole[:, 200:] == 7).all()) and bool((whole[:130, :200] != 7).any())


@pytest.mark.parametrize(("rows", "cols", "own"), [(8192, 4096, True), (2048, 2048, False)])
def test_large_gemms_run_here_and_agree_with_cublaslt(device, rows, cols, own):
    a, b = operands(load("fp8_block"), "fprop", rows, cols, 8192)
    gemm = Gemm("fprop", b, torch.bfloat16)
    with recording() as launched:
        gemm(a)
    assert ([name for name, _, _ in launched] == ["gemm_fp8_blocks"]) == own
    made = gemm(a)
    theirs = gemms.product_fp8(a.payload, b.payload, torch.bfloat16, scaled(a, b)).float()
    assert torch.equal(made, gemm(a))
    assert float((made.float() - theirs).norm() / theirs.norm()) < 2.0**-7


def test_it_is_captured_and_replayed(device):
    a, b = operands(load("fp8_block"), "fprop", 304, 400, 512)
    before, graph = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b)), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b))
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, before)
