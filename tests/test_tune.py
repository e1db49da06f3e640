"""Plans by measured choices, with plans and measurements stood in for: no device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlp.kernels import gemms, tune


class Plan:
    def __init__(self, candidates: int = 0) -> None:
        self.choice, self.candidates = 0, candidates

    def choose(self, candidate: int) -> None:
        self.choice = candidate


def test_candidates_are_timed_in_turn_after_a_first_time_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[tuple[tuple[int, ...], int, bool], Plan] = {((7,), 0, True): Plan()}
    kept, timed = dict(table), list[int]()
    monkeypatch.setattr(gemms, "plans", lambda: table)
    monkeypatch.setattr(gemms, "new_plan", lambda *_: Plan(candidates=3))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def time_it(call: Callable[[], Tensor]) -> float:
        timed.append(table[(1,), 0, True].choice)
        return [3.0, 2.0, 1.0, 4.0][len(timed) - 1]

    found = tune.fastest(lambda: (table.setdefault(((1,), 0, True), Plan()), torch.zeros(()))[1], time_it)
    assert timed == [0, 0, 1, 2] and table == kept
    assert (found.words, found.times_ms, found.choice, found.best_ms) == ((1,), [2.0, 1.0, 4.0], 1, 1.0)


def test_calls_run_by_their_fastest_candidates_and_others_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = ((number,) for number in range(3))
    table = {(first, 0, True): Plan(), (other, 0, True): Plan()}
    monkeypatch.setattr(gemms, "plans", lambda: table)
    monkeypatch.setattr(gemms, "new_plan", lambda *_: Plan())
    result = torch.zeros(())

    def call_of(words: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: (table.setdefault((words, 0, True), Plan()), result)[1]

    calls, times = [call_of(first), call_of(second)], {first: [3.0, 2.99, 4.0], second: [2.0, 3.0, 1.0]}
    found = iter([tune.Fastest(words, times[words]) for words in (first, second)])
    monkeypatch.setattr(tune, "fastest", lambda call, timed: next(found))
    kept = dict(table)
    with tune.by_the_fastest(calls):
        assert {words: plan.choice for (words, _, _), plan in table.items()} == {first: 1, second: 2}
    assert table == kept and all(plan.choice == 0 for plan in kept.values())
