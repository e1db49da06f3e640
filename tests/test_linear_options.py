"""Options of layers on one rank: `save_original_input`, `return_bias`, and when they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.quant.recipe import load
from tests.cases import RECIPES
from tests.metrics import assert_bit_equal, assert_close
from tests.refusals import refuses

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def layer(**options: Any) -> dlp.Linear:
    torch.manual_seed(0)
    return dlp.Linear(64, 128, True, **{"dtype": torch.bfloat16, **options})


def trained(made: dlp.Linear, x: Tensor = X) -> list[Tensor]:
    """y, dx, dw and db of two steps, so that delayed scales have changed."""
    model = nn.Sequential(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    found = []
    for scale in (1, 3):
        given = (x * scale).requires_grad_()
        y = model(given)
        if made.core.bias_apart:
            y, bias = y
            y = y + bias
        y.square().sum().backward()
        found += [y.detach(), given.grad, *[p.grad.clone() for p in made.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_that_is_kept_as_it_is_gives_the_same_bits(recipe):
    kept = layer(recipe=recipe, save_original_input=True)
    for got, expected in zip(trained(kept), trained(layer(recipe=recipe)), strict=True):
        assert_bit_equal(got, expected, recipe)
    given = X.clone().requires_grad_()
    memory = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: memory.add(t.data_ptr()) or t, lambda t: t):
        kept(given)
    assert given.data_ptr() in memory and len(memory) == 2, "forward saves only x and w"


def test_the_plan_says_what_x_takes_and_what_its_operand_took():
    group = dlp.LayerGroup("all", "0", recipe="fp8_current", save_original_input=True)
    (row,) = dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [group], 1).layers
    assert "x is saved in high precision, and quantized again in backward" in row.notes
    assert any("the quantized operand would take 1.00" in note for note in row.notes), row.notes


def test_bias_comes_beside_y_and_learns_from_who_adds_it():
    apart, inside = (trained(layer(return_bias=choice, dtype=torch.float32), X.float()) for choice in (True, False))
    for got, expected in zip(apart, inside, strict=True):
        assert_close(got, expected, 1e-6)
    made = layer(return_bias=True)
    y, bias = made(X)
    assert_bit_equal(y, X @ made.weight.t(), "y before the bias is added")
    assert_bit_equal(bias, made.bias, "the bias")
    assert bias.data_ptr() != made.bias.data_ptr(), "the bias is a copy, because FSDP may free the gathered bias"
    y.sum().backward()
    assert made.bias.grad is None
    (ys, biases) = dlp.Linear(64, (32, 16), False, return_bias=True)(X.float())
    assert [y.shape[1] for y in ys] == [32, 16] and biases == (None, None)


def test_both_choices_compiled():
    made = layer(recipe="fp8_current", return_bias=True, save_original_input=True)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(X), made(X), strict=True):
        assert_bit_equal(got, expected, "compiled")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"recipe": replace(load("fp8_current"), y=load("fp8_current").x.rowwise), "return_bias": True},
            "quantizes y, and return_bias",
        ),
    ],
)
def test_choices_that_exclude_each_other(choice, message):
    with pytest.raises(ValueError, match=message):
        layer(**choice)
    with pytest.raises(ValueError, match="0: .*" + message):
        dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [dlp.LayerGroup("all", "0", **choice)], 1)


def test_delayed_scales_without_a_step_boundary_have_no_second_cast():
    with refuses("scales of fp8_delayed differ between forward and backward, .* call dlp.attach"):
        layer(recipe="fp8_delayed", save_original_input=True)(X)


def test_layers_made_by_hand_return_what_they_were_made_to_return():
    model = nn.Sequential(dlp.Linear(64, 64))
    with pytest.raises(ValueError, match="constructed with return_bias = False"):
        dlp.make_plan(model, [dlp.LayerGroup("all", "0", return_bias=True)], 1)
    made = nn.Sequential(layer(recipe="fp8_current", save_original_input=True))
    (row,) = dlp.make_plan(made, [dlp.LayerGroup("all", "0", recipe="mxfp8")], 1).layers
    assert row.options.save_original_input and any(
        "the quantized operand would take 1.03" in note for note in row.notes
    )
