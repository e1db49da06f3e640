"""Nominal speeds of links between ranks, from which a plan computes seconds: bytes per second that one GPU sends, as vendors
state. Nothing is measured.

tp is the innermost axis of the mesh. A group whose ranks are in one host of 8 GPUs uses NVLink; any other group has the speed
of the network between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from dlp.comm.mesh import AXES_WITH_CP, CP, DP_REPLICATE, FLATTENED, MAPPED, NCCL, TP, ParallelDims
from launch.common.units import said_bytes, said_seconds

HOST = 8  # number of GPUs in a host, connected by NVLink
OWN = {"layer": "launch", "purpose": "other"}  # ledger labels of the transfers that the launcher starts


@dataclass(frozen=True)
class Link:
    """Link between ranks. `speed`: bytes per second that one rank can send."""

    name: str
    speed: float

    def __str__(self) -> str:
        return f"{self.name}, {self.speed / 1e9:g} GB/s"


ETHERNET, NETWORK = Link("10 Gb/s Ethernet", 1.25e9), Link("400 Gb/s network", 50e9)
NVLINK = {"sm_90": Link("NVLink 4", 450e9), "sm_100": Link("NVLink 5", 900e9)}


def link_of(group: str, dims: ParallelDims, device: str) -> Link:
    """Return the slowest link inside a group of ranks.

    group   a mesh axis, a flattened axis, or "world"
    device  one of `dlp.quant.gemm.DEVICES`
    """
    if device == "cpu":
        return ETHERNET
    return NETWORK if leaves_host(group, dims) else NVLINK.get(device, NETWORK)


def leaves_host(group: str, dims: ParallelDims, host: int = HOST) -> bool:
    """Return whether a group of ranks spans several hosts of `host` GPUs. `group`: see `link_of`."""
    outermost = FLATTENED.get(group, (group,))[0]
    axes = AXES_WITH_CP
    inner = axes[axes.index(outermost) :] if outermost in axes else axes
    return dims.world_size > host and host % prod(map(dims.size, inner)) != 0


def transport_name(asked: str, dims: ParallelDims, device: str) -> str:
    """Return the transport over tp for `[mesh] transport = asked`: "gloo", "nccl" or "mapped". Raises ValueError if "mapped" is
    set and tp spans several hosts."""
    if asked == MAPPED and leaves_host(TP, dims):
        raise ValueError(
            f"[mesh] transport = 'mapped': a tp group of {dims.tp} ranks spans several hosts of {HOST} GPUs, and only "
            f"GPUs of one host map each other's memory; set transport = 'auto', or a tp that divides {HOST}"
        )
    return "gloo" if device == "cpu" else NCCL if asked == NCCL or leaves_host(TP, dims) else MAPPED


def describe_transports(asked: str, dims: ParallelDims, device: str) -> list[str]:
    """Return the line of the plan about the transport of each mesh axis with several ranks, and the reason; empty for one
    rank."""
    backend, said = "gloo" if device == "cpu" else "NCCL", []
    if dims.tp > 1 and transport_name(asked, dims, device) == MAPPED:
        said.append(f"tp {dims.tp}: mapped memory (all ranks on one host; needs peer access between the GPUs)")
    elif dims.tp > 1:
        hosts = "the ranks are on several hosts" if leaves_host(TP, dims) else f"transport = {asked!r}"
        said.append(f"tp {dims.tp}: {backend} ({'the ranks are on CPUs' if device == 'cpu' else hosts})")
    used = {CP: "keys and values of attention"} | dict.fromkeys((dims.shard_axis, DP_REPLICATE), "FSDP's collectives")
    said += [f"{axis} {dims.size(axis)}: {backend} ({what})" for axis, what in used.items() if dims.size(axis) > 1]
    return [f"transport: {'; '.join(said)}"] if said else []


def slow_tp(dims: ParallelDims, device: str, nbytes: float, host: int = HOST) -> list[str]:
    """Return a warning if tp spans several hosts of GPUs, else an empty list. `nbytes`: bytes that a rank sends over tp in a
    step."""
    if device == "cpu" or not leaves_host(TP, dims, host):
        return []
    fast, least = NVLINK.get(device), gcd(dims.tp, host)
    beside = f", where {fast.name} takes {said_seconds(nbytes / fast.speed)}" if fast else ""
    return [
        f"WARNING: tp = {dims.tp} spans several hosts of {host} GPUs: each rank sends {said_bytes(nbytes)} per step "
        f"over tp without overlap, which takes {said_seconds(nbytes / NETWORK.speed)} on a {NETWORK.name}{beside}; "
        f"--mesh.tp {least}, with {dims.tp // least} times as many ranks in dp_shard or dp_replicate, stays within a "
        f"host"
    ]
