"""build_mesh: sizes that do not fit the world are refused with the numbers, tp is innermost, axes are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlp.comm.mesh import AXES, build_mesh, describe, resolve_axes
from tests import pool as worker


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
    assert resolve_axes(world, **asked) == sizes


@pytest.mark.parametrize(
    ("world", "asked", "message"),
    [
        (6, {"dp_shard": 2, "tp": 4}, "world size 6 is not dp_replicate 1 x dp_shard 2 x tp 4"),
        (
            6,
            {"tp": 4},
            "world size 6 is not a multiple of dp_replicate 1 x tp 4 = 4, so dp_shard = -1 cannot be filled",
        ),
        (8, {"tp": -1}, "only one mesh axis may be -1; got dp_shard and tp"),
        (8, {"tp": 0}, "mesh axis tp must be at least 1, or -1 for the rest of the world; got 0"),
        (8, {"dp_replicate": -2}, "mesh axis dp_replicate must be at least 1, or -1 for the rest of the world; got -2"),
        (
            2,
            {"tp": 4},
            "world size 2 is not a multiple of dp_replicate 1 x tp 4 = 4, so dp_shard = -1 cannot be filled",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(world, asked, message):
    with pytest.raises(ValueError) as error:
        resolve_axes(world, **asked)
    assert str(error.value) == message


def test_a_mesh_describes_itself():
    assert describe((1, 4, 2), "cuda") == "mesh: 8 cuda ranks = dp_replicate 1 x dp_shard 4 x tp 2"
    assert describe((1, 1, 1), "cpu") == "mesh: 1 cpu rank = dp_replicate 1 x dp_shard 1 x tp 1"


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


def refuse() -> tuple[str, str]:
    try:
        build_mesh(dp_shard=3, tp=1, device_type=worker.device().type)
    except ValueError as error:
        return str(error), worker.device().type
    return "no error", worker.device().type


@pytest.mark.ranks(2)
def test_a_real_world_is_checked(ranks):
    for message, _ in ranks(2).run(refuse):
        assert message == "world size 2 is not dp_replicate 1 x dp_shard 3 x tp 1"


def cpu_and_device_tensors() -> list[float]:
    """Groups of a mesh carry tensors of the host as well as of the device."""
    group = worker.mesh(tp=2)["tp"].get_group()
    tensors = [torch.ones((), device=device) for device in ("cpu", worker.device())]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return [tensor.item() for tensor in tensors]


@pytest.mark.ranks(2)
def test_groups_carry_host_and_device_tensors(ranks):
    assert ranks(2).run(cpu_and_device_tensors) == [[2.0, 2.0]] * 2
