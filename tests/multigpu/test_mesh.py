"""build_mesh: sizes that do not fit the number of ranks are refused with both numbers, tp is the innermost axis, and
axes have names."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlp
from dlp.comm.mesh import AXES, ParallelDims, build_mesh
from launch.config import sections
from tests import pool as worker
from tests.refusals import may_raise, must_raise, refuses
from tests.syntax import nodes_in

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("world", "asked", "sizes"),
    [
        (8, {}, (1, 8, 1)),
        (8, {"tp": 2}, (1, 4, 2)),
        (8, {"tp": 2, "dp_replicate": 2}, (2, 2, 2)),
        (8, {"tp": -1, "dp_shard": 2}, (1, 2, 4)),
        (8, {"dp_replicate": -1, "dp_shard": 1, "tp": 8}, (1, 1, 8)),
        (1, {}, (1, 1, 1)),
    ],
)
def test_one_open_axis_takes_the_rest_of_the_world(world, asked, sizes):
    assert ParallelDims.build(world, **asked) == ParallelDims(*sizes)


@pytest.mark.parametrize(
    ("world", "asked", "message"),
    [
        (
            6,
            {"dp_shard": 2, "tp": 4},
            "world size 6 is not dp_replicate 1 x dp_shard 2 x tp 4: start 8 ranks, or set dp_shard or dp_replicate to -1",
        ),
        (
            6,
            {"tp": 4},
            "world size 6 is not a multiple of dp_replicate 1 x tp 4 = 4, so dp_shard = -1 cannot be filled: "
            "start a multiple of that many ranks by torchrun --nproc-per-node, or choose a smaller axis",
        ),
        (8, {"tp": -1}, "only one mesh axis may be -1; got dp_shard and tp"),
        (8, {"tp": 0}, "mesh axis tp must be at least 1, or -1 for the rest of the world; got 0"),
        (8, {"dp_replicate": -2}, "mesh axis dp_replicate must be at least 1, or -1 for the rest of the world; got -2"),
        (
            2,
            {"tp": 4},
            "world size 2 is not a multiple of dp_replicate 1 x tp 4 = 4, so dp_shard = -1 cannot be filled: "
            "start a multiple of that many ranks by torchrun --nproc-per-node, or choose a smaller axis",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(world, asked, message):
    assert must_raise(ValueError, ParallelDims.build, world, **asked) == message


def test_a_mesh_describes_itself():
    assert ParallelDims(1, 4, 2).describe("cuda") == "mesh: 8 cuda ranks = dp_replicate 1 x dp_shard 4 x tp 2"
    assert ParallelDims().describe("cpu") == "mesh: 1 cpu rank = dp_replicate 1 x dp_shard 1 x tp 1"


def test_names_of_axes_are_spelled_in_one_file():
    spelled = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for folder in ("dlp", "launch")
        for file, node in nodes_in(folder, (ast.Constant,))
        if node.value in AXES
    }
    keywords = "dlp/te_arguments.py"  # there "tp" is the name of an argument of layers
    settings = "launch/config/sections.py"  # repeats the names, because it must not import torch
    assert sections.AXES == AXES
    assert {place.partition(":")[0] for place in spelled} - {keywords, settings} == {"dlp/comm/mesh.py"}, sorted(
        spelled
    )


@pytest.mark.parametrize(("names", "said"), [(("tp",), "got tp: "), (None, "got no named axes: ")], ids=str)
def test_a_mesh_with_other_axes_is_refused(names, said):
    mesh = SimpleNamespace(mesh_dim_names=names, shape=(2,))
    with refuses(f"must have the axes dp_replicate, dp_shard, tp; {said}create the mesh with dlp.build_mesh"):
        ParallelDims.from_mesh(mesh)


def test_data_parallel_ranks_count_shards_first():
    place = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    mesh = SimpleNamespace(mesh_dim_names=AXES, shape=(2, 4, 2), get_local_rank=place.__getitem__)
    dims = ParallelDims.from_mesh(mesh)
    assert (dims.dp_rank, dims.dp_size, dims.world_size) == (1 * 4 + 2, 8, 16)


def places(**sizes: int) -> tuple[Any, ...]:
    dims = ParallelDims.from_mesh(worker.mesh(**sizes))
    groups = {axis: dist.get_process_group_ranks(dims.group(axis)) for axis in AXES}
    return dims, dims.dp_rank, {axis: dims.rank(axis) for axis in AXES}, groups, dims.group_names()


@pytest.mark.ranks(4)
def test_a_rank_knows_its_groups_and_its_place(ranks):
    for rank, (dims, dp_rank, place, groups, names) in enumerate(ranks(4).run(partial(places, dp_shard=2, tp=2))):
        assert (dims, dims.world_size, dims.dp_size) == (ParallelDims(1, 2, 2), 4, 2)
        assert place == {"dp_replicate": 0, "dp_shard": rank // 2, "tp": rank % 2} and dp_rank == rank // 2
        assert names == {(0, 1, 2, 3): "world", tuple(groups["tp"]): "tp", tuple(groups["dp_shard"]): "dp_shard"}
    for rank, (dims, dp_rank, _, _, names) in enumerate(ranks(4).run(partial(places, dp_replicate=2, dp_shard=2))):
        assert dp_rank == rank and dims.dp_size == 4 and dims.size("world") == 4
        assert set(names.values()) == {"world", "dp_replicate", "dp_shard"}
    for _, _, _, _, names in ranks(4).run(partial(places, tp=4)):
        assert names == {(0, 1, 2, 3): "tp"}, "on a mesh of one axis the world goes by its name"


def axes() -> tuple[tuple[str, ...], tuple[int, ...], dict[str, list[int]]]:
    mesh = worker.mesh(dp_shard=2, tp=2)
    groups = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES}
    return mesh.mesh_dim_names, tuple(mesh.shape), groups


@pytest.mark.ranks(4)
def test_tp_ranks_are_neighbours(ranks):
    for rank, (names, shape, groups) in enumerate(ranks(4).run(axes)):
        assert names == ("dp_replicate", "dp_shard", "tp") and shape == (1, 2, 2)
        assert groups["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["dp_shard"] == [rank % 2, rank % 2 + 2]
        assert groups["dp_replicate"] == [rank]


def refuse() -> str:
    return may_raise(ValueError, build_mesh, dp_shard=3, tp=1, device_type=worker.device().type)


@pytest.mark.ranks(2)
def test_a_real_world_is_checked(ranks):
    for message in ranks(2).run(refuse):
        assert message.startswith("world size 2 is not dp_replicate 1 x dp_shard 3 x tp 1: start 3 ranks, ")


def cpu_and_device_tensors() -> list[float]:
    """All-reduce a CPU tensor and a tensor of the device over a group of the mesh; return both sums."""
    group = worker.mesh(tp=2)["tp"].get_group()
    tensors = [torch.ones((), device=device) for device in ("cpu", worker.device())]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return [tensor.item() for tensor in tensors]


@pytest.mark.ranks(2)
def test_groups_carry_host_and_device_tensors(ranks):
    assert ranks(2).run(cpu_and_device_tensors) == [[2.0, 2.0]] * 2


def layers_of_a_mesh() -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the shapes of the weight shards of layers that get the full mesh as `tp`, and the errors of a layer, of
    `gather_tokens` and of an embedding about a mesh without the axis tp."""
    mesh = worker.mesh(tp=2)
    made = [
        dlp.ColumnParallelLinear(8, 6, tp=mesh, device=mesh.device_type),
        dlp.RowParallelLinear(8, 6, tp=mesh, device=mesh.device_type),
        dlp.Linear(8, 6, tp=mesh, device=mesh.device_type),
    ]
    shards = [tuple(layer.weight.to_local().shape) for layer in made]
    said = []
    x = torch.ones(4, 8, device=mesh.device_type)
    for use in (
        lambda: dlp.Linear(8, 6, tp=mesh["dp_replicate", "dp_shard"]),
        lambda: dlp.gather_tokens(x, mesh["dp_replicate", "dp_shard"]),
        lambda: dlp.VocabParallelEmbedding(nn.Parameter(x), mesh["dp_replicate", "dp_shard"], False),
    ):
        said.append(must_raise(ValueError, use))
    return shards, said


@pytest.mark.ranks(2)
def test_a_layer_takes_the_axis_of_tp_from_a_mesh(ranks):
    for shards, said in ranks(2).run(layers_of_a_mesh):
        assert shards == [(3, 8), (6, 4), (6, 8)]
        assert set(said) == {
            "tp must be a mesh of one axis, or have an axis named 'tp'; got the axes dp_replicate, dp_shard: make the mesh by "
            "dlp.build_mesh, or pass mesh[AXIS]"
        }
