"""autocast: the recipe of each layer, the time at which delayed scales change without an optimizer, and code outside of
the region, which autocast must not affect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear
from tests import pool as worker
from tests.cases import matrix
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.observe import Collectives

SIZE = 32
DELAYED = dlp.recipe("fp8_delayed", amax_history_len=4)


def layer(recipe: Any = "bf16") -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=recipe)


def run(module: nn.Module, seed: int = 1, region: Any = None, recompute: bool = False) -> dict[str, Tensor]:
    """Run one forward inside `region` and one backward outside of it; return y, dx and the weights' gradients."""
    x = matrix("gauss", SIZE, SIZE, seed).requires_grad_()
    module.zero_grad()
    with region or dlp.autocast():
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    y.backward(matrix("gauss", SIZE, SIZE, seed + 1))
    assert x.grad is not None
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_inside_the_regions_recipe_runs_forward_and_backward_and_again_in_recomputation(recipe, recompute):
    expected = run(layer(recipe))
    linear = layer()
    assert_all_bit_equal(run(linear, region=dlp.autocast(recipe=recipe), recompute=recompute), expected)
    assert_all_bit_equal(run(linear, recompute=recompute), run(layer()))


def test_regions_nest_and_the_innermost_decides():
    module = nn.ModuleList([layer("fp8_current") for _ in range(4)])
    x = matrix("gauss", SIZE, SIZE, 1)
    with dlp.autocast(recipe="mxfp8"):
        first = module[0](x)
        with dlp.autocast(enabled=False):
            second = module[1](x)
            with dlp.autocast(recipe=dlp.recipe("nvfp4")):
                third = module[2](x)
        fourth = module[3](x)
    for y, recipe in (
        (first, "mxfp8"),
        (second, "bf16"),
        (third, "nvfp4"),
        (fourth, "mxfp8"),
        (module[0](x), "fp8_current"),
    ):
        assert_bit_equal(y, layer(recipe)(x), recipe)


def test_without_a_recipe_layers_keep_their_own_and_an_error_ends_the_region():
    assert_all_bit_equal(run(layer("fp8_block"), region=dlp.autocast()), run(layer("fp8_block")))
    with pytest.raises(RuntimeError, match="inside"), dlp.autocast(recipe="nvfp4"):
        raise RuntimeError("inside")
    assert_all_bit_equal(run(layer()), run(layer()))


def manual(linear: Linear, seed: int) -> dict[str, Tensor]:
    """Run forward, backward and the step boundary; return y, dx and the weight gradient."""
    x = matrix("gauss", SIZE, SIZE, seed).requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(matrix("gauss", SIZE, SIZE, seed + 1))
    dlp.end_step(linear)
    return {"y": y.detach(), "dx": x.grad, "weight": linear.weight.grad}


@pytest.mark.parametrize("recompute", [False, True])
def test_delayed_scales_follow_the_region_and_give_the_bits_of_the_step_boundary(recompute):
    by_region, by_step = layer(), layer(DELAYED)
    for seed in (1, 20, 40, 60):
        assert_all_bit_equal(run(by_region, seed, dlp.autocast(recipe=DELAYED), recompute), manual(by_step, seed))


def scale(linear: Linear, tensor: str) -> float:
    runtime = linear.core.session
    return runtime.scaling.table.scale[runtime.scaling.table.index(f"linear.{tensor}")].item()


def test_x_and_w_scale_when_the_outermost_region_ends_and_dy_after_its_backward():
    linear, x = layer(DELAYED), torch.full((SIZE, SIZE), 7.0)
    with torch.no_grad(), dlp.autocast():
        linear(x)
    assert scale(linear, "x") == 1.0, "evaluation"
    with dlp.autocast():
        with dlp.autocast():
            y = linear(x)
        assert scale(linear, "x") == 1.0, "an inner region"
    assert scale(linear, "x") == 64.0 and scale(linear, "w") != 1.0 and scale(linear, "dy") == 1.0
    y.backward(torch.full_like(y, 0.5))
    assert scale(linear, "x") == 64.0 and scale(linear, "dy") == 57344 / 0.5


def test_with_an_optimizer_the_step_boundary_counts_and_a_region_changes_nothing():
    linear = layer(DELAYED)
    model = nn.Sequential(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dlp.attach(model, optimizer)
    run(model)
    table = linear.core.session.scaling.table
    assert table.scale.tolist() == [1.0, 1.0, 1.0]
    optimizer.step()
    assert 1.0 not in table.scale.tolist()


def test_calibrating_runs_in_high_precision_and_records_the_scales_to_come():
    linear, calibrated = layer(DELAYED), layer(DELAYED)
    high = run(calibrated, region=dlp.autocast(enabled=False, calibrating=True))
    assert_all_bit_equal(high, run(layer()))
    run(linear, region=dlp.autocast())
    assert [scale(calibrated, name) for name in ("x", "w", "dy")] == [scale(linear, name) for name in ("x", "w", "dy")]
    assert scale(calibrated, "dy") != 1.0
    off = layer(DELAYED)
    run(off, region=dlp.autocast(enabled=False))
    assert scale(off, "x") == 1.0, "without calibrating nothing is recorded"


def test_recipes_with_other_options_have_slots_of_their_own():
    linear = layer(DELAYED)
    run(linear, region=dlp.autocast(recipe=dlp.recipe("fp8_delayed", amax_history_len=2)))
    assert scale(linear, "x") == 1.0 and scale(linear, "x[fp8_delayed(amax_history_len=2)]") != 1.0
    run(linear, region=dlp.autocast(recipe=DELAYED))
    assert scale(linear, "x") != 1.0, "an equal recipe is the layer's own"


@pytest.mark.slow
def test_a_compiled_layer_says_that_it_cannot_be_reached():
    linear = torch.compile(layer("fp8_current"), backend="eager", fullgraph=True)
    x = matrix("gauss", SIZE, SIZE, 1)
    assert_bit_equal(linear(x), layer("fp8_current")(x))
    with pytest.raises(ValueError, match="^Linear: dlp.autocast has no effect on compiled code"), dlp.autocast():
        linear(x)


def with_groups() -> list[tuple[float, int]]:
    """Run a region with an amax group of both ranks, and a region with one group per rank. Return, for each
    region, the scale of x and the number of all-reduces."""
    groups = [dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]]
    found = []
    for group in groups:
        torch.manual_seed(0)
        linear = ColumnParallelLinear(SIZE, SIZE, tp=worker.mesh(tp=2)["tp"], device=worker.device())
        x = torch.full((SIZE, SIZE), 1.0 + dist.get_rank(), device=worker.device())
        with Collectives() as seen, dlp.autocast(recipe=DELAYED, amax_reduction_group=group):
            linear(x)
        table = linear.core.session.scaling.table
        (scale_of_x,) = [table.scale[i].item() for i, each in enumerate(table.names) if each.startswith("linear.x")]
        found.append((scale_of_x, seen.count("allreduce")))
    return found


@pytest.mark.ranks(2)
def test_the_amax_group_of_a_region(ranks):
    for rank, found in enumerate(ranks(2).run(with_groups)):
        assert found == [(448 / 2, 1), (448 / (1 + rank), 0)]
