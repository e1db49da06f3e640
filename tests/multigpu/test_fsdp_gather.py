"""FSDP gathers weights as codes and scales: for every recipe, the gathered operand has the bits of a cast of the
unsharded weight, and at most about half of the bf16 bytes are sent. Where weights are gathered as values, a message
states the reason."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.comm.collectives import all_gather
from dlp.comm.mesh import ParallelDims
from dlp.parallel.linear.quantize import quantize
from dlp.parallel.linear.state import Use
from dlp.parallel.model.session import session_of
from dlp.parallel.weight import sharded as shards
from dlp.quant.integers import IntScaling
from dlp.quant.recipe import Recipe, both
from tests import pool as worker
from tests.cases import BY_SCALES, RECIPES, few, nightly
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.net import Net
from tests.shardnet import BATCH, SEQUENCE, backward, shardnet, tensors, train, whole

PACKED = Recipe("int4 in groups", *[both(IntScaling(4, 32, symmetric=False))] * 3)
QUANTIZED = [recipe for recipe in BY_SCALES if recipe != "bf16"]
MESHES = [({"dp_shard": 2}, 2), ({"dp_shard": 2, "tp": 2}, 4)]
SIZES = {world: sizes for sizes, world in MESHES}


class GatheredBytes(TorchDispatchMode):
    """Context that counts, in `total`, the bytes that all-gathers of more than `least` bytes write on this rank."""

    def __init__(self, least: int = 1 << 14) -> None:
        super().__init__()
        self.total, self._least = 0, least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather_base" in func._schema.name:
            self.total += args[0].nbytes * (args[0].nbytes > self._least)
        return func(*args, **(kwargs or {}))


def trained(recipe: Any, sizes: dict[str, int], keywords: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Run two steps and two more microbatches; return the losses, the unsharded parameters and gradients at the end,
    and the bytes gathered in the last microbatch."""
    mesh = worker.mesh(**sizes)
    model = shardnet(recipe, mesh, **keywords)
    losses = [*train(model, mesh, range(2)), backward(model, mesh, 98)]
    with GatheredBytes() as gathered:
        losses.append(backward(model, mesh, 99))
    return losses, tensors(model), gathered.total


@pytest.mark.parametrize(
    ("world", "recipe"),
    few([*((2, recipe) for recipe in RECIPES), nightly(2, PACKED), nightly(4, "nvfp4")], ("nvfp4",)),
    ids=str,
)
def test_losses_and_gradients_do_not_depend_on_what_travels(ranks, recipe, world):
    sizes = SIZES[world]
    quantized = ranks(world).run(trained, recipe, sizes, {})
    plain = ranks(world).run(trained, recipe, sizes, {"quantized_gather": False})
    for (losses, found, gathered), (losses_off, expected, gathered_off) in zip(quantized, plain, strict=True):
        assert losses == losses_off
        assert_all_bit_equal(found, expected)
        share = {"bf16": 1.0, "nvfp4": 0.285, "int4 in groups": 0.34}.get(str(recipe), 0.52)
        if sizes == MESHES[0][0]:  # with sequence parallelism, activations are gathered too
            assert gathered <= share * gathered_off, "of what would be gathered in bf16"


def spoil(model: Net, how: str, rank: int) -> None:
    """Give shards different amaxes, by random factors per row that grow with the rank; then, if `how` says so,
    set the shard of rank 1 to zero, or put a NaN in the shard of rank 0."""
    for parameter in model.parameters():
        local = parameter.to_local()
        local.mul_((1 + rank * torch.rand(local.shape[:1], device=local.device)).view(-1, *[1] * (local.dim() - 1)))
        if how == "zero shard" and rank == 1:
            local.zero_()
        if how == "nan" and rank == 0:
            local.view(-1)[5] = torch.nan


