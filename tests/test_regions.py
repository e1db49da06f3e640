"""Each forward in an autocast region has a state (scales, random counters). The backward and the recomputation of
this forward use this state, and no other forward uses it. No ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dlp
from dlp import ops
from dlp.parallel.linear import active
from dlp.parallel.linear.modules import Linear
from tests.cases import matrix
from tests.metrics import assert_bit_equal, relative_error
from tests.refusals import refuses

SIZE = 32
DELAYED = dlp.recipe("fp8_delayed", amax_history_len=1)
Wrap = Callable[..., Tensor]


def layer(recipe: Any = DELAYED) -> Linear:
    """Return a layer with such small weights that wrong delayed scales (1, or those of another forward) would flush or
    clip values."""
    torch.manual_seed(0)
    linear = Linear(SIZE, SIZE, recipe=recipe)
    with torch.no_grad():
        linear.weight.mul_(1e-3)
    return linear


def scale(linear: Linear, tensor: str) -> float:
    table = linear.core.session.scaling.table
    return table.scale[table.index(f"linear.{tensor}")].item()


def directly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def again_watched(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run the function in a selective checkpoint. The dispatch mode of the checkpoint makes a linear run as opaque
    ops."""
    saved = [torch.ops.aten.add.Tensor]
    return checkpoint(function, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(saved))


def test_a_calibrating_forward_leaves_nothing_to_a_step_outside():
    linear = layer()
    with dlp.autocast(enabled=False, calibrating=True):
        linear(matrix("gauss", SIZE, SIZE, 1))
    x, dy = matrix("gauss", SIZE, SIZE, 2).requires_grad_(), matrix("gauss", SIZE, SIZE, 3)
    linear(x).backward(dy)
    assert relative_error(x.grad, dy @ linear.weight.detach()) < 0.1, "backward casts w by the scale that forward had"
    assert scale(linear, "dy") == 1.0
    dlp.end_step(linear)
    assert scale(linear, "dy") == pytest.approx(57344 / dy.abs().max().item())


def test_an_evaluation_in_a_region_leaves_nothing_to_a_step_outside():
    linear = layer()
    with torch.no_grad(), dlp.autocast():
        linear(matrix("gauss", SIZE, SIZE, 1))
    linear(matrix("gauss", SIZE, SIZE, 2)).backward(torch.ones(SIZE, SIZE))
    assert [scale(linear, name) for name in ("x", "w", "dy")] == [1.0, 1.0, 1.0], "they wait for the step boundary"


def results(runs: list[Callable[[Tensor], Tensor]], linear: nn.Module, order: list[int], wrap: Wrap) -> list[Tensor]:
    """Run all forwards, with x of very different magnitudes, and then the backwards in the order `order`. Return, for
    each backward, dx and the gradients of the parameters."""
    xs = [matrix("gauss", SIZE, SIZE, seed) * factor for seed, factor in ((1, 1.0), (2, 1024.0), (3, 1e-2))]
    xs = [x.requires_grad_() for x in xs]
    ys = [wrap(run, x) for run, x in zip(runs, xs, strict=True)]
    found = []
    for i in order:
        linear.zero_grad()
        ys[i].backward(matrix("gauss", SIZE, SIZE, 10 + i))
        found += [xs[i].grad, *(p.grad.clone() for p in linear.parameters())]
    return found


def inside(linear: Linear, recipe: Any = None) -> Callable[[Tensor], Tensor]:
    """Return a function that enters a region and runs the layer. Tests put a checkpoint around this function, so the
    region is inside of the checkpoint."""

    def run(x: Tensor) -> Tensor:
        with dlp.autocast(recipe=recipe):
            return linear(x)

    return run


def outside(linear: Callable[[Tensor], Tensor], wrap: Wrap, recipe: Any = None) -> Callable[[Tensor], Tensor]:
    """Return a function that enters a region and runs the layer in a checkpoint inside the region."""

    def run(x: Tensor) -> Tensor:
        with dlp.autocast(recipe=recipe):
            return wrap(linear, x)

    return run


