"""Table of the process groups that send through mapped memory (`dlp.comm.mapped`), and amax agreements of a group.

`ask_for` decides once for each group whether the group gets a `Transport`. Groups without a transport send by NCCL or gloo.
`in_pass` tells the transport of a group where the pass of a layer begins and ends.

`agree` computes the maxima of amaxes over the ranks of a group, by the transport or by an all-reduce. It runs between the
`observe` and the `cast` of a quantizer, so that all ranks of the group compute the same scale.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions

from dlp.comm import observer
from dlp.comm.collectives import Parts
from dlp.comm.mapped import NO_LAYER, LayerPass, Transport
from dlp.comm.slots import MAXIMA, RANKS, CudaSlot
from dlp.comm.watch import Watch
from dlp.kernels import loader
from dlp.kernels.cuda_codes import end_to_end
from dlp.kernels.launches import Lane, call, is_recording

_MAX = AllreduceOptions()
_MAX.reduceOp, _MAX.asyncOp = dist.ReduceOp.MAX, False  # type: ignore[assignment]

NO_TRANSPORT = nullcontext()  # `in_pass` of a group without a transport

# Keys are names of the groups that `ask_for` was called with. _OF_GROUP: transport of the group, or None. _WHY_NOT: reason why
# the group has no transport, or "" if it has one. `use` sets entries of _OF_GROUP only.
_OF_GROUP: dict[str, Transport | None] = {}
_WHY_NOT: dict[str, str] = {}
_default: Callable[[], ProcessGroup | None] | None = None  # weak reference to the default process group of these groups


def transport_of(group: ProcessGroup) -> Transport | None:
    """Return the transport of a group; None if all transfers of the group use NCCL or gloo."""
    return _OF_GROUP.get(group.group_name)


def agree(observed: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return the elementwise maxima of fp32 tensors over the ranks of `group`. All ranks pass tensors of the same shapes.

    The maxima are computed by a kernel in mapped memory if the group has a transport (`dlp.comm.mapped`) and no tensor has more
    than MAXIMA values, else by one all-reduce. The inputs are not changed. Every rank of the group must call `agree`, even a
    rank with an empty shard.
    """
    if group.size() == 1 or not observed:
        return list(observed)
    transport = _OF_GROUP.get(group.group_name)
    with observer.label(purpose="amax", precision="") if observer.counting() else observer.UNCOUNTED:
        if transport is not None and all(value.numel() <= MAXIMA for value in observed):
            return transport.agree(observed)
        if is_recording():
            flat = end_to_end(observed)
            works = call(partial(_start_maxima, group), flat)
        else:
            flat = observed[0].clone() if len(observed) == 1 else torch.cat([value.reshape(-1) for value in observed])
            works = [group.allreduce([flat], _MAX)]
        for work in works:
            if work is not None:
                work.wait()
    if len(observed) == 1:
        return [flat.view_as(observed[0])]
    pieces = flat.split([value.numel() for value in observed])
    return [piece.view(value.shape) for piece, value in zip(pieces, observed, strict=True)]


def _start_maxima(group: ProcessGroup, maxima: Tensor) -> list[Any]:
    work = group.allreduce([maxima], _MAX)
    return [] if work is None else [work]


def ask_for(group: ProcessGroup, device_type: str, *, required: bool = False) -> None:
    """Create a transport through mapped memory for a group if the ranks can map each other's memory.

    All ranks of the group must call `ask_for` before the first layer that sends over the group runs. `describe` returns the
    decision as text.

    Args:
        device_type: "cpu" or "cuda".
        required: if the ranks cannot map each other's memory, raise ValueError on all ranks.
    """
    name = group.group_name
    if name not in _OF_GROUP:
        _WHY_NOT[name] = _obstacle(group, device_type)
        _OF_GROUP[name] = None if _WHY_NOT[name] else _on_gpus(group)
    if required and _OF_GROUP[name] is None:
        raise ValueError(
            f"transport = 'mapped': the {group.size()} ranks of a group cannot map each other's memory: {why_not(group)}; set "
            f"transport = 'auto' or 'nccl'"
        )


def forget_destroyed() -> None:
    """Discard the transports of an earlier default process group, because torch gives the groups of the next one equal names.

    `dlp.build_mesh` calls this function when the default process group exists."""
    global _default
    world = dist.group.WORLD
    assert world is not None
    if _default is not None and _default() is not world:
        destroy()
    _default = weakref.ref(world)


