"""Casts and GEMMs of integers on a GPU have the bits of the CPU, because sums are exact."""

from __future__ import annotations

import pytest
import torch

from dlp.quant.gemm import Gemm, kernel_name
from dlp.quant.integers import IntScaling
from tests.gpu.inputs import values, views
from tests.metrics import assert_bit_equal
from tests.quantizers import quantize

KINDS = [
    IntScaling(), IntScaling(narrow=True), IntScaling(symmetric=False), IntScaling(4, 32), IntScaling(4, 32, symmetric=False),
    IntScaling(3, 16, symmetric=False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantizer", KINDS, ids=str)
def test_a_cast_on_the_gpu_is_the_one_on_the_cpu(device, quantizer, dtype):
    matrix = values("gauss", 192, 288, dtype)
    theirs = views(matrix.to(device))
    for how, x in views(matrix).items():
        if x.shape[1] % quantizer.format.multiple[1]:
            continue
        mine, other = quantize(quantizer, x), quantizer.cast(theirs[how], quantizer.observe(theirs[how]))
        for part, a, b in zip(mine.format.parts, mine.parts, other.parts, strict=True):
            assert_bit_equal(b.cpu(), a, f"{part.name}, {how}")
        assert_bit_equal(other.dequantize().cpu(), mine.dequantize(), how)


@pytest.mark.parametrize("quantizer", [IntScaling(narrow=True), IntScaling(symmetric=False)], ids=str)
@pytest.mark.parametrize("shape", [(256, 384, 512), (1, 3, 13), (16, 8, 8), (17, 9, 16), (3, 5, 2**17 + 24)], ids=str)
def test_a_gemm_on_the_gpu_is_the_one_on_the_cpu(device, shape, quantizer):
    rows, cols, contraction = shape
    name = "torch._int_mm + scales" if quantizer.symmetric else "torch._int_mm + zero points"
    assert kernel_name(quantizer.format, quantizer.format, "cuda") == name
    pair = [torch.randn(lines, contraction, generator=torch.Generator().manual_seed(lines)) for lines in (rows, cols)]
    a, b = (quantize(quantizer, x) for x in pair)
    there = [q.format.wrap([part.to(device) for part in q.parts]) for q in (a, b)]
    for dtype in (torch.float32, torch.bfloat16):
        assert_bit_equal(Gemm("fprop", there[1], dtype)(there[0]).cpu(), Gemm("fprop", b, dtype)(a))
