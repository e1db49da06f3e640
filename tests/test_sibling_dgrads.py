"""Dgrads of siblings that one GEMM computes and sums: operands for which this is possible, GEMMs on chunks of rows, a
layer, and the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlp.kernels import reference
from dlp.parallel.linear.modules import Linear
from dlp.parallel.model.plan import make_plan
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import load
from dlp.quant.siblings import as_one
from dlp.quant.tensor import QuantizedTensor
from tests.emulated import emulated, recorded  # noqa: F401
from tests.quantizers import matrix, quantize

SIZES = (64, 32, 96)
K, M = 64, 40


def siblings(recipe: str = "fp8_current", **changes: str) -> tuple[list[QuantizedTensor], list[Gemm]]:
    """Return the operands dy_i of siblings, and their dgrad GEMMs."""
    given = load(recipe, **changes)
    left, right = given.operands("dgrad")
    rows = [quantize(left, matrix(i, M, n) * 10.0**i) for i, n in enumerate(SIZES)]
    columns = [quantize(right, matrix(9 + i, K, n)) for i, n in enumerate(SIZES)]
    return rows, [Gemm("dgrad", b, torch.float32, options=given.dgrad) for b in columns]


def terms(rows: list[QuantizedTensor], gemms: list[Gemm]) -> list[tuple[Tensor, ...]]:
    return [(a.parts[0], gemm.b.parts[0], a.parts[1], gemm.b.parts[1]) for a, gemm in zip(rows, gemms, strict=True)]


def rows_of(a: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Return rows [start, stop) of an operand, as overlap strategies cut it."""
    moves = a.format.moves[0]
    return a.format.wrap([part if dim is None else part[start:stop] for part, dim in zip(a.parts, moves, strict=True)])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_one_gemm_has_the_bits_of_the_sum(fp8_format: str):
    rows, gemms = siblings(fp8_format=fp8_format)
    (a,), (gemm,) = as_one(rows, gemms, torch.bfloat16)
    expected = reference.gemm_fp8_tensor_sum(terms(rows, gemms)).bfloat16()
    assert torch.equal(gemm(a), expected)
    chunks = [gemm(rows_of(a, start, stop)) for start, stop in ((0, 16), (16, M))]
    assert torch.equal(torch.cat(chunks), expected)
    decoded = sum(
        each.dequantize().double() @ of.b.dequantize().double().t() for each, of in zip(rows, gemms, strict=True)
    )
    assert float((expected.double() - decoded).norm() / decoded.norm()) < 2.0**-8
    assert torch.equal(a.dequantize(), torch.cat([each.dequantize() for each in rows], 1))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_rowwise", "mxfp8"])
@pytest.mark.usefixtures("emulated")
def test_formats_without_a_kernel_stay_apart(recipe: str):
    rows, gemms = siblings(recipe)
    assert as_one(rows, gemms, torch.bfloat16) == (rows, gemms)


def test_the_cpu_has_no_kernel():
    rows, gemms = siblings()
    assert as_one(rows, gemms, torch.bfloat16) == (rows, gemms)


@pytest.mark.usefixtures("emulated")
def test_a_sum_that_the_kernel_does_not_take_is_added_in_memory():
    rows, gemms = siblings()
    five, more = [*rows, *rows[:2]], [*gemms, *gemms[:2]]
    with recorded() as launched:
        (a,), (gemm,) = as_one(five, more, torch.bfloat16)
        made = gemm(a)
    assert "gemm_fp8_sum" not in dict(launched)
    decoded = sum(
        each.dequantize().double() @ of.b.dequantize().double().t() for each, of in zip(five, more, strict=True)
    )
    assert float((made.double() - decoded).norm() / decoded.norm()) < 2.0**-8


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_the_backward_of_a_layer_runs_one_dgrad(recipe: str):
    torch.manual_seed(0)
    layer = Linear(K, SIZES, bias=False, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    dys = [torch.randn(M, n, dtype=torch.bfloat16) for n in SIZES]
    with recorded() as launched:
        torch.autograd.backward(layer(x), dys)
    assert [name for name, _ in launched].count("gemm_fp8_sum") == 1
    exact = sum(dy.double() @ weight.detach().double() for dy, weight in zip(dys, layer.parameters(), strict=True))
    assert float((x.grad.double() - exact).norm() / exact.norm()) < 0.08


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))


def test_the_plan_names_the_kernel_of_siblings():
    groups = [{"name": "qk", "match": ["{q,k}"], "siblings": True, "recipe": "fp8_current"},
              {"name": "o", "match": ["o"], "recipe": "fp8_current"}]  # fmt: skip
    with torch.device("meta"):
        model = Attention()
    for device, of_siblings in (
        ("sm_90", "cublaslt fp8 tn of each, aligned: gemm_sum_sm90"),
        ("sm_100", "cublaslt fp8 tn"),
    ):
        q, k, o = (row.kernels[1] for row in make_plan(model, groups, 1, device_type=device).layers)
        assert (q, k) == (of_siblings, of_siblings) and o == "cublaslt fp8 tn"
