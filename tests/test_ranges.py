"""Named ranges in a profile: ranges of layers on one and two ranks, and no ranges without a profiler or while launches
are recorded."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import profiler

import dlp
from dlp import ops
from dlp.kernels.ranges import named_range
from dlp.runtime import capture as captured
from tests import pool as worker
from tests.emulated import emulated  # noqa: F401
from tests.ops_models import Watched

PARTS = ("cast_x", "fprop", "cast_dy", "dgrad", "wgrad")
LOCAL = {f"Linear.{part}" for part in PARTS}


def step(layer: dlp.Linear) -> None:
    layer(torch.ones(32, 64, requires_grad=True)).sum().backward()


def profiled(layer: dlp.Linear) -> set[str]:
    with profiler.profile() as record:
        step(layer)
    return {event.name for event in record.function_events if event.name.startswith(type(layer).__name__)}


def test_a_profile_names_what_a_layer_does():
    layer = dlp.Linear(64, 64, recipe="fp8_current")
    step(layer)
    assert profiled(layer) == LOCAL


def in_a_fuser(model: nn.Module) -> set[str]:
    with profiler.profile() as record:
        x = torch.ones(128, 128, dtype=torch.bfloat16)
        model(x.clone().requires_grad_()).backward(x)
    return {event.name for event in record.function_events if event.name.startswith("blocks.")}


@pytest.mark.parametrize("watched", [False, True], ids=["", "one by one"])
def test_a_profile_names_what_the_linears_of_a_fuser_do(watched: bool):
    with Watched() if watched else nullcontext():
        found = in_a_fuser(block())
    names = {f"blocks.{linear}.{what}" for linear in ("0.1", "0.3") for what in PARTS}
    assert found == names


@pytest.mark.usefixtures("emulated")
def test_captured_directions_of_a_fuser_have_a_range_each():
    """The captured launches of a pass run as one call, so the pass has one range. The name of the range contains the
    names of the linears."""
    model = block()
    for _ in range(3):
        in_a_fuser(model)
    assert in_a_fuser(model) == {"blocks.0.1, blocks.0.3.forward", "blocks.0.1, blocks.0.3.backward"}
    assert "captured: forward" in str(model[0].plan())


def block() -> nn.Module:
    """Return an `nn.Sequential` of one `ops.Sequential`. It is a part of an attached model, so that the linears have
    names."""
    more = {"recipe": "fp8_current", "bias": False, "dtype": torch.bfloat16}
    inner = ops.Sequential(
        ops.RMSNorm(128), ops.Linear(128, (128, 128), **more), ops.SwiGLU(), ops.Linear(128, 128, **more)
    )
    model = nn.ModuleDict({"blocks": nn.Sequential(inner)})
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    return model["blocks"]


def test_a_range_is_no_launch_and_no_call():
    with captured._Watch(), profiler.profile(), named_range("up.fprop"):
        pass  # `_Watch` raises NotPlain if a range runs an operation of torch
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        with named_range("up.fprop"):
            pass
    finally:
        sys.setprofile(None)
    assert not calls


def with_ranks() -> set[str]:
    mesh = worker.mesh(tp=2)["tp"]
    return profiled(dlp.ColumnParallelLinear(64, 64, tp=mesh, sequence_parallel=True, recipe="fp8_current"))


@pytest.mark.ranks(2)
def test_transfers_are_named_too(ranks):
    for found in ranks(2).run(with_ranks):
        assert found == {f"ColumnParallel{name}" for name in (*LOCAL, "Linear.gather_x")}
