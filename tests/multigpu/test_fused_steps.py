"""The first fused step on sharded parameters runs no operation on the CPU in unsharded sizes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.tensor import Shard, distribute_tensor

import dlp
from dlp.comm.mesh import DP_SHARD
from tests import pool as worker


def first_step(name: str) -> list[str]:
    """Run a first optimizer step; return the operations that tracing with fake tensors executed on real tensors."""
    device = worker.device()
    mesh = dlp.build_mesh(device_type=device.type)
    model = nn.Sequential(nn.Linear(8, 8, bias=False, device=device))
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="bf16")], mesh)
    whole = torch.ones(8, 8, device=device)
    sharded = nn.Parameter(distribute_tensor(whole, mesh[DP_SHARD], [Shard(0)]))
    model.register_parameter("sharded", sharded)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=torch.tensor(0.5, device=device), fused=True)
    dlp.attach(model, optimizer)
    model(torch.randn(32, 8, device=device)).square().mean().backward()
    sharded.grad = distribute_tensor(whole, mesh[DP_SHARD], [Shard(0)])
    with patch.object(fake_tensor, "run_fallback_kernel", wraps=fake_tensor.run_fallback_kernel) as fallback:
        optimizer.step()
    assert sharded.full_tensor().max() < 0.6
    return [str(call.args[1]) for call in fallback.call_args_list]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_first_step_is_traced_and_not_run(ranks, name):
    assert ranks(2).run(first_step, name) == [[], []]