def arrivals(recipe: Any, sizes: dict[str, int], how: str) -> int:
    """Assert that the operands that forward and backward gather have the bits of the cast of the unsharded weight; return
    the number of compared parts."""
    mesh = worker.mesh(**sizes)
    model = shardnet(recipe, mesh)
    train(model, mesh, range(1))
    with torch.no_grad():
        spoil(model, how, mesh["dp_shard"].get_local_rank())
    dlp.end_step(model)
    compared = 0
    for backwards in (False, True):
        with patch.object(shards, "in_backward", lambda now=backwards: now):
            for block in model.blocks:
                block.unshard()
        for shard in session_of(model).weights():
            assert shard.why is None, shard.why
            assert len(shard.rows.shard()) * 2 == shard.rows.shape[0]
            (values,) = all_gather((shard.rows.shard(),), (0,), shard.rows.group).wait()
            use = Use(shard.bound, values.new_zeros(()), torch.bfloat16, False)
            orientations = (not backwards, backwards)
            (both,) = quantize(shard.bound, "w", [values.bfloat16()], orientations, members=[shard.name], record=False)
            expected = both.at(columnwise=backwards)
            found = shard.read(use, columnwise=backwards)
            assert shard._more == {False: [], True: []}, "it was there"
            for part, a, b in zip(found.format.parts, found.parts, expected.parts, strict=True):
                assert_bit_equal(a, b, f"{shard.name} {part.name}")
                compared += 1
        for block in model.blocks:
            block.reshard()
    return compared


@pytest.mark.parametrize(
    ("recipe", "sizes", "world"),
    few(
        [
            *(nightly(recipe, *MESHES[0]) for recipe in QUANTIZED),  # the next test has them with a NaN or zero shard
            *((recipe, *MESHES[1]) for recipe in ("fp8_current", "fp8_block", "nvfp4")),
            ("mxfp8", {"dp_shard": 2, "dp_replicate": 2}, 4),
        ],
        ("nvfp4",),  # test_zero_shards_and_nan_arrive_as_they_would_be_cast also has fp8_block
    ),
    ids=str,
)
def test_what_arrives_is_the_cast_of_the_whole_weight(ranks, recipe, sizes, world):
    assert min(ranks(world).run(arrivals, recipe, sizes, "gauss")) >= 2 * 6 * 2, "two passes, six weights, two parts"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "how"),
    few(
        [
            *((recipe, "nan") for recipe in [*QUANTIZED, "int8"]),
            nightly("fp8_current", "zero shard"),
            ("nvfp4", "zero shard"),
        ],
        ("fp8_block", "nvfp4"),
    ),
)
def test_zero_shards_and_nan_arrive_as_they_would_be_cast(ranks, recipe, how):
    ranks(2).run(arrivals, recipe, MESHES[0][0], how)


Scenario = Callable[[Net, DeviceMesh], list[float]]


