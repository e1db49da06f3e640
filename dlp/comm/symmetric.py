"""Memory that all ranks of a group can read, and an exchange by copies out of it.

    lease ─► write mine ─► signal ─►│ peers copy │─► the slot is free again
                                    await their signal ─► copy from them

A `SymmetricBuffer` is a ring of slots, each a piece of memory that every rank has mapped from every other one. A rank
leases a slot, writes what it sends, signals each peer, and copies what the peers wrote out of their slots into memory of
its own: copies between GPUs are made by copy engines and take no part of a running GEMM. All of this runs beside the
current stream, on one stream, in the same order on all ranks.

That order is what frees a slot without a word more: a peer's signal of exchange e + 1 comes after its copies of
exchange e, so once this rank has all signals of a later exchange nobody reads the slot any more. Only when there is no
later one yet, an empty round of signals is exchanged.

Of torch's symmetric memory only allocation, pointer exchange and pairwise signals are used: nothing of it needs
multicast. Where it is missing this raises; `shared_memory` is a stand-in for processes on one machine without GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import Parts, fields, parts_of

SLOTS = 4
LEAST = 1 << 20  # bytes of a slot
CHANNEL, PATIENCE = 0, 30_000  # of signals; milliseconds


class Memory(Protocol):
    """`peers`: the bytes of each rank, mapped here. `beside`: what runs inside comes after what the current stream has
    been given, and beside what it will be given. `mark`, inside: a point there; `join` has the current stream wait for
    it. `hold`: tensors of the current stream that are written there."""

    peers: list[Tensor]

    def signal(self, rank: int) -> None: ...
    def await_signal(self, rank: int) -> None: ...
    def beside(self) -> AbstractContextManager[Any]: ...
    def mark(self) -> Any: ...
    def join(self, mark: Any) -> None: ...
    def hold(self, tensors: Sequence[Tensor]) -> None: ...


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which peers' memory is copied: copy engines serve one after the other anyway."""
    return torch.cuda.Stream(device)


