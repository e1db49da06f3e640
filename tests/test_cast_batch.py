"""Batches of casts: agreement on all amaxes of a group in one collective, predicted bytes, and casts into given outputs. No
ranks: a group is an object with a name and a size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dlp.parallel import casts
from dlp.parallel.casts import (
    BOTH,
    COLUMNWISE,
    NOBODY,
    ROWWISE,
    Cast,
    CastBatch,
    Read,
    cast_plan,
    make_casts,
    operand_shape,
)
from dlp.parallel.linear import quantize as operands
from dlp.parallel.style import STYLES
from dlp.quant import recipe as recipes
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.quantizer import Wrapped
from dlp.quant.recipe import both
from tests.cases import RECIPES
from tests.quantizers import assert_same
from tests.test_operands import FakeGroup, make_bound

QUANTIZER = CurrentScaling()
DP, TP = (FakeGroup(name) for name in ("dp_shard", "tp"))


class RecordingAgreement:
    """Replacement for `agree` that records (group, number of amaxes) and returns twice each amax, as if another rank
    had the double."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __call__(self, observed: list[Tensor], group: Any) -> list[Tensor]:
        self.calls.append((group.name, sum(amax.numel() for amax in observed)))
        return [2 * amax for amax in observed]

    def __enter__(self) -> list[tuple[str, int]]:
        self._patch = patch.object(casts, "agree", self)
        self._patch.start()
        return self.calls

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


def amax_of(made: Any) -> float:
    """Return the amax with which an operand was cast, from its scale."""
    return float(made.parts[1] * 448)


@pytest.mark.parametrize("make", [make_casts, lambda batch: CastBatch().make(batch)], ids=["once", "boundary"])
def test_a_batch_agrees_once_a_group_and_on_rows_first(make):
    """A batch of five casts, three with amaxes to agree over tp, and one (rows of a weight) with an amax to agree over
    dp_shard and tp. There is one agreement per group, first over dp_shard."""
    ones = torch.ones(32, 32)
    agreed, rows = Read(QUANTIZER, QUANTIZER, ((None, TP),) * 2), Read(QUANTIZER, None, ((DP, TP), NOBODY))
    alone = Read(None, QUANTIZER)
    with RecordingAgreement() as calls:
        made = make([Cast(agreed, ones), Cast(rows, ones), Cast(agreed, ones), Cast(agreed, ones), Cast(alone, ones)])
    assert calls == [("dp_shard", 1), ("tp", 4)], "one value serves both orientations of a read"
    assert [amax_of(row or col) for row, col in made] == pytest.approx([2, 4, 2, 2, 1])
    assert made[0][1] is not None and made[1][1] is None and made[4][0] is None


def test_a_group_of_one_rank_is_nobody():
    for size, calls_wanted in ((1, []), (2, [("mine", 1)])):
        with RecordingAgreement() as calls:
            bound = make_bound(STYLES["local", False], recipes.load("fp8_current"), FakeGroup("mine", size))
            operands.quantize(bound, "x", [torch.ones(32, 32)], BOTH)
        assert calls == calls_wanted


@pytest.mark.parametrize("scope", ["table", "all"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_what_a_plan_predicts_is_what_casts_agree_on(row, recipe, scope):
    loaded = recipes.load(recipe, amax_scope=scope)
    for tensor in ("x", "w", "dy"):
        for wanted in (ROWWISE, COLUMNWISE, BOTH):
            plan = cast_plan(row, loaded, tensor, wanted, 64)
            with RecordingAgreement() as calls:
                operands.quantize(make_bound(row, loaded), tensor, [torch.randn(64, 96)], wanted)
            assert sum(count for _, count in calls) == plan.numbers_agreed(torch.empty(64, 96, device="meta"))
            assert len(calls) <= 1


class OneByOne(Wrapped):
    """Quantizer that cannot cast both orientations in one call, and whose cast does not write
    into `out`, but returns new storage."""

    def cast(self, x: Tensor, amax: Tensor | None, **options: Any) -> Any:
        options.pop("out", None)  # the cast does not support `out`
        return self.inner.cast(x, amax, **options)


@pytest.mark.parametrize("given", [ROWWISE, COLUMNWISE, BOTH], ids=["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "derived"])
def test_operands_lie_where_they_were_leased(recipe, given):
    loaded = recipes.load("fp8_current" if recipe == "derived" else recipe)
    if recipe == "derived":
        loaded = replace(loaded, x=both(OneByOne(QUANTIZER)))
    x = torch.randn(128, 256, dtype=torch.bfloat16)

    def quantized(into: Any) -> Any:
        return operands.quantize(make_bound(STYLES["local", False], loaded), "x", [x], BOTH, into=into)[0]

    expected = quantized((None, None))
    leases = tuple(q.format.empty(q.shape, dtype=x.dtype, device=x.device) for q in expected)
    found = quantized(tuple(lease if wanted else None for lease, wanted in zip(leases, given, strict=True)))
    for lease, made, alone, wanted in zip(leases, found, expected, given, strict=True):
        assert_same(made, alone)
        assert not wanted or [p.data_ptr() for p in made.parts] == [p.data_ptr() for p in lease.parts]


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_have_the_shape_that_is_said_of_them(recipe):
    """`operand_shape`, from which opaque ops, output buffers and predicted bytes are computed, is also right for sizes
    that are not multiples of a block."""
    loaded = recipes.load(recipe)
    for shape in ((40, 72), (64, 96), (1, 8)):
        (made,) = operands.quantize(make_bound(STYLES["local", False], loaded), "x", [torch.randn(shape)], BOTH)
        for columnwise in (False, True):
            assert made.at(columnwise).shape == operand_shape(loaded, "x", shape, columnwise)
