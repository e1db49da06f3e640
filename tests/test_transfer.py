"""Transfers of a `LinearPlan` follow from recipe, style, tp size and number of tokens. No process group is needed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dlp
from dlp.kernels.ops import Produced, RmsNormed
from dlp.parallel.linear.functional import linear_forward
from dlp.parallel.linear.plan import Gathered, Reduction, Result, linear_plan, x_tokens_of
from dlp.parallel.style import COLUMN, COLUMN_SP, LOCAL, ROW, ROW_SP, STYLES
from dlp.quant import recipe as recipes
from tests.cases import RECIPES
from tests.emulated import emulation


def test_what_a_column_parallel_layer_sends_of_x():
    plan = linear_plan(recipes.load("fp8_current"), COLUMN_SP, 2, 128)
    assert (plan.tokens, plan.y_tokens, plan.kept) == (128, 256, "rowwise")
    assert plan.x[False].gathers == (Gathered("fprop", False, leased=True),)
    assert plan.x[True].gathers == (Gathered("fprop", False, leased=False),), (
        "a saved shard must not be a view of the gathered buffer"
    )
    assert plan.x_again.gathers == (Gathered("wgrad", False),) and plan.x_again.cast_before == (False, False)
    assert plan.dys[True, True].cast_before == (True, True) and plan.dys[True, True].gathers == ()
    assert (plan.fprop, plan.dgrad) == (None, Reduction("scatter", "hp"))


def test_what_a_row_parallel_layer_sends_of_dy():
    plan = linear_plan(recipes.load("fp8_block"), ROW_SP, 2, 512)
    assert plan.y_tokens == 256 and plan.kept == "columnwise" and plan.x[True].cast_before == (True, True)
    assert plan.dys[True, True].gathers == (Gathered("dgrad", False, True), Gathered("wgrad", True, True))
    assert plan.dys[True, False].gathers == (Gathered("dgrad", False, True),)
    assert plan.dys[False, False].gathers == () and plan.dys[False, False].cast_before == (False, False)
    assert (plan.fprop, plan.dgrad) == (Reduction("scatter", "hp"), None)


def test_values_travel_where_shards_do_not_concatenate():
    plan = linear_plan(recipes.load("fp8_block"), ROW_SP, 2, 200)  # 100 tokens of dy per rank, in blocks of 128
    route = plan.dys[True, True]
    assert route.cast_before == (True, False) and route.cast_after == (False, True)
    assert route.gathers == (Gathered("dgrad", False, True), Gathered("wgrad", None))
    assert route.reasons[0] is None and "100 tokens per rank are not a multiple of 128" in str(route.reasons[1])
    whole = linear_plan(replace(recipes.load("fp8_block"), gather_dy="high_precision"), ROW_SP, 2, 512).dys[True, True]
    assert whole.gathers == (Gathered("dgrad", None),) and whole.cast_after == (True, True), "one transfer for both"


def test_a_rank_alone_reduces_nothing():
    for style in (COLUMN, ROW):
        alone, two = (linear_plan(recipes.load("bf16"), style, tp, 64) for tp in (1, 2))
        assert (alone.fprop, alone.dgrad) == (None, None) and (two.fprop, two.dgrad) != (None, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_style_has_a_plan_for_every_recipe(recipe):
    for style in STYLES.values():
        for tokens in (None, 16, 96, 128, 1024):
            plan = linear_plan(recipes.load(recipe), style, 2, tokens)
            gathered = {each.gemm for route in (*plan.x, plan.x_again, *plan.dys.values()) for each in route.gathers}
            wanted = {"x": {"fprop", "wgrad"}, "dy": {"dgrad", "wgrad"}, None: set()}[style.gathers]
            assert gathered <= wanted and bool(gathered) == bool(wanted)
            assert x_tokens_of(style, 2, plan.y_tokens) == plan.tokens
            if tokens is None:  # an unknown number of tokens counts as a multiple of every block
                assert all(
                    why is None for route in (*plan.x, plan.x_again, *plan.dys.values()) for why in route.reasons
                )
    assert linear_plan(recipes.load(recipe), LOCAL, 1, 64).kept in ("values", "columnwise")


def test_who_agrees_is_part_of_the_plan():
    """By default ranks agree only on scales of x in COLUMN_SP and of dy in ROW_SP, if the scales span a dimension
    that is sharded over tp. With a user-defined amax group, ranks agree for all operands, also for casts after a
    gather."""
    recipe = recipes.load("fp8_current")
    column, row = (linear_plan(recipe, style, 2, 128) for style in (COLUMN_SP, ROW_SP))
    assert column.x[True].before.agreed == row.dys[True, True].before.agreed == (True, True)
    assert column.dys[True, True].before.agreed == row.x[True].before.agreed == (False, False)
    arriving = linear_plan(recipes.load("fp8_block"), ROW_SP, 2, 200)
    route = arriving.dys[True, True]
    assert not any(route.after.agreed) and route.after.whole
    own = linear_plan(recipes.load("fp8_block"), ROW_SP, 2, 200, own_group=True).dys[True, True]
    assert all(own.before.agreed) and all(own.after.agreed)


@pytest.mark.parametrize(
    ("recipe", "device"), [*[(recipe, "CPU") for recipe in RECIPES], ("fp8_block", "Hopper, emulated")]
)
def test_a_plan_says_what_forward_returns_and_keeps(recipe, device):
    """The plan states shapes and strides of returned and saved tensors, including the layout of scales. Compiled code
    checks these shapes and strides."""
    with emulation() if device != "CPU" else nullcontext():
        for shape in ((96, 160), (2, 33, 160)):
            layer, x = dlp.Linear(160, 64, recipe=recipe, dtype=torch.bfloat16), torch.randn(shape).bfloat16()
            plan, given = layer.core.bound.plan(x.numel() // 160), Result(x.shape, x.dtype)
            still_to_be_made = Produced(RmsNormed(x.reshape(-1, 160), torch.ones(160), 1e-5), shape)
            for values in (x, still_to_be_made):
                ys, kept = linear_forward(layer.core.bound, values, [layer.weight.detach()], [None], (), True, True)
                assert [Result(y.shape, y.dtype) for y in ys] == [plan.y(given, 64)]
                promised = plan.saved(x) or [x.reshape(-1, 160)] * (values is still_to_be_made)
                assert [alike(part) for part in kept] == [alike(part) for part in promised]
            assert plan.dx(160, x.dtype) == Result((x.numel() // 160, 160), x.dtype)


def alike(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
