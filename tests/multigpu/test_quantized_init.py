"""Layers with quantized-only weights: results, memory, training, saving and loading."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dlp
from dlp.parallel.model.boundary import recipes_of
from tests import pool as worker
from tests.cases import RECIPES
from tests.metrics import assert_bit_equal, relative_error

HELD = [recipe for recipe in RECIPES if recipe not in ("bf16", "fp8_delayed")]


def mlp(recipe: str = "bf16", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"recipe": recipe, "dtype": dtype}
    return nn.Sequential(dlp.Linear(64, 128, True, **options), nn.ReLU(), dlp.Linear(128, 64, **options))


def held(recipe: str, preserve: bool = False) -> nn.Sequential:
    with dlp.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return mlp()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("recipe", HELD)
def test_held_weights_compute_what_cast_ones_do(recipe):
    plain, quantized = mlp(recipe), held(recipe)
    assert recipes_of(quantized) == {"0": recipe, "2": recipe}
    for model in (plain, quantized):
        model.y = model(batch())
        model.y.square().sum().backward()
    assert_bit_equal(quantized.y, plain.y)
    for (name, expected), (_, found) in zip(plain.named_parameters(), quantized.named_parameters(), strict=True):
        assert_bit_equal(found.grad, expected.grad, name)
    assert quantized[0].weight.isnan().all(), "nobody reads the placeholder unnoticed"


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors of a model. Memory that tensors share is counted once."""
    cores = [module.core for module in model.modules() if hasattr(module, "core")]
    parts = [*model.parameters(), *(part for core in cores for weight in core.weights for part in weight.parts)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


@pytest.mark.parametrize(("recipe", "most"), [("fp8_current", 1.01), ("mxfp8", 1.05), ("nvfp4", 0.52)])
def test_memory_is_that_of_two_orientations_of_codes(recipe, most):
    """`most`: largest allowed bytes of the model, relative to the same model with bf16 weights before any cast."""
    gc.collect()
    share = resident_bytes(held(recipe)) / resident_bytes(mlp())
    assert share <= most, share


@pytest.mark.parametrize("preserve", [True, False])
def test_steps_on_master_weights(preserve):
    model, plain = held("fp8_current", preserve), mlp("fp8_current", torch.bfloat16)
    optimizer = dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, lr=2**-10))
    dlp.attach(model, optimizer)
    masters = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert [m.dtype for m in masters] == [torch.float32, torch.bfloat16, torch.float32]
    equal = torch.equal(masters[0], plain[0].weight.float())
    assert equal == preserve, "the values that were quantized, or what codes say of them"
    model(batch()).square().sum().backward()
    gradient = model[0].weight.grad.float()
    optimizer.step()
    assert [p.grad is None for p in optimizer.param_groups[0]["params"]] == [True, False, True], "masters' are used up"
    optimizer.zero_grad()
    expected = masters[0] - 2**-10 * gradient
    assert_bit_equal(optimizer.param_groups[0]["params"][0].detach(), expected)
    quantizer = model[0].core.spec.recipe.w.rowwise
    rounded = expected.bfloat16()
    assert_bit_equal(model[0].core.weights.parts.parts[0], quantizer.cast(rounded, quantizer.observe(rounded)).payload)
    losses = []
    for _ in range(20):
        losses.append(model(batch()).square().sum())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_state_dicts_hold_values():
    model, other = held("mxfp8"), mlp("mxfp8")
    state = model.state_dict()
    assert not any(value.isnan().any() for value in state.values())
    assert relative_error(state["0.weight"], other[0].weight) < 0.05
    y = model(batch())
    with torch.no_grad():
        other[0].weight.mul_(2)
    model.load_state_dict(other.state_dict())
    assert_bit_equal(model(batch()), other(batch()))
    model.load_state_dict(state)
    assert_bit_equal(model(batch()), y), "codes of decoded values are those codes"
    assert model[0].weight.isnan().all()


def test_what_cannot_be_held_or_run_is_refused():
    with pytest.raises(ValueError, match="^Linear: fp8_delayed uses delayed scaling for weights, and a quantized-only"):
        held("fp8_delayed")
    with (
        pytest.raises(ValueError, match="the weight is on the meta device and has no values to quantize"),
        dlp.quantized_model_init(recipe="nvfp4"),
    ):
        dlp.Linear(64, 64, device="meta")
    model = held("fp8_current")
    with pytest.raises(
        ValueError,
        match=re.escape("the weights are quantized-only codes of fp8_current, which cannot be requantized to nvfp4"),
    ):
        dlp.set_recipe(model, "0", "nvfp4")
    assert model[0].core.spec.recipe == dlp.recipe("fp8_current")
    with dlp.autocast(recipe="nvfp4"), pytest.raises(ValueError, match="are quantized-only codes of fp8_current"):
        model(batch())
    with dlp.quantized_model_init(enabled=False, recipe="fp8_current"):
        assert not mlp()[0].weight.isnan().any()