def scenario(name: str, recipe: Any, sizes: dict[str, int], on: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run SCENARIOS[name] with a model that is constructed with `options`, and return the results. `on`: FSDP gathers
    codes, not values."""
    mesh = worker.mesh(**sizes)
    model = shardnet(recipe, mesh, quantized_gather=on, **options)
    losses = SCENARIOS[name](model, mesh)
    runtime = session_of(model)
    why = {shard.name: shard.why for shard in runtime.weights()}
    return {"losses": losses, "tensors": tensors(model), "why": why, "said": sorted(runtime.noted)}


def both_ways(
    ranks: Any, world: int, name: str, recipe: Any, sizes: dict[str, int], **options: Any
) -> list[dict[str, Any]]:
    """Run a scenario with quantized gathers and with gathers of values, and assert that the results have equal bits and
    are finite; return the results with quantized gathers."""
    quantized, plain = (ranks(world).run(scenario, name, recipe, sizes, on, options) for on in (True, False))
    for found, expected in zip(quantized, plain, strict=True):
        assert found["losses"] == expected["losses"]
        assert_all_bit_equal(found["tensors"], expected["tensors"])
        assert all(torch.isfinite(value).all() for value in found["tensors"].values())
    return quantized


def plain_training(model: Net, mesh: DeviceMesh) -> list[float]:
    """Run two steps, and two microbatches of a third step."""
    return [*train(model, mesh, range(2)), backward(model, mesh, 98), backward(model, mesh, 99)]


def one_step(model: Net, mesh: DeviceMesh) -> list[float]:
    """Run one step, for tests without a comparison."""
    return train(model, mesh, range(1))


def accumulation(model: Net, mesh: DeviceMesh) -> list[float]:
    """Run two steps of three microbatches, and one more microbatch. Within a step, weights stay gathered and gradients are
    not reduced before the last microbatch."""
    losses = []
    for step in range(2):
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            model.set_reshard_after_backward(i == 2)
            losses.append(backward(model, mesh, 3 * step + i))
        model.optimizer.step()
        model.optimizer.zero_grad()
    return [*losses, backward(model, mesh, 99)]


def recomputation(model: Net, mesh: DeviceMesh) -> list[float]:
    model.wrap = lambda block, x: checkpoint(block, x, use_reentrant=False)
    return plain_training(model, mesh)


def recomputation_inside(model: Net, mesh: DeviceMesh) -> list[float]:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return plain_training(model, mesh)


def frozen(model: Net, mesh: DeviceMesh) -> list[float]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate" not in name)
    return plain_training(model, mesh)


def swaps(model: Net, mesh: DeviceMesh) -> list[float]:
    """Change the recipe after every step, each time after a forward without gradients; then train without changes."""
    losses = []
    for step, recipe in enumerate(("nvfp4", "fp8_delayed", "bf16", "fp8_block")):
        losses += train(model, mesh, range(step, step + 1))
        with torch.no_grad():
            losses.append(backward_free(model, mesh))
        dlp.set_recipe(model, "blocks.1.**" if step % 2 else "**", recipe)
    return [*losses, *plain_training(model, mesh)]


def backward_free(model: Net, mesh: DeviceMesh) -> float:
    x = torch.ones(
        BATCH // ParallelDims.from_mesh(mesh).dp_size,
        SEQUENCE,
        model.size,
        dtype=torch.bfloat16,
        device=worker.device(),
    )
    return model(x).float().sum().item()


def swaps_in_flight(model: Net, mesh: DeviceMesh) -> list[float]:
    """Change the recipe between a forward and the backward; gradients must be computed with the recipe of the
    forward."""
    losses = train(model, mesh, range(1))
    for recipe in ("nvfp4", "bf16", "mxfp8"):
        x = torch.full(
            (BATCH // ParallelDims.from_mesh(mesh).dp_size, SEQUENCE, model.size), 0.5, device=worker.device()
        )
        loss = model(x.bfloat16()).float().square().sum()
        dlp.set_recipe(model, "**", recipe)
        loss.backward()
        losses.append(loss.item())
    return losses


def regions(model: Net, mesh: DeviceMesh) -> list[float]:
    """Train one step in each of several autocast regions (mxfp8, no recipe given, nvfp4, disabled), and then one step
    outside of a region."""
    losses = []
    for i, asked in enumerate(
        ({"recipe": dlp.recipe("mxfp8")}, {}, {"recipe": dlp.recipe("nvfp4")}, {"enabled": False})
    ):
        with dlp.autocast(**asked):
            losses += train(model, mesh, range(i, i + 1))
    return losses + train(model, mesh, range(9, 10))


def loading(model: Net, mesh: DeviceMesh) -> list[float]:
    """Load weights after the first step, and write weights directly after the second."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, mesh, range(1))
    model.load_state_dict(before)
    losses += train(model, mesh, range(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1.5)
    dlp.end_step(model)
    return losses + plain_training(model, mesh)


SCENARIOS: dict[str, Scenario] = {
    "loading": loading,
    "plain": plain_training, "one step": one_step, "accumulation": accumulation, "recomputation": recomputation,
    "frozen": frozen, "recomputation inside": recomputation_inside, "swaps": swaps, "in flight": swaps_in_flight,
    "regions": regions,
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("accumulation", "fp8_current"), nightly("accumulation", "mxfp8"), ("recomputation", "mxfp8"),
        nightly("recomputation inside", "fp8_current"), ("frozen", "mxfp8"), nightly("loading", "fp8_current"),
    ],
)  # fmt: skip
def test_training_that_reads_weights_in_other_ways(ranks, name, recipe):
    (first, _) = both_ways(ranks, 2, name, recipe, {"dp_shard": 2})
    assert not any(first["why"].values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", [nightly("fp8_delayed"), "mxfp8"])
def test_weights_that_stay_gathered_through_forward_and_backward(ranks, recipe):
    both_ways(ranks, 2, "plain", recipe, {"dp_shard": 2}, reshard_after_forward=False)


def late_gathers(recipe: str) -> list[int]:
    """Count the weights that are gathered at the first read, by step, if weights stay gathered from forward to
    backward."""
    mesh = worker.mesh(dp_shard=2)
    model = shardnet(recipe, mesh, reshard_after_forward=False)
    counts = []
    for step in range(3):
        with patch.object(shards, "all_gather", wraps=all_gather) as late:
            train(model, mesh, range(step, step + 1))
        counts.append(late.call_count)
    return counts


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "first"), [("fp8_current", 0), ("mxfp8", 6)])
def test_what_was_missing_once_travels_with_the_rest(ranks, recipe, first):
    assert ranks(2).run(late_gathers, recipe) == [[first, 0, 0]] * 2


