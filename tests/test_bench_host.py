"""`launch.bench_host` compares turns of one round, and FSDP2's own time falls out. No device: turns are stood in for."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import pytest
import torch

from launch import bench_host
from launch.linear_subjects import BASE


def test_turns_are_interleaved_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[tuple[str, bool]] = []
    runs = {name: lambda name=name: ran.append((name, gc.isenabled())) for name in ("a", "b")}  # type: ignore[misc]
    found = bench_host.in_turns(runs)
    timed = ran[2 * bench_host.WARM :]
    turns = [name for name, _ in timed[:: bench_host.COUNT]]
    assert turns == ["a", "b"] * bench_host.ROUNDS and not any(enabled for _, enabled in timed)
    assert gc.isenabled() and [len(times) for times in found.values()] == [bench_host.ROUNDS] * 2


def test_what_slows_a_round_does_not_move_the_excess(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (1.0, 3.0, 1.0, 1.0, 2.0)
    costs = {f"{BASE} alone": 100.0, BASE: 1100.0, "fp8_block": 1200.0}

    def in_turns(runs: Mapping[str, object]) -> dict[str, list[float]]:
        return {name: [factor * costs[name] for factor in slow] for name in runs}

    monkeypatch.setattr(bench_host, "in_turns", in_turns)
    monkeypatch.setattr(bench_host, "sharded", lambda recipe: None)
    monkeypatch.setattr(bench_host, "Subject", lambda recipe, shape: type("Subject", (), {"both": None})())
    base, line = bench_host.under_fsdp2(["fp8_block"])
    assert (base.ratio, line.ratio, line.low, line.high) == (1.0, 2.0, 2.0, 2.0)
    assert line.microseconds == 1200.0