def converted() -> tuple[list[Tensor], list[Tensor]]:
    """Train a converted model on tp ranks for two steps, with quantized-only weights and with bf16 weights. Return y
    and an unsharded gradient of each step, for both models."""
    mesh = worker.mesh(tp=dist.get_world_size())
    results: list[list[Tensor]] = []
    for hold in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(worker.device(), torch.bfloat16)
        groups = [{"name": "all", "match": ["*"], "recipe": "fp8_current", "style": "column"}]
        groups += [{"name": "second", "match": ["1"], "style": "row"}]
        with dlp.quantized_model_init(enabled=hold, preserve_high_precision_init_val=True):
            dlp.convert(model, groups, mesh)
        found = []
        optimizer = dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        for _ in range(2):
            y = model(batch().to(worker.device()))
            y.float().mean().backward()
            found += [y, model[1].weight.grad.full_tensor()]
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)
        results.append(found)
    return results[0], results[1]


@pytest.mark.ranks(2)
def test_converted_models_are_held_quantized_too(ranks):
    for first, second in ranks(2).run(converted):
        for found, expected in zip(first[:2], second[:2], strict=True):
            assert_bit_equal(found, expected)
        assert relative_error(first[2], second[2]) < 0.05, "bf16 weights round each step, fp32 masters do not"


def loss_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(batch()).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def trainable(recipe: str = "fp8_current") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = held(recipe, True)
    optimizer = dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, lr=2**-10))
    dlp.attach(model, optimizer)
    return model, optimizer


def test_a_step_after_a_load_begins_from_what_was_loaded():
    (model, optimizer), (other, _) = trainable(), trainable()
    loss_after_steps(model, optimizer, 2)
    moved = {name: value * 3 for name, value in other.state_dict().items()}
    model.load_state_dict(moved)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    loss_after_steps(model, optimizer, 1)
    for name, value in model.state_dict().items():
        assert relative_error(value, moved[name]) < 0.04, name


@pytest.mark.parametrize("weights_first", [True, False])
def test_masters_are_part_of_the_state(weights_first):
    """A run that continues from a checkpoint has the bits of an uninterrupted run, in whatever order the states of
    model and optimizer are loaded."""
    model, optimizer = trainable()
    loss_after_steps(model, optimizer, 3)
    saved, state = optimizer.state_dict(), dlp.state_dict(model)
    weights = copy.deepcopy(model.state_dict())  # in this dict the bias is the trained parameter
    assert sorted(key for key in state if key.startswith("masters.")) == ["masters.0", "masters.2"]
    expected = loss_after_steps(model, optimizer, 3)
    second, resumed = trainable()
    if weights_first:
        second.load_state_dict(weights)
    assert dlp.load_state_dict(second, state) == []
    if not weights_first:
        second.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert_bit_equal(loss_after_steps(second, resumed, 3), expected)
    assert_bit_equal(second[0].bias, model[0].bias)
    for name, master in dlp.state_dict(model).items():
        assert not name.startswith("masters.") or torch.equal(dlp.state_dict(second)[name], master), name
    without = {key: value for key, value in state.items() if not key.startswith("masters.")}
    (told,) = dlp.load_state_dict(second, without)
    assert told == (
        "2 quantized-only weights (0, ...) get master weights from their codes: the checkpoint has no "
        "master weights for them"
    )


def test_gradients_of_a_skipped_step_are_cleared():
    (model, optimizer), (other, twice) = trainable(), trainable()
    model(batch()).square().sum().backward()  # a backward without an optimizer step, as after a skipped update
    optimizer.zero_grad()
    assert_bit_equal(loss_after_steps(model, optimizer, 2), loss_after_steps(other, twice, 2))
    model(batch()).square().sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()


def test_an_unused_layer_does_not_step_on_its_last_gradient():
    model, optimizer = trainable()
    model(batch()).square().sum().backward()
    optimizer.step()
    model.zero_grad()
    before = model.state_dict()["2.weight"].clone()
    model[0](batch()).square().sum().backward()
    optimizer.step()
    assert_bit_equal(model.state_dict()["2.weight"], before)


def test_a_second_optimizer_goes_on_with_the_masters():
    model, optimizer = trainable()
    loss_after_steps(model, optimizer, 2)
    first = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    second = dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, lr=2**-10))
    for expected, found in zip(first, second.param_groups[0]["params"], strict=True):
        assert_bit_equal(found.detach(), expected)


def test_masters_follow_a_closure():
    (model, optimizer), (other, by_closure) = trainable(), trainable()

    def closure() -> Tensor:
        by_closure.zero_grad()
        loss = other(batch()).square().sum()
        loss.backward()
        return loss

    losses = [loss_after_steps(model, optimizer, 1) for _ in range(3)]
    assert [float(by_closure.step(closure)) for _ in range(3)] == [float(loss) for loss in losses]
