"""Which groups send through memory that their ranks map (`dlp.comm.mapped`), and why others do not.

A group is asked for once, by all of its ranks; what a layer does is told to the transport of its group, where there is one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Parts
from dlp.comm.mapped import NOBODY, Transport, Who
from dlp.comm.slots import RANKS, CudaSlot
from dlp.comm.watch import Watch
from dlp.kernels import loader
from dlp.kernels.launches import Lane

_OF_GROUP: dict[str, Transport | None] = {}  # by name of a group
_WHY_NOT: dict[str, str] = {}


def transport_of(group: ProcessGroup) -> Transport | None:
    """The transport of a group; None: NCCL or gloo carry all."""
    return _OF_GROUP.get(group.group_name)


def ask_for(group: ProcessGroup, device_type: str) -> None:
    """Let transfers of a group, whose ranks are on "cuda" or "cpu", go through memory that its ranks map, where they can;
    `describe` says whether. Called by all of its ranks, before the first layer that sends over it runs."""
    name = group.group_name
    if name not in _OF_GROUP:
        _WHY_NOT[name] = _obstacle(group, device_type)
        _OF_GROUP[name] = None if _WHY_NOT[name] else _on_gpus(group)


def _on_gpus(group: ProcessGroup) -> Transport:
    device = torch.device("cuda", torch.cuda.current_device())
    made = Transport(group, device, CudaSlot, Lane(device))
    Watch(made).start()
    return made


def _obstacle(group: ProcessGroup, device_type: str) -> str:
    """Why the ranks of a group do not push into each other's memory, the same on all ranks; empty: they do."""
    if device_type != "cuda":
        return "its ranks are on CPUs"
    if not 1 < group.size() <= RANKS:
        return f"it has {group.size()} ranks, of 2 to {RANKS}"
    mine = (socket.gethostname(), _boot(), loader.missing(), torch.cuda.current_device())
    all_of: list[tuple[str, str, str, int]] = [mine] * group.size()
    dist.all_gather_object(all_of, mine, group)
    if len({each[:2] for each in all_of}) > 1:
        return "its ranks are on several hosts"
    for rank, each in enumerate(all_of):
        if each[2]:
            return f"its rank {rank} has no kernels: {each[2]}"
    devices = {each[3] for each in all_of}
    if len(devices) == group.size():  # else each rank sees a GPU of its own only, or all share one, and mapping tells
        for a, b in permutations(sorted(devices), 2):
            if not torch.cuda.can_device_access_peer(a, b):
                return f"cuda:{a} cannot reach the memory of cuda:{b}"
    return ""


def describe(name: str, group: ProcessGroup) -> str:
    """How what a group of this name sends is carried, and why."""
    if transport_of(group) is not None:
        return f"transport: {name} pushes into memory that its ranks map; directions of its layers are captured"
    by = carrier(group)
    calls = f"a captured direction calls {by} between its launches"
    return f"transport: {name} sends by {by}, since {why_not(group)}; {calls}"


def carrier(group: ProcessGroup) -> str:
    """Whose collectives a group has: "nccl", beside which gloo carries what lies on CPUs, or "gloo"."""
    return "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"


def why_not(group: ProcessGroup) -> str:
    """Why a group has no transport."""
    return _WHY_NOT.get(group.group_name) or "nobody asked for mapped memory"


def _boot() -> str:
    """Of one host, and of no other one of that name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def use(group: ProcessGroup, transport: Transport | None) -> None:
    """Let transfers of a group go through a transport; None: by NCCL or gloo."""
    _OF_GROUP[group.group_name] = transport


def mapped_memory() -> list[Tensor]:
    """What transfers read and write on this rank so far, of whatever group."""
    return [memory for transport in _OF_GROUP.values() if transport is not None for memory in transport.memory]


def start(group: ProcessGroup | None, kind: str = "", who: Who = NOBODY) -> None:
    """A direction of a layer of this group begins (`Transport.start`)."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    if transport is not None:
        transport.start(kind, who)


def finish(group: ProcessGroup | None) -> None:
    """A direction of a layer of this group ends (`Transport.finish`)."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    if transport is not None:
        transport.finish()


def complaint() -> str | None:
    """Who has waited too long for whom, in an agreement or a GEMM, once a GPU has ended its work for it; None: nobody."""
    every = (transport for transport in _OF_GROUP.values() if transport is not None)
    return next((said for transport in every if (said := transport.complaint()) is not None), None)


def waits() -> list[str]:
    """Who has not done what others wait for, in all mapped memory, as it is now; while devices hang, too, which waits of
    streams would do for ever."""
    return [said for transport in _OF_GROUP.values() if transport is not None for said in transport.waits()]


def kept(group: ProcessGroup | None, parts: Sequence[Tensor]) -> Parts:
    """Parts that were gathered, where they stay when the direction has finished."""
    transport = None if group is None else transport_of(group)
    return tuple(parts) if transport is None else transport.kept(parts)


def destroy() -> None:
    """Give the memory of all transports back; before the process group ends."""
    _OF_GROUP.clear()
    _WHY_NOT.clear()
