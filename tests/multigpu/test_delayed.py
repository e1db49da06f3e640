"""Delayed scaling in layers and models: when scales change, which amaxes they depend on, and checkpoints.

Most tests need no ranks, because an explicitly constructed layer has its own table of scales. The other tests run
on 1, 2 and 4 ranks, most of them with a small converted network.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear
from dlp.parallel.model.session import session_of
from dlp.quant.fp8 import DelayedScaling
from tests import pool as worker
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.net import batch, gradients, net, train, weights
from tests.observe import Collectives
from tests.refusals import must_raise

SHORT = {"name": "fp8_delayed", "amax_history_len": 4}


def layer(**options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(32, 32, recipe=dlp.recipe("fp8_delayed", amax_history_len=4, **options))


def scales(module: nn.Module) -> dict[str, float]:
    """Return the delayed scales of the linears in a module, by name."""
    found = {}
    for core in (each.core for each in module.modules() if isinstance(each, Linear)):
        table = core.session.scaling.table
        found |= dict(zip(table.names, table.scale.tolist(), strict=True))
    return found


def pass_through(module: nn.Module, x: Tensor, dy_scale: float = 1.0) -> Tensor:
    y = module(x)
    y.backward(torch.full_like(y, dy_scale))
    return y.detach()


def fp8_scale(fp8_max: float, amax: float) -> float:
    return float(torch.tensor(fp8_max) / torch.tensor(amax))


def test_scales_change_at_the_step_boundary_only_and_follow_the_amaxes_of_all_microbatches():
    linear = layer()
    for amax, dy in ((3.0, 0.5), (2.0, 0.25)):
        pass_through(linear, torch.full((4, 32), amax), dy)
        assert set(scales(linear).values()) == {1.0}
    dlp.end_step(linear)
    w = linear.weight.detach().abs().amax().item()
    expected = {"linear.x": fp8_scale(448, 3), "linear.w": fp8_scale(448, w), "linear.dy": fp8_scale(57344, 0.5)}
    assert scales(linear) == expected
    dlp.end_step(linear)
    assert scales(linear) == expected, "nothing ran: nothing may change"


def test_evaluation_and_frozen_weights():
    linear = layer()
    with torch.no_grad():
        linear(torch.full((4, 32), 7.0))
    dlp.end_step(linear)
    assert set(scales(linear).values()) == {1.0}, "evaluation must leave no trace"
    linear.weight.requires_grad_(False)
    pass_through(linear, torch.full((4, 32), 7.0, requires_grad=True))
    dlp.end_step(linear)
    assert scales(linear)["linear.x"] == fp8_scale(448, 7), "what runs before a frozen layer is still scaled"


def test_results_scale_too_and_evaluation_leaves_no_trace_there():
    def factory(role: str) -> Any:
        return DelayedScaling(amax_history_len=1) if role in ("linear_output", "linear_grad_input") else None

    torch.manual_seed(0)
    linear = Linear(32, 32, recipe=dlp.CustomRecipe(factory))
    with torch.no_grad():
        linear(torch.full((4, 32), 7.0))
    dlp.end_step(linear)
    assert scales(linear) == {"linear.y": 1.0, "linear.dx": 1.0}
    x = torch.full((4, 32), 7.0, requires_grad=True)
    linear(x).backward(torch.ones(4, 32))
    dlp.end_step(linear)
    y, dx = 7.0 * linear.weight.detach().sum(1).abs().amax(), linear.weight.detach().sum(0).abs().amax()
    assert scales(linear) == {"linear.y": pytest.approx(448 / y), "linear.dx": pytest.approx(448 / dx)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_quantizes_alike_and_counts_once(reentrant):
    results = []
    for recompute in (False, True):
        linear = layer()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(3):
            x.grad = linear.weight.grad = None
            y = checkpoint(linear, x, use_reentrant=reentrant) if recompute else linear(x)
            y.backward(torch.ones_like(y))
            dlp.end_step(linear)
        results.append([y.detach(), x.grad, linear.weight.grad, torch.tensor(list(scales(linear).values()))])
    for plain, again in zip(*results, strict=True):
        assert_bit_equal(again, plain)


class Branches(nn.Module):
    """Two layers, only one of which runs in a forward: b if `use_b`, else a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        return self.b(x) if use_b else self.a(x)


def step(model: Branches, optimizer: torch.optim.Optimizer, use_b: bool) -> None:
    y = model(torch.ones(4, 32), use_b)
    y.backward(torch.ones_like(y))
    optimizer.step()