@pytest.mark.parametrize(
    ("name", "sizes", "world"),
    [
        ("swaps", {"dp_shard": 2}, 2),
        nightly("in flight", {"dp_shard": 1}, 1),
        nightly("in flight", *MESHES[1]),
    ],
)
@pytest.mark.slow
def test_recipe_swaps(ranks, name, sizes, world):
    both_ways(ranks, world, name, "bf16", sizes, size=256)  # shards have complete scaling blocks in every recipe


@pytest.mark.ranks(2)
def test_regions_under_other_recipes_gather_values(ranks):
    first, _ = both_ways(ranks, 2, "regions", "fp8_current", {"dp_shard": 2})
    assert (
        "layers that run under the recipe mxfp8 of an autocast region gather their weights a second time"
        in first["said"]
    )


@pytest.mark.parametrize(
    ("world", "recipe"),
    few(
        [*((2, recipe) for recipe in QUANTIZED), nightly(4, "fp8_current"), pytest.param(4, "nvfp4")],
        ("fp8_delayed",),
    ),
)
def test_uneven_and_empty_shards(ranks, recipe, world):
    """The 9 rows make uneven shards, and leave an empty shard on the last of 4 ranks. Only formats with one scale per
    tensor are gathered as codes then; with other formats the weights are gathered as values."""
    travels = recipe in ("fp8_current", "fp8_delayed")
    if travels:
        first, *_ = both_ways(ranks, world, "plain", recipe, {"dp_shard": world}, size=9)
    else:
        first, *_ = ranks(world).run(scenario, "one step", recipe, {"dp_shard": world}, True, {"size": 9})
        assert all(torch.isfinite(value).all() for value in first["tensors"].values())
    refused = set(first["why"].values())
    assert (refused == {None}) == travels, refused
    assert all(any(why in said for said in first["said"]) for why in refused if why), "the plan says so"


