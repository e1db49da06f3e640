"""Recipe changes at step boundaries: which state they change, and resumed runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp import ops
from dlp.parallel.linear.modules import Linear
from dlp.parallel.model.boundary import layer_modules, recipes_of, schedule
from dlp.parallel.model.session import session_of
from dlp.quant.custom import CustomRecipe
from dlp.quant.fp8 import CurrentScaling
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.net import Net, net, train, weights
from tests.refusals import must_raise, refuses

SHORT = {"name": "fp8_delayed", "amax_history_len": 4}
SECOND = "blocks.1.**"


def attached(recipe: Any = "fp8_current") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear(32, 32, recipe=dlp.recipe(**recipe)) for _ in range(3)))
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dlp.attach(model, model.optimizer)
    return model


def step(model: nn.Sequential, seed: int) -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()


def test_only_the_chosen_layers_change_and_keep_nothing_of_the_old_recipe():
    model = attached(SHORT)
    step(model, 0)
    before = dlp.state_dict(model)
    specs, casts = [layer.core.spec for layer in model], [layer.core.weights.parts for layer in model]
    dlp.set_recipe(model, "1", "nvfp4")
    assert recipes_of(model)["1"] == "nvfp4"
    for i in (0, 2):
        assert model[i].core.spec is specs[i] and model[i].core.weights.parts is casts[i]
    after = dlp.state_dict(model)
    assert {key for key in before if key not in after} == {key for key in before if key.startswith("slots.1.")}
    for key in after:
        if key.startswith("slots."):
            assert_bit_equal(after[key], before[key], key)
    dlp.set_recipe(model, "1", SHORT)
    assert dlp.state_dict(model)["slots.1.x.scale"] == 1.0, "the new state starts anew"
    step(model, 1)
    assert dlp.state_dict(model)["slots.0.w.history"].count_nonzero() == 2, "other weights' amaxes went on counting"


def test_a_forward_in_flight_keeps_its_recipe():
    grads = []
    for swaps in (False, True):
        model = attached({"name": "fp8_current"})
        y = model(torch.ones(32, 32))
        if swaps:
            dlp.set_recipe(model, "**", "nvfp4")
        y.square().sum().backward()
        grads.append(model[0].weight.grad)
    assert_bit_equal(grads[1], grads[0])


def test_patterns_that_match_nothing_recipes_that_do_not_exist_and_steps_that_are_over():
    model = attached({"name": "bf16"})
    with pytest.raises(ValueError, match="^set_recipe: pattern 'mlp.*' matches no layer; nearest: "):
        dlp.set_recipe(model, "mlp.*", "bf16")
    with pytest.raises(ValueError, match="unknown recipe 'fp7'"):
        dlp.set_recipe(model, "0", "fp7")
    with pytest.raises(ValueError, match="^a recipe change at step 0 is in the past: 0 steps are done"):
        schedule(model, ["0"], 0, "bf16")
    assert set(recipes_of(model).values()) == {"bf16"} and not session_of(model).swaps


def test_a_scheduled_swap_happens_by_itself():
    model = attached({"name": "bf16"})
    schedule(model, ["0", "2"], 2, "fp8_current")
    said = []
    for seed in range(3):
        step(model, seed)
        said.append(recipes_of(model)["2"])
    assert said == ["bf16", "fp8_current", "fp8_current"] and recipes_of(model)["1"] == "bf16"
    (swap,) = session_of(model).swaps
    assert (swap.step, swap.layers, swap.said) == (2, ("0", "2"), "fp8_current")
    assert model[0].core.weights.parts.parts[0].dtype == torch.float8_e4m3fn, "cast at the same boundary"


def test_a_recipe_made_in_python_must_be_there_before_loading():
    def eight(role: str) -> Any:
        return CurrentScaling()

    model = attached({"name": "bf16"})
    dlp.set_recipe(model, "1", CustomRecipe(eight, name="eight"))
    saved = dlp.state_dict(model)
    other = attached({"name": "bf16"})
    with pytest.raises(ValueError, match="^1 was set to eight at step 0, a recipe constructed in Python"):
        dlp.load_state_dict(other, saved)
    dlp.set_recipe(other, "1", CustomRecipe(eight, name="eight"))
    assert dlp.load_state_dict(other, saved) == []


def test_what_is_left_of_a_changed_configuration_is_told():
    saved = dlp.state_dict(attached({"name": "bf16"}))
    told = dlp.load_state_dict(attached(SHORT), saved)
    assert told == ["9 delayed scales (0.dy, ...) start without history: the checkpoint has no scales for them"]
    trained = attached(SHORT)
    step(trained, 0)
    told = dlp.load_state_dict(attached({"name": "bf16"}), dlp.state_dict(trained))
    assert told == [
        "9 delayed scales of the checkpoint (0.dy, ...) are dropped: the model has no layer of that name with delayed scales"
    ]


@pytest.mark.parametrize("changed", [{"fp8_format": "E4M3"}, {"margin": -6}])
def test_slots_of_another_format_or_margin_start_anew(changed):
    trained = attached(SHORT)
    step(trained, 0)
    saved, model = dlp.state_dict(trained), attached({**SHORT, **changed})
    remarks = dlp.load_state_dict(model, saved)
    loaded = dlp.state_dict(model)
    others = [key for key in saved if key.endswith(".target") and saved[key] != loaded[key]]
    assert others and all(loaded[key.replace("target", "scale")] == 1 for key in others)
    said = (
        f"{len(others)} delayed scales .* start without history: the checkpoint has scales for another .*, fp8_format "
        f"or margin"
    )
    assert len(remarks) == 1 and re.fullmatch(said, remarks[0]), remarks
    assert dlp.load_state_dict(attached(SHORT), saved) == []
    unstated = {key: value for key, value in saved.items() if not key.endswith(".target")}
    (remark,) = dlp.load_state_dict(attached(SHORT), unstated)
    assert remark.startswith("9 delayed scales (0.dy, ...) are loaded as scales of this recipe's fp8_format and margin")


def by_the_module_around() -> tuple[list[str], list[str], str]:
    """Change a recipe by `dlp.set_recipe` of a module that contains the converted model as `inner`, so that names of layers
    begin with "inner.". Return the changed layers, the layers with this recipe in a model that loads the state, and the error
    of a change of one sibling alone, which changes no recipe."""
    first, second = (nn.ModuleDict({"inner": net("bf16", worker.mesh(tp=2))}) for _ in range(2))
    swap = dlp.set_recipe(first, "inner.blocks.1.**", "fp8_current")
    dlp.load_state_dict(second["inner"], dlp.state_dict(first))
    before = recipes_of(first)
    said = must_raise(ValueError, dlp.set_recipe, first, "inner.blocks.0.gate", "nvfp4")
    assert recipes_of(first) == before
    return list(swap.layers), [name for name, its in recipes_of(second).items() if its != "bf16"], said


@pytest.mark.ranks(2)
def test_a_module_around_the_model_sets_recipes(ranks):
    for layers, resumed, said in ranks(2).run(by_the_module_around):
        assert layers and all(name.startswith("blocks.1.") for name in layers)
        assert resumed == [f"inner.{name}" for name in layers]
        assert said.startswith(
            "blocks.0.gate, blocks.0.up are siblings and run as one layer, but blocks.0.up would keep"
        )


def swapping(model: Net) -> None:
    """Schedule recipes of the second block: nvfp4 after 2 steps, fp8_delayed after 4, bf16 after 6."""
    layers = [name for name in layer_modules(model) if name.startswith("blocks.1.")]
    schedule(model, layers, 2, "nvfp4")
    schedule(model, layers, 4, {"name": "fp8_delayed", "amax_history_len": 4})
    schedule(model, layers, 6, "bf16")


def uninterrupted(sizes: dict[str, int]) -> tuple[dict[str, Tensor], list[float], list[str]]:
    mesh = worker.mesh(**sizes)
    model = net("fp8_current", mesh)
    swapping(model)
    losses = train(model, mesh, range(8))
    return weights(model), losses, [f"{swap.step} {swap.said}" for swap in session_of(model).swaps]


def interrupted(sizes: dict[str, int], at: int) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """Train `at` steps, and continue in another model from the state of the first; return the weights, the losses of all
    steps and the recipe changes."""
    mesh = worker.mesh(**sizes)
    first = net("fp8_current", mesh)
    swapping(first)
    losses = train(first, mesh, range(at))
    saved, parameters = dlp.state_dict(first), first.state_dict()
    second = net("fp8_current", mesh)
    swapping(second)
    second.load_state_dict(parameters)
    assert dlp.load_state_dict(second, saved) == []
    dlp.end_step(second)
    losses += train(second, mesh, range(at, 8))
    return weights(second), losses, [f"{swap.step} {swap.said}" for swap in session_of(second).swaps]


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5, 7])
@pytest.mark.full  # test_run_recipes.py resumes a run between swaps
def test_a_run_resumed_between_swaps_continues_bit_for_bit(ranks, at):
    sizes = {"tp": 2}
    for (whole, losses, swaps), (resumed, again, swaps_again) in zip(
        ranks(2).run(uninterrupted, sizes), ranks(2).run(interrupted, sizes, at), strict=True
    ):
        assert swaps == swaps_again == ["2 nvfp4", "4 fp8_delayed(amax_history_len=4)", "6 bf16"]
        assert again == losses
        for name in whole:
            assert_bit_equal(resumed[name], whole[name], name)


def pending(
    first: Any, then: Any, recompute: bool, attached: bool, of_ops: bool, reentrant: bool = False
) -> list[Tensor]:
    """Return y, dx and dw of a forward with the recipe `first` whose backward runs after a change to the recipe `then`.
    `then` may also be a function, which is called with model and x between the two passes, or None."""
    torch.manual_seed(0)
    make = (lambda: ops.Linear(32, 32, recipe=first)) if of_ops else (lambda: Linear(32, 32, recipe=first))
    model = nn.Sequential(make(), nn.GELU(), make())
    if attached:
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(2):  # so that delayed scales depend on amaxes
        model(x).square().sum().backward()
        dlp.end_step(model)
    x.grad = None
    model.zero_grad()
    y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
    if callable(then):
        then(model, x.detach())
    elif then is not None:
        dlp.set_recipe(model, "**", then)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("of_ops", [False, True], ids=["layers", "ops"])
@pytest.mark.parametrize("attached", [False, True], ids=["alone", "attached"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("first", "then"),
    [("fp8_delayed", "bf16"), (SHORT, {**SHORT, "margin": 3, "fp8_format": "E4M3"}), ("fp8_current", "mxfp8")],
    ids=["delayed to bf16", "delayed to delayed", "current to mxfp8"],
)
def test_a_backward_goes_on_with_the_recipe_of_its_forward(first, then, recompute, attached, of_ops):
    changed = pending(first, then, recompute, attached, of_ops)
    for actual, expected in zip(changed, pending(first, None, recompute, attached, of_ops), strict=True):
        assert_bit_equal(actual, expected)


def other_forwards(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        model(x + 1)


def load_itself(model: nn.Module, x: Tensor) -> None:
    dlp.load_state_dict(model, dlp.state_dict(model))


@pytest.mark.parametrize("of_ops", [False, True], ids=["layers", "ops"])
@pytest.mark.parametrize("attached", [False, True], ids=["alone", "attached"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_backward_draws_and_scales_by_the_state_of_its_forward(recompute, attached, of_ops):
    """A backward uses the random state and the scales of its own forward, although other forwards ran in between. If a
    load changed this state in between, the backward raises."""
    for recipe in ("nvfp4", SHORT):
        expected = pending(recipe, None, recompute, attached, of_ops)
        for actual, one in zip(pending(recipe, other_forwards, recompute, attached, of_ops), expected, strict=True):
            assert_bit_equal(actual, one)
        with refuses(r"dlp.load_state_dict was called between a forward and its backward, which", RuntimeError):
            pending(recipe, load_itself, recompute, attached, of_ops)
    pending("fp8_current", load_itself, recompute, attached, of_ops)


@pytest.mark.parametrize("of_ops", [False, True], ids=["layers", "ops"])
@pytest.mark.parametrize("attached", [False, True], ids=["alone", "attached"])
@pytest.mark.parametrize(("first", "then"), [(SHORT, {**SHORT, "margin": 3}), ("fp8_current", "mxfp8")])
def test_a_reentrant_checkpoint_across_a_recipe_change_is_refused(first, then, attached, of_ops):
    with refuses("the recipe was changed between a forward and the backward that recomputes this forward"):
        pending(first, then, True, attached, of_ops, reentrant=True)
    pending(first, None, True, attached, of_ops, reentrant=True)
