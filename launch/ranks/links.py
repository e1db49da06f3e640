"""How fast the links between ranks are, for the seconds that a plan prints: what makers state, one direction, per GPU.

tp is the innermost axis of the mesh, so a group lies among as many neighbours as its axis and those within it have ranks. Where
these never leave a host of 8 GPUs, it goes over NVLink; else it is as slow as the network between hosts. Nothing here is
measured on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from dlp.comm.mesh import AXES, DP_REPLICATE, DP_SHARD, MAPPED, NCCL, TP, ParallelDims
from launch.common.units import said_bytes, said_seconds

HOST = 8  # GPUs that NVLink joins
OWN = {"layer": "launch", "direction": "other"}  # what ledgers call bytes that the launcher itself sends


@dataclass(frozen=True)
class Link:
    """`speed` in bytes a second that a rank sends."""

    name: str
    speed: float

    def __str__(self) -> str:
        return f"{self.name}, {self.speed / 1e9:g} GB/s"


ETHERNET, NETWORK = Link("10 Gb/s Ethernet", 1.25e9), Link("400 Gb/s network", 50e9)
NVLINK = {"sm_90": Link("NVLink 4", 450e9), "sm_100": Link("NVLink 5", 900e9)}


def link_of(group: str, dims: ParallelDims, device: str) -> Link:
    """The slowest link that a group of ranks crosses. `group`: an axis or "world"; `device`: one of
    `dlp.quant.gemm.DEVICES`."""
    if device == "cpu":
        return ETHERNET
    return NETWORK if leaves_host(group, dims) else NVLINK.get(device, NETWORK)


def leaves_host(group: str, dims: ParallelDims, host: int = HOST) -> bool:
    """Whether ranks of some group of an axis, or the world, are on several hosts of so many GPUs."""
    inner = AXES[AXES.index(group) :] if group in AXES else AXES
    return dims.world_size > host and host % prod(map(dims.size, inner)) != 0


def transport_name(asked: str, dims: ParallelDims, device: str) -> str:
    """The carrier of transfers over tp for `[mesh] transport = asked`: "gloo", "nccl" or "mapped". ValueError for "mapped" over
    several hosts."""
    if asked == MAPPED and leaves_host(TP, dims):
        raise ValueError(
            f"[mesh] transport = 'mapped': a tp group of {dims.tp} ranks leaves a host of {HOST} GPUs, and only GPUs of one "
            f"host map each other's memory; set transport = 'auto', or a tp that divides {HOST}"
        )
    return "gloo" if device == "cpu" else NCCL if asked == NCCL or leaves_host(TP, dims) else MAPPED


def describe_transports(asked: str, dims: ParallelDims, device: str) -> list[str]:
    """The plan's line on the carrier of each axis of several ranks, and the reason."""
    backend, said = "gloo" if device == "cpu" else "NCCL", []
    if dims.tp > 1 and transport_name(asked, dims, device) == MAPPED:
        said.append(f"tp {dims.tp}: mapped memory (all ranks on one host; needs peer access between the GPUs)")
    elif dims.tp > 1:
        hosts = "the ranks are on several hosts" if leaves_host(TP, dims) else f"transport = {asked!r}"
        said.append(f"tp {dims.tp}: {backend} ({'the ranks are on CPUs' if device == 'cpu' else hosts})")
    said += [
        f"{axis} {dims.size(axis)}: {backend} (FSDP's collectives)"
        for axis in (DP_SHARD, DP_REPLICATE)
        if dims.size(axis) > 1
    ]
    return [f"transport: {'; '.join(said)}"] if said else []


def slow_tp(dims: ParallelDims, device: str, nbytes: float, host: int = HOST) -> list[str]:
    """A warning where tp leaves a host of so many GPUs; `nbytes`: what a rank sends over it in a step."""
    if device == "cpu" or not leaves_host(TP, dims, host):
        return []
    fast, least = NVLINK.get(device), gcd(dims.tp, host)
    beside = f", where {fast.name} takes {said_seconds(nbytes / fast.speed)}" if fast else ""
    return [
        f"WARNING: tp = {dims.tp} leaves a host of {host} GPUs: each rank sends {said_bytes(nbytes)} a step over it, which "
        f"nothing hides, {said_seconds(nbytes / NETWORK.speed)} on a {NETWORK.name}{beside}; --mesh.tp {least}, with "
        f"{dims.tp // least} times as many ranks in dp_shard or dp_replicate, does not"
    ]
