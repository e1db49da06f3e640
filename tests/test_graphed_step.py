"""`dlp.graphed_step`: which calls are eager, which calls are replayed, which calls are refused, and when a
graph is dropped.

The CPU simulates the graph; tests/gpu/test_graph.py and tests/multigpu/test_graph.py use real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dlp
from dlp.comm.mesh import shutdown
from dlp.parallel.model.boundary import schedule
from dlp.parallel.model.graph import WARM_UP, CapturedStep, GraphedStep, Replays, graphed_step
from tests.refusals import refuses


class SimulatedGraph:
    """Simulated graph: the constructor, which stands for the capture, runs nothing; each call is a replay and runs the
    work."""

    made = 0

    def __init__(self, work: Callable[[Any], Any], like: Any) -> None:
        SimulatedGraph.made += 1
        self._work = work

    def __call__(self, batch: Any) -> Any:
        return "replayed", self._work(batch)


def graphed(step: Callable[..., Any]) -> GraphedStep[Any]:
    """A graphed step on the CPU with a simulated graph."""
    made = GraphedStep.__new__(GraphedStep)
    made._step, made._like, made._replays, made._settings = step, (torch.zeros(2),), Replays([], None), []
    made._replays.capture = SimulatedGraph
    return made


def test_a_batch_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dlp.graphed_step: example_batch is on cpu, and a CUDA graph needs"):
        graphed_step(lambda x: x, (torch.zeros(2),))


def test_steps_are_eager_then_captured_once_then_replayed_and_a_reset_begins_anew() -> None:
    SimulatedGraph.made = 0
    run = graphed(lambda x: x.sum())
    kinds = [isinstance(run(torch.ones(2)), tuple) for _ in range(WARM_UP + 3)]
    assert kinds == [False] * WARM_UP + [True] * 3 and SimulatedGraph.made == 1 and run.captured
    run.reset()
    assert not run.captured and not isinstance(run(torch.ones(2)), tuple)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield dlp.build_mesh(device_type="cpu")
    shutdown()


def training(rate: Any, mesh: DeviceMesh) -> tuple[GraphedStep[Any], Any, nn.Module]:
    model = nn.Sequential(nn.Linear(16, 16))
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    dlp.attach(model, optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return graphed(step), optimizer, model


def test_a_scheduled_recipe_change_is_an_eager_step_and_the_graph_is_dropped(mesh: DeviceMesh) -> None:
    run, _, model = training(torch.tensor(1e-3), mesh)
    schedule(model, ["0"], WARM_UP + 2, "bf16")
    with patch.object(SimulatedGraph, "made", 0):
        kinds = [isinstance(run(torch.ones(4, 16)), tuple) for _ in range(2 * WARM_UP + 4)]
        eager = [False] * WARM_UP
        assert kinds == [*eager, True, False, *eager, True, True] and SimulatedGraph.made == 2
    assert str(model[0].core.spec.recipe) == "bf16"


def test_a_rate_that_is_a_number_and_changes_is_refused(mesh: DeviceMesh) -> None:
    run, optimizer, _ = training(1e-3, mesh)
    for _ in range(WARM_UP + 2):
        run(torch.ones(4, 16))
    optimizer.param_groups[0]["lr"] = 2e-3
    with pytest.raises(
        ValueError, match=r"^dlp.graphed_step: the graph holds lr = 0.001, and the optimizer now has 0.002: "
    ):
        run(torch.ones(4, 16))
    run.reset()
    run(torch.ones(4, 16))


def test_momentum_that_a_schedule_changes_is_refused(mesh: DeviceMesh) -> None:
    run, optimizer, _ = training(torch.tensor(1e-3), mesh)
    for _ in range(WARM_UP + 2):
        run(torch.ones(4, 16))
    optimizer.param_groups[0]["initial_lr"] = 1e-3  # an entry of a scheduler, which the optimizer does not read
    run(torch.ones(4, 16))
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(
        ValueError, match=r"^dlp.graphed_step: the graph holds momentum = 0, and the optimizer now has 0.5"
    ):
        run(torch.ones(4, 16))


def test_a_batch_of_another_shape_is_refused() -> None:
    captured = CapturedStep.__new__(CapturedStep)
    captured._leaves, captured._form = torch.utils._pytree.tree_flatten((torch.zeros(2, 3), 1))
    with refuses(r"^a captured step accepts only batches like the batch of the capture, torch.float32 \(2, 3\), 1; "):
        captured((torch.zeros(1, 3), 1))