@pytest.mark.parametrize("wrap", [again, again_watched])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_each_forward_has_its_own_delayed_scales_in_backward_and_in_recomputation(wrap, order):
    found = []
    for how in (directly, wrap):
        linear = layer()
        for _ in range(2):
            outside(linear, directly)(matrix("gauss", SIZE, SIZE, 5)).backward(torch.ones(SIZE, SIZE))
        found.append(results([outside(linear, how)] * 3, linear, order, directly))
    for plain, recomputed in zip(*found, strict=True):
        assert_bit_equal(recomputed, plain)


def test_a_checkpoint_in_a_checkpoint_repeats_its_own_forward():
    """With nested checkpoints, the recomputation of the outer checkpoint runs the layer in a new inner checkpoint,
    which recomputes the layer again. Both recomputations must use the state of the original forward."""
    found = []
    for inner, outer in ((directly, directly), (again, again)):
        linear = layer()

        def squared(x: Tensor, linear: Linear = linear, inner: Wrap = inner) -> Tensor:
            return inner(linear, x).square()

        found.append(results([outside(squared, outer)] * 3, linear, [1, 0, 2], directly))
    for plain, recomputed in zip(*found, strict=True):
        assert_bit_equal(recomputed, plain)


@pytest.mark.parametrize("region", [True, False])
def test_a_forward_before_a_step_boundary_keeps_its_scales(region):
    found = []
    for late in (False, True):
        linear = layer()
        for _ in range(2):
            linear(matrix("gauss", SIZE, SIZE, 1)).backward(torch.ones(SIZE, SIZE))
            dlp.end_step(linear)
        x = matrix("gauss", SIZE, SIZE, 2).requires_grad_()
        y = (outside(linear, again) if region else linear)(x)
        linear.core.session.scaling.table.staging[:2] = torch.tensor([1e3, 1e-8])
        if late:
            dlp.end_step(linear)
            assert scale(linear, "x") != 1.0
            linear(x)  # a forward with the new scales
        linear.zero_grad()
        y.backward(torch.ones(SIZE, SIZE))
        found.append((x.grad, linear.weight.grad))
    for plain, after in zip(*found, strict=True):
        assert_bit_equal(after, plain)


