"""`bench.host` compares times that were measured in the same round, and measures only the time inside layers. No
device: synchronization and subjects are replaced."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import host as bench_host
from bench.host import COUNT, ROUNDS, WARM, Inside, Turn, compared, in_turns, one_turn
from bench.linear_subjects import BASE


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_turns_are_interleaved_without_the_garbage_collector() -> None:
    ran: list[tuple[str, bool]] = []
    turns = {name: Turn(lambda name=name: ran.append((name, gc.isenabled()))) for name in ("a", "b")}  # type: ignore[misc]
    found = in_turns(turns, ROUNDS, one_turn)
    assert [name for name, _ in ran[:: WARM + COUNT]] == ["a", "b"] * (1 + ROUNDS)
    assert not any(enabled for _, enabled in ran) and gc.isenabled()
    assert [len(times) for times in found.values()] == [ROUNDS] * 2


def test_what_slows_a_round_does_not_move_the_ratio() -> None:
    slow = (1.0, 3.0, 1.0, 1.0, 2.0)
    costs = {BASE: 100.0, "fp8_block": 180.0}
    found = {name: [(factor * cost, 1000 + cost) for factor in slow] for name, cost in costs.items()}
    base, line = compared(found)
    assert (base.ratio, line.ratio, line.low, line.high) == (1.0, 1.8, 1.8, 1.8)
    assert (line.microseconds, line.whole) == (180.0, 1180.0)


class Slow(torch.autograd.Function):
    """Autograd function that takes 2 ms in forward and 3 ms in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.003)
        return grads[0]


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Slow.apply(x)
        return y


def test_the_clock_runs_inside_the_layer_only() -> None:
    layer, x = Layer(), torch.ones(2, requires_grad=True)
    inside = Inside(layer)

    def run() -> None:
        y = layer(x)
        time.sleep(0.01)  # in place of a collective
        y.register_hook(lambda grad: time.sleep(0.01))  # time in backward outside of the layer
        y.sum().backward()

    ((counts, whole),) = in_turns({"layer": Turn(run, inside)}, 1, one_turn)["layer"]
    assert 5000 < counts < 10_000 and whole > 25_000


class OnCpu:
    """Subject of `bench.linear_subjects` that needs no GPU."""

    def __init__(self, recipe: str, shape: tuple[int, int, int]) -> None:
        layer, self.x = nn.Linear(4, 4), torch.ones(4, 4)
        self.linear = layer if recipe == BASE else nn.Sequential(layer)

    def both(self) -> None:
        self.linear(self.x).sum().backward()

    iteration = both


def test_compiled_layers_are_compared_without_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(bench_host, "ROUNDS", 3)
    monkeypatch.setattr(bench_host, "Subject", OnCpu)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    lines = bench_host.compiled(["fp8_current"])
    assert [line.recipe for line in lines] == [BASE, "fp8_current"] and graphs
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("fp8_current") and "ok" not in row and "MISSED" not in row
