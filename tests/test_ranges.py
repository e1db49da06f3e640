"""Ranges by name in a profile: what a layer does, on one or two ranks; none where nobody profiles, or launches are captured."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.autograd import profiler

import dlp
from dlp.kernels import captured
from dlp.kernels.ranges import named_range
from tests import pool as worker

LOCAL = {"Linear.cast_x", "Linear.fprop", "Linear.cast_dy", "Linear.dgrad", "Linear.wgrad"}


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


def test_a_range_is_no_launch_and_no_call():
    with captured._Watch(), profiler.profile(), named_range("up.fprop"):
        pass  # NotPlain, were it an operation
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