def test_a_backward_after_another_region_casts_w_by_the_scale_of_its_own_forward():
    linear, x = layer(), matrix("gauss", SIZE, SIZE, 1)
    run = outside(linear, directly)
    dy = matrix("gauss", SIZE, SIZE, 2)
    run(x).backward(dy)
    first = run(x.requires_grad_())
    with torch.no_grad():
        linear.weight.data = linear.weight * 1e-3
    # When this region ends, the scale of w grows by a factor of 1000, which is far too large for w of the first forward
    run(x)
    with torch.no_grad():
        linear.weight.data = linear.weight * 1e3
    first.backward(dy)
    assert relative_error(x.grad, dy @ linear.weight.detach()) < 0.1


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("enter", [inside, lambda linear, recipe: outside(linear, again, recipe)])
def test_recomputation_runs_the_recipe_of_its_own_forward_whatever_ran_since(attached, enter):
    found = []
    for recompute in (False, True):
        linear = layer()
        if attached:
            dlp.attach(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
        entered = [enter(linear, name) if recompute else inside(linear, name) for name in ("mxfp8", "nvfp4", None)]
        wrap = again if recompute and enter is inside else directly
        found.append(results(entered, linear, [0, 1, 2], wrap))
    for plain, recomputed in zip(*found, strict=True):
        assert_bit_equal(recomputed, plain)


def test_one_checkpoint_across_two_regions_and_a_forward_outside():
    def run(linear: Linear, wrap: Wrap) -> list[Tensor]:
        x = matrix("gauss", SIZE, SIZE, 1).requires_grad_()
        y = wrap(lambda x: linear(inside(linear, "fp8_block")(inside(linear, "mxfp8")(x))), x)
        inside(linear, "nvfp4")(x)
        y.backward(torch.ones(SIZE, SIZE))
        assert x.grad is not None and linear.weight.grad is not None
        return [y.detach(), x.grad, linear.weight.grad]

    warm = inside(layer("fp8_current"), "mxfp8")
    warm(matrix("gauss", SIZE, SIZE, 1))
    for plain, recomputed in zip(run(layer("bf16"), directly), run(layer("bf16"), again), strict=True):
        assert_bit_equal(recomputed, plain)


def test_a_second_backward_recomputes_alike():
    linear = layer()
    x = matrix("gauss", SIZE, SIZE, 1).requires_grad_()
    y = outside(linear, again, "mxfp8")(x)
    grads = []
    for _ in range(2):
        linear.zero_grad()
        y.backward(torch.ones(SIZE, SIZE), retain_graph=True)
        grads.append(linear.weight.grad.clone())
        inside(linear, "nvfp4")(x)
    assert_bit_equal(grads[1], grads[0])


def test_a_reentrant_checkpoint_in_a_region_is_refused_and_one_outside_is_not():
    linear, x = layer(), matrix("gauss", SIZE, SIZE, 1).requires_grad_()
    with torch.no_grad(), dlp.autocast():
        linear(x)
    checkpoint(linear, x, use_reentrant=True).sum().backward()
    with dlp.autocast():
        y = checkpoint(linear, x, use_reentrant=True)
    with pytest.raises(ValueError, match="^Linear: backward recomputes this layer, .* use_reentrant=False"):
        y.sum().backward()


# CUDA graphs of layers, with a simulated capture (tests/gpu/test_ops.py uses real graphs)


def played_graph(model: nn.Module, x: Tensor) -> None:
    """Run the warm-up of `torch.cuda.make_graphed_callables`. torch uses uninitialized memory as dy; here dy is Inf."""
    for _ in range(3):
        y = model(x)
        torch.autograd.grad(y, list(model.parameters()), torch.full_like(y, float("inf")))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_what_a_graph_warms_up_with_leaves_nothing_behind(recipe: str):
    def steps(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Linear(SIZE, SIZE, recipe=recipe), Linear(SIZE, SIZE, recipe=recipe))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        dlp.attach(model, optimizer)
        for seed in range(2):
            for micro in range(3):
                model(matrix("gauss", SIZE, SIZE, micro)).backward(matrix("gauss", SIZE, SIZE, 5 + seed))
            if graphed:
                with dlp.graphing(model):
                    played_graph(model[0], matrix("gauss", SIZE, SIZE, 9))
            optimizer.step()
        assert not dlp.not_finite(model)
        return [*model.parameters(), *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    for found, expected in zip(steps(True), steps(False), strict=True):
        assert_bit_equal(found, expected)


def test_a_recipe_that_a_graph_holds_is_not_swapped(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(Linear(SIZE, SIZE, recipe="fp8_current"), Linear(SIZE, SIZE, recipe="fp8_current"))
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    x = matrix("gauss", SIZE, SIZE, 1)
    with dlp.graphing(model):
        played_graph(model[0], x)
    dlp.set_recipe(model, "1", "bf16")
    with refuses("^0: the recipe fp8_current.* is captured in a CUDA graph.*set recipes inside dlp.graphing"):
        dlp.set_recipe(model, "0", "bf16")
    with dlp.graphing(model):
        dlp.set_recipe(model, "0", "bf16")
    monkeypatch.setattr("dlp.parallel.linear.step.capturing", lambda: True)  # a capture without `dlp.graphing`
    model[1](x)
    with pytest.raises(ValueError, match="^1: the recipe bf16 of this layer is captured in a CUDA graph"):
        dlp.set_recipe(model, "1", "fp8_block")


def test_the_weight_of_a_graphed_layer_is_scaled_by_what_it_has_become():
    """A replay of a CUDA graph is not a forward for dlp. The step boundary must nevertheless observe the weight of a
    graphed layer and update the scale."""
    model = nn.Sequential(layer())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    with dlp.graphing(model):
        played_graph(model[0], matrix("gauss", SIZE, SIZE, 1))
    model[0].weight.data.mul_(64.0)
    for _ in range(2):  # the first boundary observes the weight, the second casts with the resulting scale
        optimizer.step()
    table = model[0].core.session.scaling.table
    assert table.scale[table.index("0.w")].item() == pytest.approx(448 / model[0].weight.abs().max().item(), rel=1e-3)


def test_a_region_without_a_step_boundary_is_not_captured(monkeypatch: pytest.MonkeyPatch):
    linear = layer("fp8_current")
    monkeypatch.setattr(active, "capturing", lambda: True)
    with dlp.autocast(recipe="bf16"), pytest.raises(ValueError, match="a CUDA graph is captured inside dlp.autocast"):
        linear(matrix("gauss", SIZE, SIZE, 1))


WITHOUT_A_DRIVER = """
import torch

def insufficient():
    raise RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version")

torch.backends.cuda.is_built = lambda: True
torch.cuda.is_current_stream_capturing = insufficient

import dlp

linear = dlp.Linear(32, 32, recipe="fp8_delayed")
optimizer = torch.optim.SGD(linear.parameters(), 0.1)
dlp.attach(linear, optimizer)
with dlp.autocast(recipe="fp8_current"):
    linear(torch.ones(16, 32)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_a_torch_that_was_built_for_cuda_trains_where_there_is_no_driver():
    """torch.cuda.is_current_stream_capturing of a CUDA build raises on a machine without a driver. Training must work
    there."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_DRIVER], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Linear(SIZE, SIZE, recipe="bf16"), nn.Tanh(), Linear(SIZE, (SIZE, SIZE), recipe=DELAYED))


def in_region(model: nn.Module, recipe: Any, steps: int) -> list[Tensor]:
    found = []
    for step in range(steps):
        with dlp.autocast(recipe=recipe):
            ys = model(matrix("gauss", SIZE, SIZE, step) * (step + 1))
        (ys[0].sum() + ys[1].square().sum()).backward()
        found += [y.detach() for y in ys]
    return found


@pytest.mark.parametrize("recipe", [None, DELAYED, dlp.recipe("fp8_delayed", margin=1)])
def test_scales_of_regions_are_saved_without_a_step_boundary(recipe):
    """`dlp.state_dict` contains the scales of regions, under the names that they have after `dlp.attach`. If only the
    region gives a recipe, loaded scales take effect when a forward runs in the region."""
    model, resumed, lone = of_two(), of_two(), Linear(SIZE, SIZE, recipe=DELAYED)
    in_region(model, recipe, 2)
    saved = dlp.state_dict(model)
    assert any(name.startswith("slots.2.weight_1.w") for name in saved) and dlp.load_state_dict(resumed, saved) == []
    again = dlp.state_dict(resumed)
    assert again.keys() == saved.keys() and all(torch.equal(again[name], saved[name]) for name in saved)
    expected, found, fresh = (in_region(each, recipe, 2) for each in (model, resumed, of_two()))
    for y, wanted in zip(found, expected, strict=True):
        assert_bit_equal(y, wanted)
    assert not all(torch.equal(y, wanted) for y, wanted in zip(fresh, expected, strict=True))
    saved = dlp.state_dict(model)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in dlp.state_dict(resumed).items())
    attached = of_two()
    dlp.attach(attached, torch.optim.SGD(attached.parameters(), 0.1))
    assert dlp.load_state_dict(attached, saved) == []
    with dlp.autocast():
        lone(matrix("gauss", SIZE, SIZE, 1)).sum().backward()
    assert dlp.state_dict(lone)["slots..x.scale"] == scale(lone, "x") != 1


def sequence(recipe: str) -> ops.Sequential:
    return ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 32, recipe=recipe), ops.GELU())


