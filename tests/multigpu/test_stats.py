"""Statistics of casts: correct values over all ranks, only of the chosen layers, and without a change of bits in the
results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.modules import Linear
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.quantizer import Origin
from dlp.quant.recipe import OPERANDS, load
from dlp.quant.stats import StatsTable, measured, plain, summary
from tests import pool as worker
from tests.cases import RECIPES, matrix
from tests.metrics import assert_bit_equal, sqnr
from tests.net import net, train, weights

QUANTIZED = [name for name in RECIPES if name != "bf16"]


def model(recipe: Any = "fp8_current") -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(Linear(32, 32, recipe=dlp.recipe(recipe)) for _ in range(2)))
    made.optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    dlp.attach(made, made.optimizer)
    return made


def step(made: nn.Module, x: Tensor) -> None:
    made(x).square().mean().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()


def test_the_numbers_of_a_cast_that_is_known():
    quantizer, table = CurrentScaling(), StatsTable(["l.x"], torch.device("cpu"))
    recipe = measured(load("fp8_current"), "l", table)
    x = torch.tensor([[448.0, 1.0, 0.0, 2.0**-12], [3.3, -448.0, 2.0**-11, 0.0]])
    made = recipe.x.rowwise.cast(x, recipe.x.rowwise.observe(x))
    assert_bit_equal(made.payload, quantizer.cast(x, quantizer.observe(x)).payload)
    found = summary(table.sums[0], table.maxima[0])
    assert (found["amax"], found["scale_inv"], found["saturation"]) == (448.0, 1.0, 0.0)
    assert found["underflow"] == 2 / 6, "two of six elements that are not 0"
    assert found["sqnr_db"] == pytest.approx(sqnr(made.dequantize(), x), rel=1e-6)
    recipe.x.rowwise.cast(4 * x, torch.tensor(448.0))  # a scale that is too large
    found = summary(table.sums[0], table.maxima[0])
    assert found["amax"] == 4 * 448 and found["saturation"] == 2 / 12, "of both casts"


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe_is_measured_and_measuring_changes_no_bit(name):
    recipe, table = (
        load(name),
        StatsTable([f"l.{o}{s}" for o in OPERANDS for s in ("", ".rowwise", ".columnwise")], torch.device("cpu")),
    )
    wrapped = measured(recipe, "l", table)
    assert plain(wrapped) == recipe and wrapped != recipe
    x = matrix("gauss", 128, 128, 1)
    for operand in OPERANDS:
        assert getattr(wrapped, operand).derived == getattr(recipe, operand).derived
        bits = []
        for made in (wrapped, recipe):
            quantizer = getattr(made, operand).rowwise
            at = Origin(0, 0, 128, 128, 0, 0, torch.zeros((), dtype=torch.int64))
            slot = dlp.quant.quantizer.ScaleSlot(torch.tensor(8.0), torch.zeros(()))
            bits.append(quantizer.cast(x, quantizer.observe(x), slot=slot, at=at).parts)
        for a, b in zip(*bits, strict=True):
            assert_bit_equal(a, b)
    for name_of, row in table.names.items():
        found = summary(table.sums[row], table.maxima[row])
        if found["amax"]:
            assert 8 < found["sqnr_db"] < 45 and 0 <= found["underflow"] < 0.15, (name_of, found)
            assert found["scale_inv"] > 0 and 0 <= found["saturation"] < 0.05, (name_of, found)


def test_only_chosen_layers_of_training_steps_are_recorded():
    made, x = model(), torch.randn(32, 32)
    assert dlp.record_stats(made, "1") == ["1"]
    step(made, x)
    first = dlp.read_stats(made)
    assert set(first) == {"1.x", "1.w", "1.dy"}
    with torch.no_grad():
        made(1000 * x)
    step(made, x)
    assert dlp.read_stats(made) == first, "the same step again: evaluation in between does not count"
    assert first["1.w"]["amax"] == pytest.approx(made[1].weight.abs().amax().item())
    dlp.set_recipe(made, "1", "mxfp8")
    step(made, x)
    assert set(dlp.read_stats(made)) >= {"1.x.rowwise", "1.x.columnwise", "1.dy.rowwise"}
    dlp.record_stats(made)
    step(made, x)
    assert dlp.read_stats(made) == {}
    with pytest.raises(ValueError, match="^record_stats: pattern '7' matches no layer"):
        dlp.record_stats(made, "7")


def test_a_second_optimizer_keeps_statistics_and_flags_of_the_step():
    torch.manual_seed(0)
    made = nn.Sequential(*(Linear(32, 32, recipe=dlp.recipe("fp8_current")) for _ in range(2)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in made]
    for optimizer in optimizers:
        dlp.attach(made, optimizer, on_nonfinite="ignore")
    dlp.record_stats(made, "**")
    for x in (torch.randn(32, 32), torch.full((32, 32), torch.inf)):
        made(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        dlp.end_step(made)  # after a change of weights outside of the optimizers
        assert {"0.x", "0.dy", "1.x", "1.dy"} <= set(dlp.read_stats(made))
    assert "x of 0" in dlp.not_finite(made)


def test_delayed_scales_that_lag_show_as_saturation():
    made = model("fp8_delayed")
    dlp.record_stats(made, "0")
    step(made, torch.ones(32, 32))
    step(made, torch.full((32, 32), 2.0))
    assert dlp.read_stats(made)["0.x"]["saturation"] == 1.0
    step(made, torch.full((32, 32), 2.0))
    assert dlp.read_stats(made)["0.x"]["saturation"] == 0.0


def measured_run(sizes: dict[str, int], stats: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    mesh = worker.mesh(**sizes)
    made = net("fp8_current", mesh, fsdp="dp_shard" in sizes, amax_group="world")
    if stats:
        dlp.record_stats(made, "blocks.0.**")
    train(made, mesh, range(2))
    return dlp.read_stats(made), weights(made)


@pytest.mark.ranks(4)
def test_numbers_are_those_of_all_ranks_and_training_is_the_same(ranks):
    ((one, _),) = ranks(1).run(measured_run, {"tp": 1}, True)
    assert set(one) == {f"blocks.0.{layer}.{t}" for layer in ("gate", "down") for t in ("x", "w", "dy")}
    sizes = {"tp": 2, "dp_shard": 2}
    for (found, after), (_, plainly) in zip(
        ranks(4).run(measured_run, sizes, True), ranks(4).run(measured_run, sizes, False), strict=True
    ):
        for name in after:
            assert_bit_equal(after[name], plainly[name], name)
        for name, numbers in one.items():
            assert math.isclose(found[name]["sqnr_db"], numbers["sqnr_db"], rel_tol=0.02), name
            # Under FSDP, which averages gradients over two ranks, the test doubles the loss, so dy is twice as large
            factor = 2 if name.endswith("dy") else 1
            assert math.isclose(found[name]["amax"], factor * numbers["amax"], rel_tol=0.02), name