def test_a_layer_that_did_not_run_is_left_untouched_its_cached_weight_too():
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    for use_b in (False, True, True):
        step(model, optimizer, use_b)
    state = dlp.state_dict(model)
    before = {key: tensor for key, tensor in state.items() if key.startswith("slots.a.")}
    assert len(before) == 9 and state["slots.a.w.history"][-1] > 0
    step(model, optimizer, True)
    for key, tensor in before.items():
        assert_bit_equal(dlp.state_dict(model)[key], tensor, key)
    assert (dlp.state_dict(model)["slots.b.w.history"] > 0).sum() == 3
    step(model, optimizer, False)
    assert (dlp.state_dict(model)["slots.a.w.history"] > 0).sum() == 2, "it ran again, and so counts again"


def test_weights_cast_at_the_boundary_and_at_use_scale_alike():
    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(layer(), layer())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dlp.attach(model, optimizer)
        for each in model:
            each.core.weights.caches = attached
        for _ in range(4):
            optimizer.zero_grad()
            pass_through(model, torch.ones(4, 32))
            optimizer.step()
        results.append((dlp.state_dict(model), weights(model)))
    (at_use, w_at_use), (cached, w_cached) = results
    for name in w_at_use:
        assert_bit_equal(w_cached[name], w_at_use[name], name)
    for key in at_use:
        assert_bit_equal(cached[key], at_use[key], key)


def test_models_in_one_process_do_not_know_of_each_other():
    one, other = layer(), layer()
    twin = copy.deepcopy(one)
    pass_through(one, torch.full((4, 32), 5.0))
    dlp.end_step(one)
    assert scales(one)["linear.x"] != 1.0
    assert set(scales(other).values()) == set(scales(twin).values()) == {1.0}


def test_a_callable_algorithm_and_most_recent():
    for algorithm, expected in (("most_recent", 2.0), (lambda window: window.sum(0), 5.0), ("max", 3.0)):
        linear = layer(amax_compute_algo=algorithm)
        for amax in (3.0, 2.0):
            pass_through(linear, torch.full((4, 32), amax))
            dlp.end_step(linear)
        assert scales(linear)["linear.x"] == fp8_scale(448, expected), algorithm


def with_reduce_amax_off() -> str:
    mesh = worker.mesh(tp=2)["tp"]
    options = {"tp": mesh, "recipe": dlp.recipe("fp8_delayed", reduce_amax=False)}
    said = must_raise(ValueError, ColumnParallelLinear, 32, 32, sequence_parallel=True, **options)
    ColumnParallelLinear(32, 32, **options)
    return said


def with_a_group_of_one() -> str:
    mesh = worker.mesh(tp=2)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return must_raise(ValueError, net, "fp8_current", mesh, amax_group=alone)


@pytest.mark.ranks(2)
def test_shards_that_are_gathered_must_share_scales(ranks):
    for message in ranks(2).run(with_reduce_amax_off):
        assert message.startswith("ColumnParallelLinear: fp8_delayed(reduce_amax=False) has reduce_amax=False")
        assert "set reduce_amax=True, or sequence_parallel=False" in message
    for rank, message in enumerate(ranks(2).run(with_a_group_of_one)):
        assert (
            f"blocks.0.gate and siblings: the amax group has ranks [{rank}]" in message and "tp ranks [0, 1]" in message
        )


def slots_after(steps: int, sizes: dict[str, int], fsdp: bool = False) -> tuple[dict[str, Tensor], int]:
    mesh = worker.mesh(**sizes)
    model = net(SHORT, mesh, fsdp=fsdp)
    train(model, mesh, range(steps - 1))
    gradients(model, *batch(steps - 1, mesh))
    with Collectives() as seen:
        dlp.end_step(model)
    return dlp.state_dict(model), seen.count("allreduce")


@pytest.mark.ranks(4)
def test_slots_are_equal_on_all_ranks_after_one_all_reduce_and_close_to_those_of_one_rank(ranks):
    (one, _), *_ = ranks(1).run(slots_after, 3, {"tp": 1})
    for sizes, fsdp in (({"tp": 2}, False), ({"tp": 2, "dp_shard": 2}, True), ({"dp_shard": 4}, True)):
        of_ranks = ranks(2 if sizes == {"tp": 2} else 4).run(slots_after, 3, sizes, fsdp)
        for state, reductions in of_ranks:
            assert reductions == 1
            assert_all_bit_equal(state, of_ranks[0][0])
        for key, tensor in of_ranks[0][0].items():
            # With dp_shard the scales of dy differ, because `train` multiplies the loss by dp_shard to undo FSDP's average
            if key.startswith("slots.") and (".dy." not in key or "dp_shard" not in sizes):
                assert torch.allclose(tensor, one[key], rtol=0.03), f"{sizes} {key}: {tensor} {one[key]}"