def compiled_training(on: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Train with a first block that is compiled before it is sharded, as in the launcher; return results and the number
    of graphs. On CPUs the backend is aot_eager, because inductor compiles for ten seconds; and with gathers of values
    (`on` = False) nothing is compiled, because aot_eager has the bits of eager code."""
    torch._dynamo.utils.counters.clear()
    mesh = worker.mesh(dp_shard=2)
    backend = "inductor" if worker.device().type == "cuda" else "aot_eager" if on else ""
    model = shardnet("fp8_current", mesh, compiled=backend, quantized_gather=on, size=64)
    losses = train(model, mesh, range(2))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return losses, tensors(model), graphs


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_compiled_blocks_read_gathered_weights(ranks):
    """The sums of inductor differ from eager sums, but are equal for both kinds of gathers."""
    quantized, plain = (ranks(2).run(compiled_training, on) for on in (True, False))
    for (losses, found, graphs), (losses_off, expected, graphs_off) in zip(quantized, plain, strict=True):
        assert losses == losses_off and graphs == (graphs_off or 2), "as many as where values travel"
        assert_all_bit_equal(found, expected)


VARIANTS: list[Any] = [
    nightly({"name": "fp8_current", "amax_scope": "all"}, {}, None),
    ({"name": "fp8_current"}, {"amax_group": "world"}, None),
    nightly({"name": "fp8_delayed", "amax_history_len": 2}, {"amax_group": "tp"}, None),
    nightly({"name": "nvfp4", "disable_2d_quantization": True}, {}, None),
    nightly({"name": "fp8_current", "high_precision": ["dgrad"]}, {}, None),
    nightly({"name": "mxfp8", "high_precision": ["fprop"]}, {}, None),
    ({"name": "fp8_rowwise"}, {"amax_group": "world"},
     "the amax group would mix the scales of different rows of fp8_rowwise[e4m3]"),
]  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("recipe", "options", "why"), VARIANTS, ids=str)
def test_options_that_concern_weights(ranks, recipe, options, why):
    world = 4 if options else 2  # options of the amax group matter only if there is tp as well
    if why is None:
        first, *_ = both_ways(ranks, world, "plain", recipe, SIZES[world], options=options)
    else:  # both kinds of gathers would send values, so there is nothing to compare
        first, *_ = ranks(world).run(scenario, "one step", recipe, SIZES[world], True, {"options": options})
    assert set(first["why"].values()) == {why}


@pytest.mark.ranks(2)
def test_delayed_scales_of_weights_are_shared_though_ranks_share_no_others(ranks):
    recipe = {"name": "fp8_delayed", "reduce_amax": False, "amax_history_len": 2}
    first, _ = both_ways(ranks, 2, "plain", recipe, {"dp_shard": 2})
    assert set(first["why"].values()) == {None}


def staged_after_loading() -> tuple[dict[str, float], dict[str, float]]:
    """Return the staged amaxes of delayed scaling after a microbatch, and after a second microbatch with a tenth of the
    input. Halved weights are loaded between the two."""
    mesh = worker.mesh(dp_shard=2)
    model = shardnet({"name": "fp8_delayed", "amax_history_len": 2}, mesh)
    train(model, mesh, range(1))
    table, found = session_of(model).scaling.table, []
    for factor in (1.0, 0.1):
        x = torch.full((BATCH // 2, SEQUENCE, model.size), factor, device=worker.device())
        (model(x.bfloat16()).float() * factor).sum().backward()
        found.append(dict(zip(table.names, table.staging.tolist(), strict=True)))
        halves = {name: value * (0.5 if value.dim() == 2 else 1.0) for name, value in model.state_dict().items()}
        model.load_state_dict(halves)
    return found[0], found[1]


@pytest.mark.ranks(2)
def test_late_casts_leave_what_others_have_staged_and_replace_the_amaxes_of_weights(ranks):
    for first, second in ranks(2).run(staged_after_loading):
        kinds = {name.rpartition(".")[2] for name in first}
        assert kinds == {"x", "w", "dy"} and all(first.values())
        for name, amax in first.items():
            assert second[name] == amax / 2 if name.endswith(".w") else second[name] >= amax, name


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "size"),
    [("fp8_current", 0), nightly("fp8_current", 17), nightly("nvfp4", 0), nightly("nvfp4", 17)],
)
@pytest.mark.slow
def test_casts_from_the_master_weights(ranks, recipe, size):
    """With quantize_from_master, fp32 weights are cast without a rounding to bf16 first, also if values are gathered, as for
    nvfp4 with 17 rows."""
    first, _ = both_ways(ranks, 2, "plain", recipe, {"dp_shard": 2}, quantize_from_master=True, size=size)
    rounded = ranks(2).run(scenario, "plain", recipe, {"dp_shard": 2}, True, {"size": size})[0]
    assert first["losses"] != rounded["losses"], "the option does something"
    assert (set(first["why"].values()) == {None}) == (recipe == "fp8_current" or not size)


@pytest.mark.parametrize(
    ("sizes", "world", "down"), [(*MESHES[0], "mxfp8"), nightly(*MESHES[1], "bf16")], ids=["dp2", "dp2-tp2"]
)
def test_several_recipes_in_one_unit(ranks, down, sizes, world):
    both_ways(ranks, world, "plain", "fp8_current", sizes, down=down)


class Tied(nn.Module):
    """Embedding, a linear, and a head that shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embedding(tokens)))


