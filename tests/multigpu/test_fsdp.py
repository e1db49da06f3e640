"""FSDP2 over tensor-parallel layers: combinations of axes, uneven shards, initial weights on every mesh, and casts of
weights once per step, unsharded or by shard.

The file test_fsdp_gather.py tests gathers.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from dlp.comm.mesh import ParallelDims
from dlp.parallel.casts import Cast, CastBatch, Orientations
from dlp.parallel.linear import quantize as quantization
from dlp.parallel.weight import sharded as shards
from launch.models.initial_weights import init_weights, initial_value
from launch.models.modules import Llama
from launch.models.parallel import parallel_groups
from launch.models.settings import Model
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_bit_equal, assert_close
from tests.net import full
from tests.paired_models import without_programs

# Shards have unequal sizes: the last of 4 FSDP shards of 9 rows is empty, and with tp = 2 the MLP has 11 rows per tp
# rank for 2 FSDP shards.
ODD = Model(layers=2, hidden=9, ffn=22, heads=4, kv_heads=2, head_dim=2, vocab=30)
MESHES = [
    {"tp": 1, "dp_shard": 1}, {"tp": 2, "dp_shard": 1}, {"tp": 1, "dp_shard": 2}, {"tp": 1, "dp_shard": 4},
    {"tp": 2, "dp_shard": 2}, {"tp": 1, "dp_shard": 2, "dp_replicate": 2}, {"tp": 2, "dp_shard": 1, "dp_replicate": 2},
]  # fmt: skip
CHOSEN = [MESHES[3]]  # the mesh with an empty shard


def world_of(axes: dict[str, int]) -> int:
    return torch.Size(axes.values()).numel()


def sharded(config: Model, axes: dict[str, int], *, sequence_parallel: bool = False) -> tuple[Llama, Any]:
    mesh = worker.mesh(**axes)
    with torch.device("meta"):
        model = Llama(config, torch.float32)
    dlp.convert(model, parallel_groups(config, sequence_parallel), mesh, batch=(2, 8))
    for block in model.model.layers:
        dlp.fully_shard(block, mesh=mesh)
    dlp.fully_shard(model, mesh=mesh)
    model.to_empty(device=worker.device())
    init_weights(model, seed=4)
    return model, mesh


def initial_weights(axes: dict[str, int], tied: bool) -> tuple[dict[str, Tensor], int]:
    """Return the unsharded initial parameters by name, and the number of parameter elements on this rank."""
    config = Model(**{**vars(ODD), "tie_embeddings": tied})
    model, _ = sharded(config, axes)
    return (
        {name: full(parameter) for name, parameter in model.named_parameters()},
        sum(parameter._local_tensor.numel() for parameter in model.parameters()),
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("axes", "world"), [(axes, world_of(axes)) for axes in MESHES], ids=str)
def test_initial_weights_are_the_same_on_every_mesh(ranks, axes, world, tied):
    config = Model(**{**vars(ODD), "tie_embeddings": tied})
    results = ranks(world).run(initial_weights, axes, tied)
    with torch.device("meta"):
        names = [name for name, _ in Llama(config).named_parameters()]
    for weights, _ in results:
        assert list(weights) == names
        for name, value in weights.items():
            assert_bit_equal(value, initial_value(name, value.shape, config, 4), name)
    held, whole = sum(numel for _, numel in results), sum(value.numel() for value in results[0][0].values())
    norms = sum(value.numel() for name, value in results[0][0].items() if name.endswith("norm.weight"))
    copies = axes.get("dp_replicate", 1)
    assert held == copies * (whole + (axes["tp"] - 1) * norms), "every element is on one rank, but for the norms"


def two_steps(axes: dict[str, int], sequence_parallel: bool) -> list[Tensor]:
    """Return the unsharded parameters after two steps on the same four sequences."""
    model, mesh = sharded(ODD, axes, sequence_parallel=sequence_parallel)
    dp = axes["dp_shard"] * axes.get("dp_replicate", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    text = torch.randint(0, ODD.vocab, (4, 9), generator=torch.Generator().manual_seed(1)).to(worker.device())
    mine = text.chunk(dp)[dist.get_rank() // axes["tp"]]
    for _ in range(2):
        # Two sequences per microbatch; with 4 data-parallel ranks, each rank has one sequence
        for tokens in mine.split(2) if dp < 4 else [mine]:
            loss = dlp.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].reshape(-1), mesh) / 32
            (loss * dp).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("axes", "sequence_parallel", "world"),
    [
        (axes, axes["tp"] > 1, world_of(axes)) if axes in CHOSEN else nightly(axes, axes["tp"] > 1, world_of(axes))
        for axes in MESHES[1:]
    ]
    + [nightly(MESHES[1], False, 2)],
    ids=str,
)
def test_uneven_shards_train_alike(ranks, axes, sequence_parallel, world):
    expected = ranks(1).run(two_steps, MESHES[0], False)[0]
    for found in ranks(world).run(two_steps, axes, sequence_parallel):
        for i, (value, reference) in enumerate(zip(found, expected, strict=True)):
            assert_close(value, reference, 1e-5, f"parameter {i}")


def axes_of_fsdp() -> list[tuple[str, ...]]:
    meshes = [
        worker.mesh(dp_shard=2, tp=2),
        worker.mesh(dp_replicate=2, dp_shard=2),
        worker.mesh(dp_replicate=2, dp_shard=1, tp=2),
    ]
    return [ParallelDims.from_mesh(mesh).fsdp_mesh.mesh_dim_names for mesh in meshes]


@pytest.mark.ranks(4)
def test_fsdp_replicates_where_the_mesh_does(ranks):
    expected = [("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard")]
    assert ranks(4).run(axes_of_fsdp) == [expected] * 4


class Casts:
    """Context that counts the casts of weights. The attribute `weights` is the count."""

    def __init__(self) -> None:
        self.weights = 0

    def __enter__(self) -> Casts:
        quantize = quantization.quantize

        def counting(spec: Any, tensor: str, values: Any, orientations: Orientations, **options: Any) -> Any:
            self.weights += len(values) * (tensor == "w")
            return quantize(spec, tensor, values, orientations, **options)

        make = CastBatch.make

        def counting_batched(batch: CastBatch, casts: list[Cast]) -> Any:
            self.weights += len(casts)
            return make(batch, casts)

        self._patches = [patch.object(module, "quantize", counting) for module in (quantization, shards)]
        self._patches += [patch.object(CastBatch, "make", counting_batched)]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._patches:
            each.stop()


def casts_per_step(under_fsdp: bool) -> list[int]:
    """Return, for each of two steps, the number of casts of weights in the forwards and backwards of three microbatches,
    and in the step boundary."""
    mesh = worker.mesh(tp=1, dp_shard=dist.get_world_size())
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(worker.device())
    dlp.convert(model, [{"name": "all", "match": ["*"], "recipe": "fp8_current"}], mesh)
    if under_fsdp:
        dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    dlp.end_step(model)
    counts = []
    for _ in range(2):
        with Casts() as microbatches:
            for _ in range(3):
                model(torch.ones(4, 16, device=worker.device())).sum().backward()
        with Casts() as boundary:
            optimizer.step()
            optimizer.zero_grad()
        counts += [microbatches.weights, boundary.weights]
    return counts


@pytest.mark.ranks(2)
def test_weights_are_cast_once_per_step(ranks):
    (*_, second, boundary) = ranks(2).run(casts_per_step, False)[0]
    assert (second, boundary) == (0, 2), "two layers, at the boundary only"
    assert ranks(2).run(casts_per_step, True)[0] == [0, 2] * 2, "shards, at the boundary too"


def after_loading() -> tuple[Tensor, Tensor, Tensor]:
    """Load other weights after weights were cast. Return y before and after the load, and y of the model from which the
    weights were loaded."""
    mesh = worker.mesh(tp=dist.get_world_size())

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16, bias=False)).to(worker.device())
        dlp.convert(model, [{"name": "all", "match": ["*"], "recipe": "fp8_current", "style": "column"}], mesh)
        return model

    model, other = make(1), make(2)
    x = torch.ones(4, 16, device=worker.device())
    dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dlp.end_step(model)
    model(x)
    dlp.end_step(model)
    before = model(x)
    model.load_state_dict(other.state_dict())
    return before, model(x), other(x)


@pytest.mark.ranks(2)
def test_loaded_weights_replace_cached_operands(ranks):
    for before, after, expected in ranks(2).run(after_loading):
        assert_bit_equal(after, expected)
        assert not torch.equal(before, after)


def casts_of_one_shard(weight_cache: str) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Train the model of the README with FSDP (dp_shard = 1) and without FSDP. Return the number of weight casts in
    forwards and backwards of each step with FSDP, the losses with FSDP, and the losses without FSDP."""
    losses: dict[bool, list[Tensor]] = {}
    counts = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(worker.device())
        mesh, losses[sharded] = worker.mesh(tp=2), []
        groups = [dlp.LayerGroup("all", "**", recipe="fp8_current")]
        dlp.convert(
            model, [*groups, dlp.LayerGroup("up", "0", style="column"), dlp.LayerGroup("down", "2", style="row")], mesh
        )
        if sharded:
            dlp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        dlp.attach(model, optimizer, weight_cache=weight_cache)
        for _ in range(3):
            with without_programs(), patch.object(quantization, "quantize", wraps=quantization.quantize) as quantize:
                for seed in range(2):
                    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(worker.device())
                    loss = model(x).square().mean()
                    loss.backward()
                    losses[sharded].append(loss)
            counts += [sum(call.args[1] == "w" for call in quantize.call_args_list)] * sharded
            optimizer.step()
            optimizer.zero_grad()
    return counts, losses[True], losses[False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("weight_cache", "used"), [("step", 0), ("forward", 6)])
def test_weights_of_one_shard_are_cast_once_a_step(ranks, weight_cache, used):
    """With dp_shard = 1, FSDP gathers nothing. The step boundary casts the weights, or with weight_cache = "forward"
    each microbatch casts the weights, as without FSDP."""
    for counts, found, expected in ranks(2).run(casts_of_one_shard, weight_cache):
        assert counts[1:] == [used, used]
        assert torch.equal(torch.stack(found), torch.stack(expected))
