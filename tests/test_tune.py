"""Plans by measured choices, with plans and measurements stood in for: no device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlp.kernels import gemms, tune


class Plan:
    def __init__(self) -> None:
        self.choice = 0

    def choose(self, candidate: int) -> None:
        self.choice = candidate


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
    monkeypatch.setattr(tune, "fastest", lambda call: next(found))
    kept = dict(table)
    with tune.by_the_fastest(calls):
        assert {words: plan.choice for (words, _, _), plan in table.items()} == {first: 1, second: 2}
    assert table == kept and all(plan.choice == 0 for plan in kept.values())