def tied(on: bool) -> tuple[dict[str, Tensor], dict[str, str | None]]:
    mesh = worker.mesh(dp_shard=2)
    torch.manual_seed(0)
    model = Tied().to(worker.device())
    dlp.convert(model, [{"name": "all", "match": ["**"], "recipe": "fp8_current"}], mesh)
    for module in (*model.blocks, model):
        dlp.fully_shard(module, mesh=mesh, quantized_gather=on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    for step in range(2):
        model(torch.arange(step, 16 + step, device=worker.device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tensors(model), {shard.name: shard.why for shard in session_of(model).weights()}


@pytest.mark.ranks(2)
def test_a_tied_weight_travels_in_high_precision(ranks):
    for (found, why), (expected, _) in zip(ranks(2).run(tied, True), ranks(2).run(tied, False), strict=True):
        assert why == {"blocks.0": None, "head": "several modules share the weight"}
        assert_all_bit_equal(found, expected)


def saved(recipe: str, path: str) -> dict[str, Tensor]:
    """Train with all ranks on dp_shard, and save with torch's functions. Return the saved tensors."""
    mesh = worker.mesh(dp_shard=dist.get_world_size())
    model = shardnet(recipe, mesh, adamw=True)
    train(model, mesh, range(2))
    parameters, states = get_state_dict(model, model.optimizer)
    assert {type(part) for part in tree_leaves((parameters, states)) if isinstance(part, Tensor)} <= {DTensor, Tensor}
    locals_ = [part._local_tensor for part in tree_leaves((parameters, states)) if isinstance(part, DTensor)]
    assert locals_ and all(type(part) is Tensor and not vars(part) for part in locals_)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=path)
    return {**tensors(model), "state": whole(model.optimizer.state[model.blocks[0].up.weight]["exp_avg"])}


def loaded(recipe: str, path: str) -> tuple[dict[str, Tensor], list[float]]:
    """Load the saved state into a model that has trained, and so has casts of other weights; return the tensors after the
    load, and the losses of a further step."""
    mesh = worker.mesh(dp_shard=dist.get_world_size())
    model = shardnet(recipe, mesh, adamw=True)
    train(model, mesh, range(5, 6))
    parameters, states = get_state_dict(model, model.optimizer)
    dcp.load({"model": parameters, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, model.optimizer, model_state_dict=parameters, optim_state_dict=states)
    restored = {**tensors(model), "state": whole(model.optimizer.state[model.blocks[0].up.weight]["exp_avg"])}
    return restored, train(model, mesh, range(7, 8))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("onto", "using"), [(1, "fp8_current"), nightly(1, "nvfp4"), nightly(4, "fp8_current")])
@pytest.mark.slow
def test_checkpoints_are_plain_and_know_no_recipe(ranks, tmp_path, onto, using):
    written = ranks(2).run(saved, "nvfp4", str(tmp_path / "checkpoint"))[0]
    restored, losses = ranks(onto).run(loaded, using, str(tmp_path / "checkpoint"))[0]
    assert_all_bit_equal(restored, written)
    assert sum(losses) > 0


def freed(on: bool) -> list[bool]:
    mesh = worker.mesh(dp_shard=2)
    model = shardnet("fp8_current", mesh, quantized_gather=on)
    train(model, mesh, range(2))
    watched = [weakref.ref(kept) for kept in (model, model.blocks[0].up.core, model.blocks[0].up.weight._local_tensor)]
    del model
    gc.collect()
    return [reference() is None for reference in watched]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on", [True, nightly(False)])
def test_a_model_that_is_let_go_frees_its_memory(ranks, on):
    assert ranks(2).run(freed, on) == [[True] * 3] * 2


def unattached() -> list[list[str]]:
    """Logged differences from the plan of a model without `dlp.attach`, after a forward without and with gradients."""
    mesh = worker.mesh(dp_shard=2)
    model = nn.Sequential(nn.Linear(32, 32)).to(worker.device())
    dlp.convert(model, [{"name": "all", "match": ["*"], "recipe": "fp8_current"}], mesh)
    dlp.fully_shard(model, mesh=mesh)
    noted = []
    for training in (False, True):
        with torch.set_grad_enabled(training):
            model(torch.ones(4, 32, device=worker.device()))
        noted.append(sorted(session_of(model).noted))
    return noted


@pytest.mark.ranks(2)
def test_without_a_step_boundary_the_plan_says_what_travels(ranks):
    assert ranks(2).run(unattached) == [[[], ["w is gathered in high precision: dlp.attach has not been called"]]] * 2
