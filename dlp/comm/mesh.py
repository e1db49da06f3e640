"""Mesh of ranks: a DeviceMesh with the axes dp_replicate, dp_shard, cp (if cp > 1) and tp, and sizes and groups of these axes.

    mesh = build_mesh(tp=2)                      creates the process groups; users pass the mesh to dlp
    dims = ParallelDims.from_mesh(mesh)          sizes, groups and this rank's coordinates
    dims = ParallelDims.build(8, tp=2)           sizes only; no process group is needed

tp is the innermost axis, so that tp ranks are neighbours (on one host they share NVLink); dp_replicate is the outermost. Groups
send CPU tensors by gloo and CUDA tensors by NCCL. The names of axes are defined in this file only.

Ranks of cp have different tokens of the same sequences. FSDP treats these ranks as data-parallel: it shards parameters over
dp_shard x cp, the flattened axis dp_shard_cp, so that one reduction sums the gradients of all tokens.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement

from dlp.comm import rejoin
from dlp.comm import transport as transports

DP_REPLICATE, DP_SHARD, TP = AXES = ("dp_replicate", "dp_shard", "tp")
CP = "cp"
AXES_WITH_CP = (DP_REPLICATE, DP_SHARD, CP, TP)  # axes of a mesh with cp > 1
WORLD, DP_SHARD_CP, CP_TP = "world", "dp_shard_cp", "cp_tp"  # names of groups that span several axes
FLATTENED = {DP_SHARD_CP: (DP_SHARD, CP), CP_TP: (CP, TP)}  # flattened axis -> the axes that it joins
GROUPS = (*reversed(AXES_WITH_CP), CP_TP, DP_SHARD_CP, WORLD, "other")  # names of groups in counts of bytes
AUTO, NCCL, MAPPED = TRANSPORTS = "auto", "nccl", "mapped"
# "gloo", not "cpu:gloo": for a list of backends without NCCL, torch has no default backend, and warns on exit
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh axes, and with a `mesh` also this rank's groups and coordinates."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False, kw_only=True)

    @classmethod
    def build(
        cls, world_size: int, *, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1
    ) -> ParallelDims:
        """Return the sizes of all axes. A size of -1 becomes `world_size` divided by the other sizes. Raises ValueError for a
        size less than 1 other than -1, for more than one -1, and if the product of the sizes is not `world_size`."""
        sizes = dict(zip(AXES_WITH_CP, (dp_replicate, dp_shard, cp, tp), strict=True))
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh axis {axis} must be at least 1, or -1 for the rest of the world; got {size}")
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(f"only one mesh axis may be -1; got {' and '.join(open_axes)}")
        rest = {axis: size for axis, size in sizes.items() if size != -1}
        if open_axes:
            if world_size % prod(rest.values()):
                raise ValueError(
                    f"world size {world_size} is not a multiple of {_product(rest)} = {prod(rest.values())}, "
                    f"so {open_axes[0]} = -1 cannot be filled: start a multiple of that many ranks by torchrun "
                    f"--nproc-per-node, or choose a smaller axis"
                )
            sizes[open_axes[0]] = world_size // prod(rest.values())
        if prod(sizes.values()) != world_size:
            raise ValueError(
                f"world size {world_size} is not {_product(sizes)}: start {prod(sizes.values())} ranks, or set "
                f"dp_shard or dp_replicate to -1"
            )
        return cls.of(sizes)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> ParallelDims:
        """Return ParallelDims with these sizes by axis name; a missing axis has size 1."""
        return cls(**{axis: sizes.get(axis, 1) for axis in AXES_WITH_CP}, mesh=None)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelDims:
        """Return the ParallelDims of a mesh of `build_mesh`. Raises ValueError for a mesh with other axes."""
        axes = mesh.mesh_dim_names
        if axes != AXES and axes != AXES_WITH_CP:
            raise ValueError(
                f"the mesh must have the axes {', '.join(AXES)}; got "
                f"{', '.join(axes or ()) or 'no named axes'}: "
                f"create the mesh with dlp.build_mesh"
            )
        return cls(**dict(zip(axes, mesh.shape, strict=True)), mesh=mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes; without "cp" if its size is 1."""
        return AXES if self.cp == 1 else AXES_WITH_CP

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in self.axes}

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Index of this rank among the data-parallel ranks."""
        return self.rank(DP_REPLICATE) * self.dp_shard + self.rank(DP_SHARD)

    @property
    def token_ranks(self) -> int:
        """Number of ranks with different tokens: data-parallel ranks, and the ranks of cp that share a sequence."""
        return self.dp_size * self.cp

    @property
    def token_rank(self) -> int:
        """Index of this rank among the ranks with different tokens."""
        return self.dp_rank if self.cp == 1 else self.dp_rank * self.cp + self.rank(CP)

    @property
    def shard_axis(self) -> str:
        """Name of the axis over which FSDP shards parameters."""
        return DP_SHARD if self.cp == 1 else DP_SHARD_CP

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP shards parameters."""
        return self.dp_shard * self.cp

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh for `fully_shard`: the axes (dp_replicate, shard_axis), or only `shard_axis` if dp_replicate is 1."""
        if self.shard_axis == DP_SHARD:
            return self._mesh[DP_REPLICATE, DP_SHARD] if self.dp_replicate > 1 else self._mesh[DP_SHARD]
        shards = self._flattened(self.shard_axis)
        return _side_by_side(self._mesh[DP_REPLICATE], shards) if self.dp_replicate > 1 else shards

    @property
    def parameter_groups(self) -> dict[str, ProcessGroup]:
        """This rank's groups on dp_replicate, `shard_axis` and tp, by axis name: the axes over which parameters are replicated
        or sharded, which together span the mesh."""
        return {axis: self.group(axis) for axis in (DP_REPLICATE, self.shard_axis, TP)}

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self._mesh[TP]

    @property
    def _mesh(self) -> DeviceMesh:
        assert self.mesh is not None, "these dims have sizes but no groups: use ParallelDims.from_mesh"
        return self.mesh

    def size(self, group: str) -> int:
        """Return the number of ranks on an axis, on a flattened axis, or in the world (WORLD)."""
        return prod(getattr(self, axis) for axis in self._axes_of(group))

    def group(self, axis: str) -> ProcessGroup:
        """Return this rank's group on an axis, or on a flattened axis."""
        return self._flattened(axis).get_group() if axis in FLATTENED else self._mesh.get_group(axis)

    def _flattened(self, name: str) -> DeviceMesh:
        """Return the 1-D mesh of a flattened axis, one of FLATTENED. The first call creates groups, so that all ranks must make
        the first call together."""
        return self._mesh[FLATTENED[name]]._flatten(name)

    def _axes_of(self, group: str) -> tuple[str, ...]:
        return AXES_WITH_CP if group == WORLD else FLATTENED.get(group, (group,))

    def _wide(self, group: str) -> tuple[str, ...]:
        """Return the axes of a group whose size is more than 1."""
        return tuple(axis for axis in self._axes_of(group) if self.size(axis) > 1)

    def rank(self, axis: str) -> int:
        """Return the index of this rank on an axis, or on a flattened axis."""
        return self._flattened(axis).get_local_rank() if axis in FLATTENED else self._mesh.get_local_rank(axis)

    def name_of(self, group: str) -> str:
        """Return the name under which the observer counts `group` (an axis, a flattened axis or WORLD).

        Different groups may have the same ranks. If only one axis of the group has several ranks, the name is this axis; if a
        flattened axis has the same ranks, the name is the flattened axis; else the name is `group`."""
        wide = self._wide(group)
        if len(wide) < 2:
            return wide[0] if wide else group
        return next((name for name in FLATTENED if self._wide(name) == wide), group)

    def group_names(self) -> dict[tuple[int, ...], str]:
        """Return the names of this rank's groups, by the global ranks of the group (`name_of`)."""
        names = {tuple(range(dist.get_world_size())): WORLD}
        for axis in (*(FLATTENED if self.cp > 1 else ()), *self.axes):
            if self.size(axis) > 1:
                names[tuple(dist.get_process_group_ranks(self.group(axis)))] = self.name_of(axis)
        return names

    def describe(self, device_type: str) -> str:
        """Return one line for plans and logs: "mesh: 8 cuda ranks = dp_replicate 1 x dp_shard 4 x tp 2"."""
        return f"mesh: {self.world_size} {device_type} rank{'s' * (self.world_size > 1)} = {_product(self.sizes)}"


