"""Casts on a GPU report non-finite values without waiting for the device: in captured launches, in batches of weights
and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.model.checks import ALWAYS
from tests.paired_models import K, M, check_used, values

BAD = ALWAYS + 2  # the step with the Inf; the first ALWAYS steps have a check that waits for the device


def layer(recipe: str, device: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(dlp.Linear(K, K, recipe=recipe)).bfloat16().to(device)
    model.optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    dlp.attach(model, model.optimizer)
    return model


def step(model: Any, x: Tensor, dy: Tensor) -> None:
    model(x.requires_grad_()).backward(dy)
    model.optimizer.step()
    model.optimizer.zero_grad()


@pytest.mark.parametrize("into", ["x", "dy", "w"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_programs_and_batches_of_weights_tell_without_waiting(device, recipe: str, into: str):
    model = layer(recipe, device)
    given = [values(seed, M, K).to(device) for seed in (1, 2)]
    for _ in range(BAD - 1):
        step(model, *[x.clone() for x in given])
    check_used(model, "forward", "backward")
    bad = [x.clone() for x in given]
    if into == "w":
        model[0].weight.data[77, 200] = torch.inf
        dlp.end_step(model)
    else:
        bad[into == "dy"][200, 100] = -torch.inf
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, *bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = f"^step {BAD}: {into} of 0 held a NaN or Inf when it was cast on rank 0, "
    with pytest.raises(FloatingPointError, match=found):
        step(model, *[x.clone() for x in given])


def test_a_captured_step_is_asked(device):
    model = layer("fp8_current", device)
    x, dy = (values(seed, M, K).to(device) for seed in (1, 2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, x, dy)
            x.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(model, x, dy)
    graph.replay()
    assert dlp.not_finite(model) == []
    x.data[3, 3] = torch.nan
    graph.replay()
    assert "x of 0" in dlp.not_finite(model)