@pytest.mark.parametrize("make", [sequence, lambda recipe: dlp.ColumnParallelLinear(32, 32, recipe=recipe)])
@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("bf16", {}, True), ("bf16", {"recipe": "fp8_current"}, False), ("fp8_current", {}, False),
        ("bf16", {"enabled": False}, False), ("bf16", {"recipe": "bf16"}, False),
    ],
)  # fmt: skip
def test_a_region_that_quantizes_nothing_says_so(
    make: Any, recipe: str, options: dict[str, Any], said: bool, caplog: pytest.LogCaptureFixture
):
    """autocast without a recipe around forwards of a bf16 layer logs one message. quantized_model_init around the
    constructor logs one message if it is enabled and no weight is quantized."""
    model = make(recipe)
    with caplog.at_level("WARNING", "dlp"):
        for _ in range(2):
            with dlp.autocast(**options):
                model(torch.randn(4, 32))
        found = [each.getMessage() for each in caplog.records if "dlp.autocast without a recipe" in each.getMessage()]
        assert len(found) == said
        caplog.clear()
        with dlp.quantized_model_init(**options):
            make(recipe)
        codes = options.get("recipe") == "fp8_current" or recipe == "fp8_current"
        found = [each.getMessage() for each in caplog.records if "no weight is quantized" in each.getMessage()]
        assert len(found) == (not codes and options.get("enabled", True))
