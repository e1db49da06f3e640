"""Grouped GEMMs of rowwise FP8 (torch's kernel, sm_90): the kernel against the reference, a bank of experts
(`dlp.GroupedLinear`) against a loop of linears, and the times of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import dlp
from dlp.flows import grouped_fp8
from dlp.kernels import ops, reference, registry
from dlp.kernels.timing import device_ms, host_ms
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import QuantizedTensor

BOUND = 2**-8  # relative distance of two results that are rounded to bf16
SIZES = [(1, 0, 300), (5, 0, 1, 64, 0, 33, 1024, 17), (0, 0, 40), (16, 16), (2000,)]
SHAPES = [(8, 8192, 4096, 14336), (8, 8192, 14336, 4096), (64, 8192, 2048, 1408), (8, 64, 4096, 14336)]


@pytest.fixture(autouse=True)
def hopper(device: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's grouped GEMM of rowwise FP8 runs on sm_90")


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0)


def operands(sizes: tuple[int, ...], cols: int, contraction: int) -> tuple[Tensor, ...]:
    """Return (a, b, a_scale, b_scale, offsets): codes, their scale_inv, and the row of a at which the tokens of each expert
    end."""
    a, b = (
        torch.randn(sum(sizes), contraction, device="cuda"),
        torch.randn(len(sizes), cols, contraction, device="cuda"),
    )
    a_scale, b_scale = (2.0 ** torch.randint(-4, 4, each.shape[:-1], device="cuda") for each in (a, b))
    codes = (each.to(torch.float8_e4m3fn) for each in (a, b))
    return *codes, a_scale, b_scale, ends(sizes).to("cuda", torch.int32)


def distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype and bool(found.isfinite().all())
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("cols, contraction", [(128, 64), (16, 16), (1040, 2064), (4096, 4096)])
def test_the_kernel_computes_the_reference(sizes: tuple[int, ...], cols: int, contraction: int) -> None:
    torch.manual_seed(0)
    given = operands(sizes, cols, contraction)
    assert registry.choose("grouped_fp8_rowwise", *given).name == "torch scaled_grouped_mm"
    expected = reference.grouped_fp8_rowwise(*given)
    for fast in (False, True):
        assert distance(ops.grouped_fp8_rowwise(*given, fast), expected) <= (4 if fast else 1) * BOUND


def results(bank: dlp.GroupedLinear, x: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return y, dx and the gradient of each weight of a bank whose experts get `sizes` tokens."""
    x = x.clone().requires_grad_()
    y = bank(x, ends(sizes).cuda())
    dy = torch.arange(y.numel(), device=y.device).sin().view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *bank.parameters()], dy)]


def without_grouped_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_fp8, "why_not_grouped", lambda *_: "the loop is requested")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bank_computes_what_the_loop_computes(
    sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    bank = dlp.GroupedLinear(len(sizes), 256, 512, style="local", recipe="fp8_rowwise", device="cuda", dtype=dtype)
    other, x = copy.deepcopy(bank), torch.randn(sum(sizes), 256, device="cuda").bfloat16()
    found = results(bank, x, sizes)
    assert "run as one grouped GEMM for fprop and one for dgrad" in caplog.text
    without_grouped_gemms(monkeypatch)
    expected = results(other, x, sizes)
    assert distance(found[0], expected[0]) <= BOUND and distance(found[1], expected[1]) <= BOUND
    assert all(map(torch.equal, found[2:], expected[2:])), "wgrad is the wgrad of the loop"


def gemms(codes: list[QuantizedTensor], weights: list[QuantizedTensor]) -> list[Callable[[], Tensor]]:
    return [partial(Gemm("fprop", w, torch.bfloat16), a) for a, w in zip(codes, weights, strict=True)]


@pytest.mark.parametrize("num, tokens, k, n", SHAPES, ids=str)
def test_times_of_grouped_gemms_beside_the_loop(
    num: int, tokens: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Print times of the grouped GEMM and of the loop in milliseconds: of fprop alone, on codes with equal numbers of tokens
    per expert (also with a copy of the codes of w); and of forward + backward of a bank, with casts and host time, where
    the numbers of tokens change in each call, as with a router."""
    torch.manual_seed(0)
    sizes = (tokens // num,) * num
    a, b, a_scale, b_scale, offsets = operands(sizes, n, k)
    form = dlp.recipe("fp8_rowwise").x.rowwise.format
    bounds = list(pairwise([0, *offsets.tolist()]))
    loop = gemms(
        [form.wrap([a[i:j], a_scale[i:j]]) for i, j in bounds],
        [form.wrap([w.clone(), scale.clone()]) for w, scale in zip(b, b_scale, strict=True)],
    )
    stacked = [w.clone() for w in b.view(torch.uint8)]

    def copied() -> Tensor:
        return ops.grouped_fp8_rowwise(a, torch.stack(stacked).view(b.dtype), a_scale, b_scale, offsets)

    parts = {
        "loop": device_ms(lambda: [run() for run in loop]),
        "grouped": device_ms(lambda: ops.grouped_fp8_rowwise(a, b, a_scale, b_scale, offsets)),
        "grouped, codes copied": device_ms(copied),
    }
    bank = dlp.GroupedLinear(num, k, n, style="local", recipe="fp8_rowwise", device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (k, n))
    x.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        routed = torch.bincount(torch.randint(num, (tokens,)), minlength=num).cumsum(0)
        return torch.autograd.grad(bank(x, routed), [x, *bank.parameters()], dy)

    parts["forward + backward, grouped"] = host_ms(run)
    without_grouped_gemms(monkeypatch)
    parts["forward + backward, loop"] = host_ms(run)
    flops = 2 * tokens * k * n
    rates = ", ".join(
        f"{name} {ms:.3f} ms" + f" ({flops / ms / 1e9:.0f} TFLOP/s)" * ("+" not in name) for name, ms in parts.items()
    )
    print(f"\n{num} experts, {tokens} tokens, {k} x {n}: {rates}")
