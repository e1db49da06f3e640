"""int4 weights in torch's own layout on a GPU: bounds against decoded weights, and the time of one token beside bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dlp

pytestmark = pytest.mark.usefixtures("device")


def seconds(model: nn.Module, x: torch.Tensor, calls: int = 50) -> float:
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


@pytest.mark.parametrize("group", [32, 128])
@torch.no_grad()
def test_one_token_is_twice_as_fast_as_bf16(device: torch.device, group: int) -> None:
    torch.manual_seed(0)
    # Together larger than the L2 cache
    layers = [nn.Linear(k, n, bias=False) for k, n in [(4096, 14336), (14336, 4096)] * 4]
    model = nn.Sequential(*layers).bfloat16().to(device)
    x = torch.randn(1, 4096, device=device).bfloat16()
    plain = seconds(model, x)
    dlp.quantize_(model, dlp.recipe("qat", weight=f"int4 group {group}"))
    expected = model(x)
    dlp.pack_int4(model)
    assert (model(x) - expected).float().norm() < 0.05 * expected.float().norm()
    packed = seconds(model, x)
    print(f"group {group}: bf16 {plain * 1e6:.0f} us, int4 {packed * 1e6:.0f} us, {plain / packed:.2f} times as fast")
    assert plain / packed >= 2
