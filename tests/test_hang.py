"""Hanging runs: the time that each rank may take, with a clock that only these tests advance."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch.distributed as dist

from launch.config.sections import Run
from launch.ranks import hang_watch
from launch.ranks.hang_watch import HangWatch, Place

AFTER = next(each.default for each in fields(Run) if each.name == "hang_after")


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def time(self) -> float:
        return self.now


@pytest.fixture
def found(monkeypatch) -> Any:
    """Return a function: `found(*places, jump=0.0)` simulates two ranks that do not leave the given places. It returns
    (seconds until the run is ended, message), or None if the run is not ended within 600 s. `jump`: seconds by which the
    clock jumps after 20 s."""
    clock = Clock()
    monkeypatch.setattr(hang_watch, "time", clock)
    monkeypatch.setattr(hang_watch, "frame_of_main", lambda: ("read (trainer.py:1)", 7))
    monkeypatch.setattr(hang_watch.dist, "get_world_size", lambda: 2)

    def after(*places: Place, jump: float = 0.0) -> tuple[float, list[str]] | None:
        store, watches = dist.HashStore(), []
        for rank, place in enumerate(places):
            monkeypatch.setattr(hang_watch.dist, "get_rank", lambda rank=rank: rank)
            watches.append(HangWatch(store, AFTER, lambda place=place: place, lambda told: None, lambda: ["it waits"]))
        for seconds in range(600):
            told = [watch.look() for watch in watches]
            if any(told):
                return seconds, next(filter(None, told))
            clock.now += 1 + jump * (seconds == 20)
        return None

    return after


STEP = Place("step 7, last layer up in forward", slow=False, step=0.5)


def test_a_run_that_stands_in_a_step_is_found_within_a_minute(found):
    seconds, told = found(STEP, STEP)
    assert AFTER <= seconds and seconds + hang_watch.READING <= 60
    assert told == [
        f"rank {rank}: {STEP.text}, in read (trainer.py:1), for {seconds:.0f} s; it waits" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("place", "least"),
    [(STEP._replace(slow=True), 300), (STEP._replace(step=90), 270)],
    ids=["it compiles, saves, validates or reads", "the step before took 90 s"],
)
def test_who_may_take_longer_is_waited_for(found, place, least):
    seconds, _ = found(STEP, place)
    assert least <= seconds <= least + 10


@pytest.mark.parametrize("jump", [3600.0, -3600.0], ids=["set forward, or all were stopped", "set back"])
def test_a_clock_that_jumps_ends_no_run_and_hides_no_hang(found, jump):
    seconds, told = found(STEP, STEP, jump=jump)
    assert 20 + AFTER <= seconds <= 20 + AFTER + 5
    assert all(f"for {AFTER:.0f} s" in line or f"for {AFTER + 1:.0f} s" in line for line in told), told