class CudaMemory:
    """torch's symmetric memory between GPUs that reach each other. Allocated apart from its pool, where buffers would
    share the words that signals are written to."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        try:
            self.mine = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
            self.handle = rendezvous(self.mine, group)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().split("\n")[0]
            raise RuntimeError(
                f"the ranks of group {group.group_name} cannot map each other's memory ({reason}), which copies between "
                f"them need; set overlap = 'serial', which sends by NCCL"
            ) from error
        self.peers = [self.handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        self.stream = _stream(device)

    def signal(self, rank: int) -> None:
        self.handle.put_signal(rank, CHANNEL, PATIENCE)

    def await_signal(self, rank: int) -> None:
        self.handle.wait_signal(rank, CHANNEL, PATIENCE)

    def beside(self) -> AbstractContextManager[Any]:
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def join(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(self.stream)


class SharedMemory:
    """The stand-in: processes of one machine map a file each, and count signals in another. Everything happens at once,
    as on a stream that is never behind."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device) -> None:
        world = group.size()
        names = [tempfile.mktemp(prefix="dlp-symmetric-", dir="/dev/shm") if group.rank() == 0 else ""]
        dist.broadcast_object_list(names, group=group, group_src=0)
        self.peers = [self._map(f"{names[0]}-{rank}", nbytes, torch.uint8) for rank in range(world)]
        self._signals = self._map(f"{names[0]}-signals", world * world, torch.int64).view(world, world)
        self._rank, self._seen = group.rank(), [0] * world
        dist.barrier(group)
        if self._rank == 0:
            for file in [f"{names[0]}-{rank}" for rank in range(world)] + [f"{names[0]}-signals"]:
                os.unlink(file)

    @staticmethod
    def _map(file: str, size: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(file, shared=True, size=size, dtype=dtype)

    def signal(self, rank: int) -> None:
        self._signals[self._rank, rank] += 1

    def await_signal(self, rank: int) -> None:
        self._seen[rank] += 1
        deadline = time.monotonic() + PATIENCE / 1000
        while self._signals[rank, self._rank] < self._seen[rank]:
            assert time.monotonic() < deadline, f"rank {self._rank} waits for signal {self._seen[rank]} of rank {rank}"
            time.sleep(0)

    def beside(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mark(self) -> Any:
        return None

    def join(self, mark: Any) -> None:
        pass

    def hold(self, tensors: Sequence[Tensor]) -> None:
        pass


@dataclass
class Slot:
    """One slot of the ring. `turn`: the exchange that used it last."""

    index: int
    turn: int = 0
    leased: bool = False


class SymmetricBuffer:
    """A ring of `slots` slots of `nbytes` on every rank of `group`. Made, leased and used in the same order on all."""

    def __init__(
        self, group: ProcessGroup, nbytes: int, device: torch.device, *, slots: int = SLOTS,
        memory: Callable[[int, ProcessGroup, torch.device], Memory] = CudaMemory,
    ) -> None:  # fmt: skip
        self.group, self.nbytes, self.device = group, nbytes, device
        self.memory = memory(slots * nbytes, group, device)
        self.turn = 0
        self._read: Any = None  # the point after which only the slot of the last exchange may still be read by peers
        self._ring = [Slot(index) for index in range(slots)]

    def lease(self) -> Slot:
        """A slot that nobody reads any more, for the writes of the current stream.

        Raises RuntimeError where the next slot is still leased: its exchange has not been started.
        """
        slot = self._ring[0]
        if slot.leased:
            raise RuntimeError(
                f"all {len(self._ring)} slots of a symmetric buffer are leased; start the exchanges that hold them first"
            )
        if slot.turn and slot.turn == self.turn:
            self._empty_round()
        if slot.turn:
            self.memory.join(self._read)
        self._ring = [*self._ring[1:], slot]
        slot.leased = True
        return slot

    def release(self, slot: Slot, mark: Any) -> None:
        """All steps of the exchange that leased it have been started, the last before `mark`."""
        assert slot.leased, "a slot is released once"
        self.turn += 1
        slot.turn, slot.leased, self._read = self.turn, False, mark

    def _empty_round(self) -> None:
        with self.memory.beside():
            for rank in range(self.group.size()):
                if rank != self.group.rank():
                    self.memory.signal(rank)
            for rank in range(self.group.size()):
                if rank != self.group.rank():
                    self.memory.await_signal(rank)
            self._read = self.memory.mark()
        self.turn += 1

    def bytes_of(self, slot: Slot, rank: int) -> Tensor:
        """The bytes of a slot on `rank`."""
        return self.memory.peers[rank][slot.index * self.nbytes :][: self.nbytes]


class SymmetricExchange:
    """An `Exchange` (see `dlp.comm.exchange`) by copies out of the peers' slots."""

    def __init__(
        self, buffer: SymmetricBuffer, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], sets: int
    ) -> None:
        self.buffer, self.group, self.sets = buffer, buffer.group, sets
        self._record = lambda raw, i: tuple(
            part[i] for part in parts_of(raw[: sets * fields(shapes, dtypes)[1]].view(sets, -1), shapes, dtypes)
        )
        self.slot = buffer.lease()
        mine = buffer.bytes_of(self.slot, self.group.rank())
        self.outgoing: list[Parts] = [self._record(mine, i) for i in range(sets)]
        self.arrived = tuple(
            torch.empty((self.group.size(), *shape), dtype=dtype, device=buffer.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        buffer.memory.hold(self.arrived)
        self._marks: dict[int, Any] = {}

    def keep(self) -> None:
        rank = self.group.rank()
        with self.buffer.memory.beside():
            self._copy(rank, self.outgoing[rank % self.sets])

    def step(self, distance: int) -> None:
        memory, rank, world = self.buffer.memory, self.group.rank(), self.group.size()
        source, to = (rank - distance) % world, (rank + distance) % world
        for part in self.outgoing[to % self.sets]:
            observer.copies(part, self.group)
        with memory.beside():
            memory.signal(to)
            memory.await_signal(source)
            self._copy(source, self._record(self.buffer.bytes_of(self.slot, source), rank % self.sets))

    def _copy(self, source: int, parts: Parts) -> None:
        for to, part in zip(self.arrived, parts, strict=True):
            to[source].copy_(part)
        self._marks[source] = self.buffer.memory.mark()
        if len(self._marks) == self.group.size():
            self.buffer.release(self.slot, self._marks[source])

    def wait(self, source: int) -> None:
        self.buffer.memory.join(self._marks[source])


_BUFFERS: dict[
    tuple[str, int, Any], SymmetricBuffer
] = {}  # by group, size and kind; the first use allocates, on all ranks


def exchange(
    group: ProcessGroup, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], sets: int, device: torch.device,
    memory: Callable[[int, ProcessGroup, torch.device], Memory] = CudaMemory,
) -> SymmetricExchange:  # fmt: skip
    """An exchange in a slot of the group's buffer for this size, rounded up to a power of two."""
    size = max(LEAST, 1 << (sets * fields(shapes, dtypes)[1] - 1).bit_length())
    key = (group.group_name, size, memory)
    if key not in _BUFFERS:
        _BUFFERS[key] = SymmetricBuffer(group, size, device, memory=memory)
    return SymmetricExchange(_BUFFERS[key], shapes, dtypes, sets)


def destroy() -> None:
    """Give the memory of all buffers back; before the process group ends."""
    _BUFFERS.clear()
