"""Copies and pickles of layers on one rank, and layers whose first forward runs in inference mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.state import bound_of
from tests.metrics import assert_bit_equal

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda made: pickle.loads(pickle.dumps(made))}


def values(seed: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    ys = []
    for step in steps:
        ys.append(model(values(step) * 2**step))
        ys[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ys


def attached(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dlp.attach(model, optimizer)
    return optimizer


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("again", WAYS.values(), ids=WAYS.keys())
def test_a_copy_goes_on_as_its_original(again: Callable[[nn.Module], nn.Module], recipe):
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(64, 64, recipe=recipe))
    optimizer = attached(model)
    trained(model, optimizer, range(3))
    other = again(model)
    bound = other[0].core.bound
    # Compiled code looks up the object by this id
    assert bound is not model[0].core.bound and bound_of(bound.spec_id) is bound
    with torch.no_grad():
        assert_bit_equal(other(values(9)), model(values(9)))
    pairs = zip(trained(other, attached(other), range(3, 6)), trained(model, optimizer, range(3, 6)), strict=True)
    for got, expected in pairs:
        assert_bit_equal(got, expected)


@pytest.mark.parametrize("again", WAYS.values(), ids=WAYS.keys())
def test_a_copy_of_an_attached_model_casts_the_weights_it_has(again: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(dlp.Linear(64, 64, recipe="fp8_current"))
    trained(model, attached(model), range(2))
    other = again(model)
    other(values(0))
    dlp.end_step(other)  # must not cast weights: without an optimizer nothing would cast them again
    with torch.no_grad():
        other[0].weight.mul_(2)
        assert_bit_equal(other(values(0)), 2 * model(values(0)))


@pytest.mark.parametrize("again", WAYS.values(), ids=WAYS.keys())
def test_a_copy_notices_an_optimizer_that_is_not_attached(again: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(*(dlp.Linear(64, 64, recipe="fp8_current") for _ in range(2)))
    trained(model, attached(model), range(2))
    other = again(model)
    trained(other, attached(other), range(2))
    fused = torch.optim.AdamW(other[1].parameters(), lr=1e-1, fused=True)  # does not increment version counters
    trained(other, fused, range(2))
    y = other(values(9))
    dlp.end_step(other)
    assert_bit_equal(y, other(values(9)))


def test_a_copy_of_held_weights_holds_its_own():
    with dlp.quantized_model_init(recipe="fp8_current"):
        layer = dlp.Linear(64, 64)
    other = copy.deepcopy(layer)
    assert_bit_equal(other(values(0)), layer(values(0)))
    assert other.weight.isnan().all() and other.weight.untyped_storage().size() == 4, (
        "the copied placeholder has memory"
    )
    before = layer(values(0))
    other.load_state_dict({"weight": torch.ones(64, 64)})
    assert_bit_equal(layer(values(0)), before)
    assert not torch.equal(other(values(0)), before)


@pytest.mark.parametrize("first", ["layer", "region", "boundary"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "nvfp4"])
def test_a_first_forward_in_inference_mode_leaves_tensors_that_training_can_write(recipe, first):
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(64, 64, recipe=recipe))
    plain = copy.deepcopy(model)
    optimizers = [attached(each) for each in (model, plain)]
    with torch.no_grad():
        model(values(0)) if first == "boundary" else None
    with torch.inference_mode():
        if first == "region":
            with dlp.autocast():
                model(values(0))
        elif first == "boundary":
            dlp.end_step(model)
        else:
            model(values(0))
    pairs = [trained(*each, range(3)) for each in zip((model, plain), optimizers, strict=True)]
    for got, expected in zip(*pairs, strict=True):
        assert_bit_equal(got, expected)