def _side_by_side(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes of several submeshes of the same mesh."""
    return DeviceMesh._concatenate(list(meshes))


def _product(sizes: dict[str, int]) -> str:
    """Return the sizes as text, "dp_replicate 1 x dp_shard 4 x tp 2"; without cp if its size is 1."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if (axis, size) != (CP, 1))


def tp_group_of(tp: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """Return the group of the axis tp of a mesh, or of a 1-D mesh; a ProcessGroup is returned unchanged. Raises ValueError for
    other meshes."""
    return tp_mesh_of(tp).get_group() if isinstance(tp, DeviceMesh) else tp


def tp_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh of the axis tp; a 1-D mesh is returned unchanged. Raises ValueError for a mesh of several axes without
    an axis tp."""
    if mesh.ndim == 1:
        return mesh
    if TP not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"tp must be a mesh of one axis, or have an axis named {TP!r}; got the axes "
            f"{', '.join(mesh.mesh_dim_names or ()) or 'without names'}: make the mesh by dlp.build_mesh, or pass mesh[AXIS]"
        )
    return mesh[TP]


def placement_on(axis: str, parameter: Tensor) -> Placement | None:
    """Return the placement of a parameter on an axis; None if the parameter is no DTensor, or its mesh has no such axis."""
    if not isinstance(parameter, DTensor):
        return None
    axes = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[axes.index(axis)] if axis in axes else None


def shard_placement(parameter: Tensor) -> Placement | None:
    """Return the placement of a parameter on the axis over which FSDP shards; None if FSDP does not manage the parameter."""
    return placement_on(DP_SHARD, parameter) or placement_on(DP_SHARD_CP, parameter)


def world_size() -> int:
    """Return the number of ranks of this run, from the process group if it exists, else from torchrun's WORLD_SIZE, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def ranks_of_host() -> int:
    """Return the number of ranks on this host, from torchrun's LOCAL_WORLD_SIZE. Without this variable all ranks are assumed to
    be on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def init_process_group(device_type: str) -> None:
    """Create the default process group from torchrun's variables (RANK, WORLD_SIZE, ...), unless it exists. Without torchrun
    the group has one rank.

    A rank on CUDA sets the current device to its LOCAL_RANK. Raises ValueError if this device does not exist, or if the ranks
    cannot connect.
    """
    if device_type == "cuda":
        local_rank, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= devices:
            raise ValueError(f"local rank {local_rank} has no GPU, since this machine has {devices}; start fewer ranks")
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        return
    try:
        _join(BACKENDS[device_type])
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(
            f"the ranks cannot connect at {place}: {str(error).splitlines()[0]}; choose an address that all ranks "
            f"can reach and a free port, by torchrun --rdzv-endpoint or --master-port"
        ) from None


def _join(backend: str) -> None:
    """Create the process group that the environment describes."""
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif (store := rejoin.store_of_attempt()) is None:
        dist.init_process_group(backend)
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def build_mesh(
    *, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, device_type: str | None = None,
    transport: str = AUTO,
) -> DeviceMesh:  # fmt: skip
    """Create a DeviceMesh with the axes dp_replicate, dp_shard, cp (if cp > 1) and tp; start the process group if none exists.

    Args:
        dp_replicate: number of replicas of the model (HSDP).
        dp_shard: number of ranks over which FSDP shards parameters and optimizer states; -1: the remaining ranks.
        cp: number of context-parallel ranks, which have different tokens of the same sequences; attention gathers keys and
            values (`dlp.Context`). With cp > 1, FSDP shards over dp_shard x cp ranks.
        tp: number of tensor-parallel ranks.
        device_type: "cpu" or "cuda"; None: cuda if available.
        transport: transport of transfers over tp. "mapped": memory that the GPUs of one host map from each other; "nccl": NCCL
            (gloo on CPUs); "auto": "mapped" if all tp ranks can map each other's memory, else "nccl".

    One size may be -1: this axis gets the remaining ranks.

    Returns:
        The mesh. The axis cp exists only if its size is more than 1.

    Raises:
        ValueError: for sizes whose product is not the world size, and for an unknown transport; no process group is created
            then. For a rank without a GPU, and for ranks that cannot connect. For transport="mapped", on all ranks, if the tp
            ranks cannot map each other's memory.

    Examples:
        >>> mesh = dlp.build_mesh(tp=1)
        >>> mesh.mesh_dim_names
        ('dp_replicate', 'dp_shard', 'tp')
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r}: expected one of {', '.join(TRANSPORTS)}")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    dims = ParallelDims.build(world_size(), dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    init_process_group(device_type)
    transports.forget_destroyed()
    mesh = init_device_mesh(device_type, tuple(dims.sizes.values()), mesh_dim_names=dims.axes)
    if transport != NCCL and dims.tp > 1:
        transports.ask_for(mesh[TP].get_group(), device_type, required=transport == MAPPED)
    return mesh


def shutdown() -> None:
    """Free mapped memory and destroy the process group at the end of a successful run. After an error do not call this
    function: it may hang.

    NCCL waits until no CUDA graph contains a collective of the group: drop all references to such graphs before the call.
    """
    gc.collect()  # frees CUDA graphs in reference cycles
    transports.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
