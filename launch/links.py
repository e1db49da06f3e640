"""How fast the links between ranks are, for the seconds that a plan prints: what makers state, one direction, per GPU.

tp is the innermost axis of the mesh, so ranks of a group lie `stride` apart; a group that fits into one host of 8 GPUs
goes over NVLink, a wider one is as slow as the network between hosts. Nothing here is measured on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dlp.comm.mesh import AXES, ParallelDims

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
    inner = AXES[AXES.index(group) :] if group in AXES else AXES
    return NVLINK.get(device, NETWORK) if prod(map(dims.size, inner)) <= HOST else NETWORK


def said_bytes(nbytes: float) -> str:
    """ "31.2 GB", "3.86 kB", "12 B"; powers of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{_three(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def said_seconds(seconds: float) -> str:
    """ "1.33 s", "64.2 ms", "2.10 us", "<1 us"."""
    if seconds < 1e-6:
        return "<1 us"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} us"


def _three(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
