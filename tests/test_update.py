"""Skipped updates (spikes), compared with the same rule in plain Python."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from launch.config.run_config import load
from launch.settings.schema import ConfigError
from launch.training import gradient_norm as clipping
from launch.training import step_update
from launch.training.step_update import IN_A_ROW, KNOWN, WINDOW, SpikeFilter
from tests.refusals import refuses


def plainly(norms: list[float], factor: float) -> list[tuple[float, bool]]:
    """Return (limit, whether the step is skipped) for each norm, computed in plain Python."""
    known: list[float] = []
    found, row = [], 0
    for norm in norms:
        limit = factor * statistics.median_low(known[-WINDOW:]) if len(known) >= KNOWN else math.inf
        spike = norm > limit
        skips = spike and row < IN_A_ROW
        row = row + 1 if spike else 0
        if not skips:
            known.append(norm)
        found.append((limit, skips))
    return found


def skipped(norms: list[float], factor: float) -> list[tuple[float, bool]]:
    decides = SpikeFilter(factor, torch.device("cpu"))
    return [(limit.item(), bool(skips)) for limit, skips in (decides(torch.tensor(norm)) for norm in norms)]


def test_spikes_are_those_of_the_rule() -> None:
    draw = random.Random(0)
    norms = [torch.tensor(draw.lognormvariate(0, 0.3)).item() for _ in range(400)]
    for place in (5, KNOWN + 3, 150, 151, *range(200, 200 + IN_A_ROW + 3), 350):
        norms[place] *= 64
    found = skipped(norms, 4.0)
    expected = plainly(norms, 4.0)
    assert [skips for _, skips in found] == [skips for _, skips in expected]
    assert [limit for limit, _ in found] == pytest.approx([limit for limit, _ in expected])
    places = [place for place, (_, skips) in enumerate(found) if skips]
    assert places == [KNOWN + 3, 150, 151, *range(200, 200 + IN_A_ROW), 350], "neither early ones nor a sixth in a row"


def test_a_new_level_of_norms_is_taken() -> None:
    found = skipped([1.0] * 30 + [100.0] * 200, 4.0)
    assert sum(skips for _, skips in found) == IN_A_ROW and found[-1][0] == 400


def test_norms_that_are_not_finite_are_not_remembered() -> None:
    found = skipped([1.0] * KNOWN + [math.nan, math.inf, 1.0, 1.0], 4.0)
    assert [limit for limit, _ in found[KNOWN:]] == [4.0] * 4


def test_a_norm_that_is_known_to_be_bad_is_skipped_and_forgotten():
    decides = SpikeFilter(3.0, torch.device("cpu"))
    decides(torch.tensor(1.0))
    before = [value.nan_to_num(0.0) for value in decides.state().values()]
    _, skips = decides(torch.tensor(7.0), known_bad=True)
    assert skips and all(map(torch.equal, before, (value.nan_to_num(0.0) for value in decides.state().values())))
    assert SpikeFilter(0.0, torch.device("cpu"))(torch.tensor(7.0), known_bad=True)[1]


def test_without_a_factor_nothing_is_skipped_or_saved() -> None:
    assert not any(skips for _, skips in skipped([1.0] * 50 + [1e30], 0.0))
    assert SpikeFilter(0.0, torch.device("cpu")).state() == {} != SpikeFilter(2.0, torch.device("cpu")).state()


@pytest.mark.parametrize("value", ["1", "0.5", "-3"])
def test_a_factor_that_would_skip_half_of_all_steps_is_refused(value: str) -> None:
    with refuses(r"--train.skip_spikes|\[train\] skip_spikes: expected a number > 1, or 0, got", ConfigError):
        load("tiny", [f"--train.skip_spikes={value}"])


def test_gradients_are_divided_by_the_norm_over_the_clip_and_1e_6_more() -> None:
    """The optimizer divides gradients by `grad_scale`, which must be close to max(1, norm / clip). The constant that is
    added to the norm must not be larger than 1e-6, because it would shrink gradients with small norms."""

    class Sees(torch.optim.SGD):
        scales: list[float] = []

        def step(self, closure: Any = None) -> None:
            self.scales.append(self.grad_scale.item())

    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = Sees(model.parameters(), lr=1.0)
    for clip, gradient, norm in ((1.0, [3.0, 4.0], 5.0), (0.01, [0.03, 0.04], 0.05), (1.0, [0.3, 0.4], 0.5)):
        model.weight.grad = torch.tensor([gradient])
        with patch.object(clipping.dist, "get_world_size", lambda: 1):
            made = step_update.Update(model, optimizer, replace(load("tiny").train, clip=clip), torch.device("cpu"))
            norms = made()
        assert norms[0].item() == pytest.approx(norm)
        assert optimizer.scales[-1] == pytest.approx(max(1.0, norm / clip), rel=1e-4)
        assert model.weight.grad is None


def test_nothing_of_the_rule_waits_for_the_device() -> None:
    """The rule runs on meta tensors, which have no values. The rule therefore reads no value on the host."""
    decides = SpikeFilter(3.0, torch.device("meta"))
    limit, skips = decides(torch.ones((), device="meta"))
    assert limit.shape == skips.shape == () and step_update.IN_A_ROW == 5
