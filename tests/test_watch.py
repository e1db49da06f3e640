"""The time limit of a stream that waits for a peer, with a clock that only these tests advance."""

from __future__ import annotations

from typing import Any

import pytest

from dlp.comm import slots, watch
from dlp.comm.watch import Watch

WAITS = "transfer 1 of up in forward, a slot of 65536 bytes: rank 0 waits for rank 1, which has not sent its part"


class Waits:
    """Stand-in for a transport. `now`: the current waits; `asked`: how often the watch has read them."""

    def __init__(self) -> None:
        self.now, self.asked = [WAITS], 0

    def waits(self, *, own: bool) -> list[str]:
        assert own
        self.asked += 1
        return list(self.now)


@pytest.fixture
def looks(monkeypatch) -> Any:
    """Return a function `run(waits, at)` that calls Watch.look every 10 s for 1200 s of simulated time. `run` returns
    the second at which the watch ends the process, and the reason; or None if the watch does not end the process.
    `at`: second -> new place of the main thread (str) or new waits (list)."""

    def run(waits: Waits, at: dict[int, str | list[str]]) -> tuple[int, str] | None:
        place, ended = ["wait (a.py:1)"], list[str]()
        monkeypatch.setattr(watch, "frame_of_main", lambda: (place[0], 7))
        looking = Watch(waits, ended.append)
        for second in range(0, 1201, 10):
            change = at.get(second)
            if isinstance(change, str):
                place[0] = change
            elif change is not None:
                waits.now = change
            if looking.look(waits, 1000.0 + second):
                return second, ended[0]
        return None

    return run


def test_a_rank_that_waits_for_too_long_says_for_whom_and_ends(looks):
    assert looks(Waits(), {}) == (
        600,
        f"no transfer has progressed for {slots.PATIENCE:g} s, in wait (a.py:1): {WAITS}",
    )


@pytest.mark.parametrize(
    "at", [{50: "step (a.py:2)"}, {590: "step (a.py:2)"}, {590: [WAITS + "!"]}, {590: []}], ids=str
)
def test_what_moves_has_its_time_anew(looks, at: dict[int, Any]):
    ((second, change),) = at.items()
    ended = looks(Waits(), at)
    if not change:
        assert ended is None, "without waits the process must not be ended"
    else:
        assert ended is not None and ended[0] == second + (600 if isinstance(change, str) else 300)


def test_nothing_is_read_while_a_program_moves(looks):
    waits = Waits()
    assert looks(waits, {second: f"step (a.py:{second})" for second in range(0, 1201, 290)}) is None
    assert waits.asked == 0


def test_its_thread_ends_with_what_it_watches():
    waits = Waits()
    looking = Watch(waits, lambda said: None)
    del waits
    assert looking._of() is None
    looking._run()
