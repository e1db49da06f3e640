"""build_mesh: a validated DeviceMesh with the axes dp_replicate, dp_shard, tp.

tp is the innermost axis, so that its ranks are neighbours (on one host they share NVLink); dp_replicate is the
outermost. Groups carry CPU tensors over gloo and CUDA tensors over NCCL.
"""

import os
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlp.comm import symmetric

AXES = ("dp_replicate", "dp_shard", "tp")
# "gloo", not "cpu:gloo": of a list of backends torch takes NCCL as the default one or none, and then warns when it leaves
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def resolve_axes(world_size: int, *, dp_replicate: int = 1, dp_shard: int = -1, tp: int = 1) -> tuple[int, int, int]:
    """The three axis sizes with a -1 filled in. ValueError when they do not multiply to `world_size`."""
    sizes = dict(zip(AXES, (dp_replicate, dp_shard, tp), strict=True))
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(f"mesh axis {axis} must be at least 1, or -1 for the rest of the world; got {size}")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"only one mesh axis may be -1; got {' and '.join(open_axes)}")
    known = prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if world_size % known:
            rest = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
            raise ValueError(
                f"world size {world_size} is not a multiple of {rest} = {known}, so {open_axes[0]} = -1 cannot be filled"
            )
        sizes[open_axes[0]] = world_size // known
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if prod(sizes.values()) != world_size:
        raise ValueError(f"world size {world_size} is not {product}")
    return sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"]


def world_size() -> int:
    """Ranks of this run: of the process group where there is one, else as torchrun says, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def init_process_group(device_type: str) -> None:
    """Join the group torchrun describes (RANK, WORLD_SIZE, ...), once; a lone process makes a group of one.

    CUDA ranks take the device of their LOCAL_RANK; ValueError when there is none.
    """
    if device_type == "cuda":
        local_rank, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= devices:
            raise ValueError(
                f"local rank {local_rank} has no GPU of its own, this machine has {devices}; start fewer ranks"
            )
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(BACKENDS[device_type])
    else:
        dist.init_process_group(BACKENDS[device_type], store=dist.HashStore(), rank=0, world_size=1)


def build_mesh(*, dp_replicate: int = 1, dp_shard: int = -1, tp: int = 1, device_type: str | None = None) -> DeviceMesh:
    """A DeviceMesh with axes (dp_replicate, dp_shard, tp); one size may be -1 and takes the rest of the world.

    Starts the process group when there is none. `device_type`: "cpu" or "cuda", by default cuda where there is one.
    Raises ValueError, before any group is started, when the sizes do not multiply to the world size.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = resolve_axes(world_size(), dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    init_process_group(device_type)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def describe(sizes: tuple[int, int, int], device_type: str) -> str:
    """One line for plans and logs: "mesh: 8 cuda ranks = dp_replicate 1 x dp_shard 4 x tp 2"."""
    product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    return f"mesh: {prod(sizes)} {device_type} rank{'s' * (prod(sizes) > 1)} = {product}"


def shutdown() -> None:
    """Leave the process group; for the end of a run that went well (after an error the group may hang)."""
    symmetric.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
