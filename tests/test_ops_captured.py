"""A whole fuser as captured launches, on an emulated device: the bits of its ops, and one native call a direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp import ops
from dlp.ops.captured import Recorded
from tests.emulated import emulated  # noqa: F401
from tests.twins import K, M, Twins, forward_backward

pytestmark = pytest.mark.usefixtures("emulated")


def mlp(recipe: str) -> nn.Module:
    return ops.Sequential(
        ops.RMSNorm(K),
        ops.Linear(K, (K, K), bias=False, recipe=recipe),
        ops.SwiGLU(),
        ops.Linear(K, K, bias=False, recipe=recipe),
    )


def slow_twins(recipe: str, **options: Any) -> Twins:
    """Whose weights hardly move: two layers of random gradients blow up."""
    twins = Twins(lambda: mlp(recipe), **options)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-4
    return twins


def recorded(model: nn.Module) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for plan in model._groups_now()[0].plans.values():
        for direction in plan.captured:
            found.setdefault(direction.name, []).extend(direction.found.values())
    return found


@pytest.mark.parametrize("attached", [True, False], ids=["cast at the boundary", "cast at use"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
def test_captured_ops_give_the_bits_of_the_ops(recipe: str, attached: bool):
    twins = slow_twins(recipe, attached=attached)
    twins.model[0][0].weight.data = twins.model[0][0].weight.data.float()
    twins.other[0][0].weight.data = twins.other[0][0].weight.data.float()
    for seed in range(5):
        twins.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(twins.model[0])
    for direction in ("forward", "backward"):
        assert any(isinstance(made, Recorded) for made in found[direction]), found[direction]


def test_a_swap_forgets_what_was_captured():
    twins = slow_twins("fp8_delayed")
    for seed in range(8):
        if seed == 4:
            for model in (twins.model, twins.other):
                dlp.set_recipe(model, "**", {"name": "fp8_delayed", "margin": 1})
        twins.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    assert torch.isfinite(twins.model[0][1].weight_0).all()


SLOW_ACTS = [pytest.param(act, marks=pytest.mark.slow) for act in ("relu", "srelu", "silu", "reglu", "glu")]


@pytest.mark.parametrize("act", ["gelu", "geglu", *SLOW_ACTS])
def test_activations_are_launched_with_the_rest(act: str):
    def make() -> nn.Module:
        return ops.LayerNormMLP(K, K, bias=False, normalization="RMSNorm", activation=act, recipe="fp8_current")

    twins = Twins(make)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-5
    for model in (twins.model, twins.other):
        model[0][0].weight.data = model[0][0].weight.data.float()
    for seed in range(4):
        twins.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(twins.model[0])
    assert all(any(isinstance(made, Recorded) for made in found[way]) for way in ("forward", "backward")), found
