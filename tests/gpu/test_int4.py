"""int4 weights in groups: the kernel for few tokens against its reference, and the time of one token compared with
bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.kernels import cuda_codes, reference
from dlp.kernels.table import gemm_kernels
from dlp.quant.integers import Int, IntScaling
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.tensor import HighPrecision

pytestmark = pytest.mark.usefixtures("device")
BOUND = 2**-18  # bound of the error, relative to the sum of the magnitudes of all terms


def operands(
    tokens: int, rows: int, cols: int, group: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return x, packed codes, scale_inv and zero points."""
    generator = torch.Generator().manual_seed(rows + cols + group)
    x = torch.randn(tokens, cols, generator=generator).bfloat16()
    codes = torch.randint(256, (rows, cols // 2), generator=generator).to(torch.uint8)
    scale = torch.rand(rows, cols // group, generator=generator) + 0.1
    zero = torch.randint(-128, 128, (rows, cols // group), generator=generator).to(torch.int8)
    return x, codes, scale, zero if zeros else None


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("rows, cols, group", [
    (16, 32, 32), (1, 128, 32), (40, 96, 32), (48, 4096, 32), (17, 4096, 64), (33, 4096, 128), (40, 4096, 256),
    (20, 14336, 128), (8, 14336, 32), (5, 640, 64),
])  # fmt: skip
def test_the_kernel_equals_the_reference(device, poisoned, rows, cols, group, tokens, zeros):
    x, codes, scale, zero = operands(tokens, rows, cols, group, zeros)
    on = [None if each is None else each.cuda() for each in (x, codes, scale, zero)]
    wide, narrow = (poisoned((tokens, rows), dtype) for dtype in (torch.float32, torch.bfloat16))
    for out in (wide, narrow):
        cuda_codes.int4_gemv(*on, out)
    want = reference.gemm_int4_group(x, codes, scale, zero)
    counted = (torch.stack([codes & 15, codes >> 4], -1).flatten(1).double() - 8).unflatten(1, (cols // group, -1))
    counted = ((counted if zero is None else counted - zero[..., None]) * scale[..., None]).flatten(1)
    most = x.double().abs() @ counted.abs().t()
    exact = x.double() @ counted.t()
    for result in (wide.cpu(), want):
        assert ((result.double() - exact).abs() <= BOUND / 2 * most).all()
    assert torch.equal(narrow.cpu(), wide.cpu().bfloat16())


@pytest.mark.parametrize("symmetric", [True, False])
@torch.no_grad()
def test_linears_run_the_kernel_for_few_tokens(device, symmetric):
    torch.manual_seed(0)
    for bias, group in ((True, 32), (False, 128)):
        layer = nn.Linear(256, 40, bias=bias).bfloat16()
        made = QuantizedParameter.from_float(layer.weight + 0.02, IntScaling(4, group, symmetric))
        layer.weight = nn.Parameter(made, requires_grad=False)
        exact = nn.Linear(256, 40, bias=bias).bfloat16()
        exact.weight = nn.Parameter(made.dequantize(torch.float32))
        layer = layer.to(device)
        for tokens in (1, 8, 9):
            x = torch.randn(tokens, 256).bfloat16()
            want = nn.functional.linear(x.float(), exact.weight, None if not bias else layer.bias.cpu().float())
            assert (layer(x.to(device)).float().cpu() - want).norm() < 0.004 * want.norm(), (bias, group, tokens)


def test_the_table_says_which_int4_weights_have_a_kernel(device):
    hp = HighPrecision()
    with_kernel, without = (Int(4, 32), Int(4, 128, False)), (Int(4, 16), Int(4, 48), Int(5, 32), Int(4))
    for fmt, has in [*[(fmt, True) for fmt in with_kernel], *[(fmt, False) for fmt in without]]:
        assert ("int4 gemv" in gemm_kernels(hp, fmt, "sm_90").kernel) == has, fmt
        assert "int4 gemv" not in gemm_kernels(fmt, hp, "sm_90").kernel
        assert "int4 gemv" not in gemm_kernels(hp, fmt, "cpu").kernel


def seconds(model: nn.Module, x: Tensor, calls: int = 50) -> float:
    """Seconds of one call in a CUDA graph, which excludes the host's time."""
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(calls):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


@pytest.mark.needs_gpu
@pytest.mark.parametrize("group", [32, 128])
@torch.no_grad()
def test_one_token_is_faster_than_in_bf16(device, group):
    torch.manual_seed(0)
    # So many layers that their weights do not fit in the L2 cache, and each call reads weights from device memory
    layers = [nn.Linear(k, n, bias=False) for k, n in [(4096, 14336), (14336, 4096)] * 4]
    model = nn.Sequential(*layers).bfloat16().to(device)
    x = torch.randn(1, 4096, device=device).bfloat16()
    plain = seconds(model, x)
    dlp.quantize_(model, dlp.recipe("qat", weight=f"int4 group {group}"))
    expected = model(x.expand(9, -1))[:1]  # too many tokens for the kernel
    assert (model(x) - expected).float().norm() < 0.01 * expected.float().norm()
    quantized = seconds(model, x)
    print(
        f"group {group}: bf16 {plain * 1e6:.0f} us, int4 {quantized * 1e6:.0f} us, {plain / quantized:.2f} times as fast"
    )
    assert plain / quantized >= 1.7  # docs/quantize.md has the measured ratios; the goal is 2