def saved_and_loaded(own: bool) -> tuple[float, float, Any]:
    """The scale of x on this rank before and after a checkpoint, and the shape of the scale in the checkpoint. `own`:
    each rank has a separate scale (reduce_amax = False)."""
    recipe = dlp.recipe("fp8_delayed", reduce_amax=not own, amax_history_len=2)
    models = []
    for _ in range(2):
        model = nn.Sequential(Linear(32, 32, recipe=recipe))
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
        models.append(model)
    pass_through(models[0], torch.full((4, 32), 2.0 + dist.get_rank()))
    dlp.end_step(models[0])
    state = dlp.state_dict(models[0])
    assert dlp.load_state_dict(models[1], state) == []
    name = "slots.0.x.scale"
    return scales(models[0])["0.x"], scales(models[1])["0.x"], tuple(state[name].shape)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_holds_the_scales_of_every_rank_that_has_its_own(ranks, own):
    for rank, (before, after, shape) in enumerate(ranks(2).run(saved_and_loaded, own)):
        assert before == after == fp8_scale(448, 2.0 + rank if own else 3.0)
        assert shape == ((2,) if own else ())


class Experts(nn.Module):
    """One layer per rank: every rank has all layers and runs one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[dist.get_rank()](x)


def run_own_expert() -> dict[str, Tensor]:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    y = model(torch.full((4, 32), 2.0 + dist.get_rank()))
    y.backward(torch.ones_like(y))
    optimizer.step()
    return dlp.state_dict(model)


@pytest.mark.ranks(2)
def test_layers_that_run_on_some_ranks_hang_nobody(ranks):
    first, second = ranks(2).run(run_own_expert)
    for key in first:
        assert_bit_equal(second[key], first[key], key)
    assert first["slots.experts.0.x.scale"] == fp8_scale(448, 2) and first["slots.experts.1.x.scale"] == fp8_scale(
        448, 3
    )


def save_with(sizes: dict[str, int], group: str) -> dict[str, Tensor]:
    mesh = worker.mesh(**sizes)
    model = net(SHORT, mesh, amax_group=group)
    model.optimizer.param_groups[0]["lr"] = 0.0  # because ranks of dp_shard would diverge without FSDP
    train(model, mesh, range(3))
    return dlp.state_dict(model)


def load_with(sizes: dict[str, int], group: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    mesh = worker.mesh(**sizes)
    model = net(SHORT, mesh, amax_group=group)
    told = dlp.load_state_dict(model, state)
    assert session_of(model).steps == 3
    return dlp.state_dict(model), told


@pytest.mark.ranks(4)
def test_slots_load_on_another_mesh(ranks):
    saved = ranks(4).run(save_with, {"tp": 2, "dp_shard": 2}, "auto")[0]
    for world, sizes in ((1, {"tp": 1}), (2, {"tp": 2})):
        for loaded, told in ranks(world).run(load_with, sizes, "auto", saved):
            assert told == []
            assert_all_bit_equal(loaded, saved)


@pytest.mark.ranks(4)
@pytest.mark.full  # the test above loads slots on another mesh
def test_slots_of_a_narrower_group_are_saved_by_rank_and_merged_elsewhere(ranks):
    saved = ranks(4).run(save_with, {"tp": 2, "dp_shard": 2}, "tp")[0]
    key = "slots.blocks.0.gate.x"
    assert saved[f"{key}.scale"].shape == (4,) and saved[f"{key}.history"].shape == (4, 4)
    scale = saved[f"{key}.scale"]
    assert scale[0] == scale[1] and scale[2] == scale[3] and scale[0] != scale[2], "dp ranks have other tokens"
    for loaded, _ in ranks(4).run(load_with, {"tp": 2, "dp_shard": 2}, "tp", saved):
        assert_bit_equal(loaded[f"{key}.scale"], scale)
    for loaded, _ in ranks(2).run(load_with, {"tp": 2}, "tp", saved):
        assert_bit_equal(loaded[f"{key}.history"], saved[f"{key}.history"].amax(0))
        assert loaded[f"{key}.scale"] == fp8_scale(448, saved[f"{key}.history"].amax().item())