def _on_gpus(group: ProcessGroup) -> Transport:
    device = torch.device("cuda", torch.cuda.current_device())
    transport = Transport(group, device, CudaSlot, Lane(device))
    Watch(transport).start()
    return transport


def _obstacle(group: ProcessGroup, device_type: str) -> str:
    """Return the reason why the ranks of a group cannot map each other's memory, the same text on all ranks; "" if the ranks
    can."""
    if device_type != "cuda":
        return "the ranks are on CPUs"
    if not 1 < group.size() <= RANKS:
        return f"mapped memory supports 2 to {RANKS} ranks"
    mine = (socket.gethostname(), _boot(), loader.missing(), torch.cuda.current_device())
    all_of: list[tuple[str, str, str, int]] = [mine] * group.size()
    dist.all_gather_object(all_of, mine, group)
    if len({each[:2] for each in all_of}) > 1:
        return "the ranks are on several hosts"
    for rank, each in enumerate(all_of):
        if each[2]:
            return f"rank {rank} of the group has no kernels: {each[2]}"
    devices = {each[3] for each in all_of}
    # If device indices are not distinct, each rank sees only its own GPU, or ranks share a GPU. Peer access cannot be
    # checked then; without peer access, mapping the memory fails.
    if len(devices) == group.size():
        for a, b in permutations(sorted(devices), 2):
            if not torch.cuda.can_device_access_peer(a, b):
                return f"cuda:{a} has no peer access to the memory of cuda:{b}"
    return ""


def describe(name: str, group: ProcessGroup) -> str:
    """Return one line for the log of a run: the transport of a group, and the reason for this transport. `name`: mesh axis of
    the group."""
    size = group.size()
    if transport_of(group) is not None:
        ranks = "both ranks" if size == 2 else f"all {size} ranks"
        return f"{name} {size}: mapped memory ({ranks} on this host, peer access)"
    return f"{name} {size}: {carrier(group)} ({why_not(group)})"


def carrier(group: ProcessGroup) -> str:
    """Return the backend of a group's collectives: "nccl" (with gloo for CPU tensors) or "gloo"."""
    return "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"


def why_not(group: ProcessGroup) -> str:
    """Return the reason why a group has no transport, for a message."""
    return _WHY_NOT.get(group.group_name) or "transport = 'nccl', or the mesh was not made by dlp.build_mesh"


def _boot() -> str:
    """Return the ID of the current boot of the host, which distinguishes hosts with equal names; "" if the system has no such
    ID."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def use(group: ProcessGroup, transport: Transport | None) -> None:
    """Set the transport of a group; None: the transfers of the group use NCCL or gloo."""
    _OF_GROUP[group.group_name] = transport


def mapped_memory() -> list[Tensor]:
    """Return this rank's memory of all slots of all transports (`Transport.memory`)."""
    return [memory for transport in _OF_GROUP.values() if transport is not None for memory in transport.memory]


def in_pass(
    group: ProcessGroup | None, style: str = "", layer_pass: LayerPass = NO_LAYER
) -> AbstractContextManager[None]:
    """Return a context manager for a pass of a layer that sends over `group`: it calls `Transport.start` and
    `Transport.finish`, if the group has a transport. After an exception `finish` is not called."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    return NO_TRANSPORT if transport is None else _started(transport, style, layer_pass)


@contextmanager
def _started(transport: Transport, style: str, layer_pass: LayerPass) -> Iterator[None]:
    transport.start(style, layer_pass)
    yield
    transport.finish()


def complaint() -> str | None:
    """Return the message of the first transport with a kernel that waited too long (`Transport.complaint`); None if there is
    no such kernel."""
    every = (transport for transport in _OF_GROUP.values() if transport is not None)
    return next((message for transport in every if (message := transport.complaint()) is not None), None)


def waits() -> list[str]:
    """Return one line for each pair of ranks in which one rank waits for the other in mapped memory now (`Transport.waits`).

    The function may be called while GPUs hang."""
    return [line for transport in _OF_GROUP.values() if transport is not None for line in transport.waits()]


def kept(group: ProcessGroup | None, parts: Sequence[Tensor]) -> Parts:
    """Return gathered parts in memory that stays valid after the pass: copies if the group has a transport, because
    later transfers reuse its slots; else the same tensors."""
    transport = None if group is None else transport_of(group)
    return tuple(parts) if transport is None else transport.kept(parts)


def destroy() -> None:
    """Free the memory of all transports. Must be called before the process group is destroyed."""
    _OF_GROUP.clear()
    _WHY_NOT.clear()
