"""Memory that every rank of a group maps from every other one, and what travels through it.

    gather      begin ─► write mine ─► meet ─► pull the others' parts, each where it is read ─► release
    exchange    begin ─► push each rank its part ─► meet ─► read what was pushed here ────────► release

A `Slot` is a piece of such memory on all ranks. `begin` waits until the peers have released what the slot held before, `meet`
until all of them have written. Copies are made by copy engines. What ranks wait for is counted in memory
(`dlp/kernels/csrc/transport.cu`), so that a launch is the same every time: all of it can be taken down once and launched
again, and captured in a CUDA graph.

All ranks of a group begin, meet and release the same slots in the same order. So which slot a transfer gets follows from
its size and its place in a direction of a layer alone (`start`), and not from what a rank has captured by then.

An agreement finds the maxima of a few numbers over ranks in one kernel: it writes them to all peers, waits, and compares.

Of torch's symmetric memory only allocation and the exchange of addresses are used: nothing of it needs multicast. `use` gives a
group one; nothing does so by itself yet (see there). `SharedSlot` is the stand-in for processes of one machine without GPUs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import Parts, as_bytes, fields
from dlp.kernels.launches import is_recording, launch

LEAST = 1 << 16  # bytes of a slot; sizes are powers of two
PATIENCE = 60.0  # seconds that a rank waits for another
RANKS = 32  # at most so many share a slot
HEADER = 512  # bytes of a slot before its payload
MAXIMA, AGREED = 1 << 16, 8  # numbers, and tensors, in one agreement
WAITS_FOR = ("has not released the slot", "has not written its part", "has not agreed")


class Place(NamedTuple):
    """Where a part lies: `height` rows of `width` bytes, the first at `offset`, `pitch` bytes apart."""

    offset: int
    width: int
    height: int
    pitch: int


class Slot(Protocol):
    """`payload`: this rank's bytes; `spans`: memory that launches name. Everything is ordered on the current stream."""

    payload: Tensor

    def begin(self) -> None: ...
    def meet(self) -> None: ...
    def release(self) -> None: ...
    def pull(self, source: int, at: int, to: Tensor, place: Place) -> None: ...
    def push(self, part: Tensor, to: int, at: int) -> None: ...
    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor]) -> None: ...
    def spans(self) -> list[Tensor]: ...
    def complaint(self) -> str | None: ...


class CudaSlot:
    """Between GPUs of one host."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, tag: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        rank, world = group.rank(), group.size()
        self._memory = _SymmetricMemory.empty_strided_p2p((HEADER + nbytes,), (1,), torch.uint8, device)
        self._memory[:HEADER].zero_()
        torch.cuda.synchronize(device)
        self._handle = rendezvous(self._memory, group)  # from here on headers are zero everywhere
        self.payload = self._memory[HEADER:]
        bases = [int(base) for base in self._handle.buffer_ptrs]
        self._payloads = [base + HEADER for base in bases]
        self._table = torch.tensor(bases, dtype=torch.int64, device=device)
        self._report = torch.zeros(8, dtype=torch.int32).pin_memory()
        self._said = torch.zeros((), dtype=torch.int32, device=device)
        self._slots, self._who = self._table.data_ptr(), (rank, world)
        self._waiting = (int(PATIENCE * 1e3), self._report.data_ptr(), self._said.data_ptr(), rank, world, tag)

    def begin(self) -> None:
        launch("begin_use", self.payload, self._slots, self._waiting)

    def meet(self) -> None:
        launch("meet", self.payload, self._slots, self._waiting)

    def release(self) -> None:
        launch("release_use", self.payload, self._slots, *self._who)

    def pull(self, source: int, at: int, to: Tensor, place: Place) -> None:
        offset, width, height, pitch = place
        launch("pull_part", to, self._payloads[source] + at, width, to.data_ptr() + offset, pitch, width, height)

    def push(self, part: Tensor, to: int, at: int) -> None:
        launch("push_part", part, part.data_ptr(), part.nbytes, self._payloads[to] + at)

    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor]) -> None:
        blank = [0] * (AGREED - len(observed))
        words = [*(t.data_ptr() for t in observed), *blank, *(t.data_ptr() for t in largest), *blank]
        words += [*(t.numel() for t in observed), *blank, len(observed), MAXIMA]
        launch("agree", self.payload, self._slots, tuple(words), self._waiting)

    def spans(self) -> list[Tensor]:
        """Memory of this rank that launches name."""
        return [self.payload]

    def complaint(self) -> str | None:
        """Who has waited too long for whom, once the device has ended the program for it."""
        told, rank, peer, what, wanted, seen, tag, _ = self._report.tolist()
        return too_long(rank, peer, WAITS_FOR[what], wanted, seen, tag) if told else None


class SharedSlot:
    """The stand-in: processes of one machine map a file each. Everything happens at once, as on a stream that is never
    behind."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, tag: int) -> None:
        self._rank, self._world, self._tag, self._uses = group.rank(), group.size(), tag, 0
        names = [tempfile.mktemp(prefix="dlp-slot-", dir="/dev/shm") if self._rank == 0 else ""]
        dist.broadcast_object_list(names, group=group, group_src=0)
        files = [f"{names[0]}-{rank}" for rank in range(self._world)]
        memory = [torch.from_file(file, shared=True, size=HEADER + nbytes, dtype=torch.uint8) for file in files]
        words = [whole[:HEADER].view(torch.int32) for whole in memory]
        self._released, self._met = [w[:RANKS] for w in words], [w[RANKS:] for w in words]
        self._payloads = [whole[HEADER:] for whole in memory]
        self.payload = self._payloads[self._rank]
        dist.barrier(group)
        if self._rank == 0:
            for file in files:
                os.unlink(file)

    def begin(self) -> None:
        self._await(self._released[self._rank], 0)

    def meet(self) -> None:
        self._uses += 1
        self._tell(self._met)
        self._await(self._met[self._rank], 1)

    def release(self) -> None:
        self._tell(self._released)

    def pull(self, source: int, at: int, to: Tensor, place: Place) -> None:
        offset, width, height, pitch = place
        rows = as_bytes(to)[offset:].as_strided((height, width), (pitch, 1))
        rows.copy_(self._payloads[source][at : at + width * height].view(height, width))

    def push(self, part: Tensor, to: int, at: int) -> None:
        self._payloads[to][at : at + part.nbytes] = as_bytes(part)

    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor]) -> None:
        mine = torch.cat([value.reshape(-1) for value in observed]).view(torch.int32)
        self.begin()
        for peer in self._peers():
            self.push(mine, peer, 4 * MAXIMA * self._rank)
        self.meet()
        theirs = [self.payload[4 * MAXIMA * peer :][: mine.nbytes].view(torch.int32) for peer in self._peers()]
        found = torch.stack([mine, *theirs]).amax(0).view(torch.float32)  # as bits: NaN is larger than all
        self.release()
        for to, piece in zip(largest, found.split([value.numel() for value in observed]), strict=True):
            to.copy_(piece.view(to.shape))

    def spans(self) -> list[Tensor]:
        return [self.payload]

    def complaint(self) -> str | None:
        """Waits raise by themselves."""
        return None

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _tell(self, words: Sequence[Tensor]) -> None:
        for peer in self._peers():
            words[peer][self._rank] = self._uses

    def _await(self, words: Tensor, what: int) -> None:
        deadline = time.monotonic() + PATIENCE
        for peer in self._peers():
            while (seen := int(words[peer])) < self._uses:
                if time.monotonic() > deadline:
                    raise RuntimeError(too_long(self._rank, peer, WAITS_FOR[what], self._uses, seen, self._tag))
                time.sleep(0)


def too_long(rank: int, peer: int, what: str, wanted: int, seen: int, tag: int) -> str:
    """What is said of a wait that took longer than PATIENCE."""
    return (
        f"rank {rank} of a group has waited {PATIENCE:g} s for its rank {peer}, which {what} (slot {tag}, use {wanted}, last "
        f"seen {seen}): that rank has ended, hangs, or runs another layer"
    )


class Transport:
    """What the ranks of one group move through memory that they share. `make`: a slot of so many bytes, on all ranks."""

    def __init__(self, group: ProcessGroup, device: torch.device, make: Callable[..., Slot]) -> None:
        self.group, self.rank, self.world, self.device = group, group.rank(), group.size(), device
        self._make, self._slots = make, dict[tuple[int, int], Slot]()
        self._place = 0
        self.start()

    def start(self) -> None:
        """A direction of a layer begins, of which all transfers will have been awaited before the next one begins."""
        self._place = 0

    def _lease(self, nbytes: int) -> Slot:
        size = max(LEAST, 1 << (nbytes - 1).bit_length())
        self._place += 1
        return self._slot(size, self._place)

    def _slot(self, size: int, place: int) -> Slot:
        if (size, place) not in self._slots:
            self._slots[size, place] = self._make(size, self.group, self.device, len(self._slots))
        return self._slots[size, place]

    def lease(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dims: Sequence[int | None]
    ) -> Gathering:  # fmt: skip
        """Memory for this rank's parts, of which those with a dim will be gathered along it; the others are equal on all."""
        moving = [i for i, dim in enumerate(dims) if dim is not None]
        starts, size = fields([shapes[i] for i in moving], [dtypes[i] for i in moving])
        slot = self._lease(size)
        mine = [torch.empty(tuple(shape), dtype=dtype, device=self.device) if dim is None else None
                for shape, dtype, dim in zip(shapes, dtypes, dims, strict=True)]  # fmt: skip
        for i, start in zip(moving, starts, strict=True):
            nbytes = prod(shapes[i]) * dtypes[i].itemsize
            mine[i] = slot.payload[start : start + nbytes].view(dtypes[i]).view(tuple(shapes[i]))
        slot.begin()
        return Gathering(
            self, slot, tuple(part for part in mine if part is not None), dict(zip(moving, starts, strict=True)), dims
        )

    def gather(self, parts: Sequence[Tensor], dims: Sequence[int | None]) -> Parts:
        """Parts that lie elsewhere -> those of all ranks along their dims; without a dim one is equal on all ranks."""
        made = self.lease([part.shape for part in parts], [part.dtype for part in parts], dims)
        for i, start in made.starts.items():
            made.slot.push(parts[i].contiguous(), self.rank, start)
        mine = [made.mine[i] if i in made.starts else part for i, part in enumerate(parts)]
        return made._replace(mine=tuple(mine)).gather()

    def exchange(self, parts: Sequence[Tensor]) -> Parts:
        """Chunk j of each part [R, ...] to rank j -> [R, ...], whose chunk j came from rank j; to be read before `release`."""
        shapes, dtypes = [part.shape for part in parts], [part.dtype for part in parts]
        starts, size = fields(shapes, dtypes)
        slot = self._lease(size)
        slot.begin()
        for distance in range(1, self.world + 1):
            to = (self.rank + distance) % self.world
            for part, start in zip(parts, starts, strict=True):
                chunk = part[to]
                self._count(chunk, to)
                slot.push(chunk, to, start + self.rank * chunk.nbytes)
        slot.meet()
        arrived = [slot.payload[start : start + part.nbytes].view(part.dtype).view(part.shape)
                   for start, part in zip(starts, parts, strict=True)]  # fmt: skip
        self._open = slot
        return tuple(arrived)

    def release(self) -> None:
        """What the last exchange brought has been read."""
        self._open.release()

    def _count(self, part: Tensor, peer: int) -> None:
        """For whoever counts bytes: a part goes to a peer, or comes from it."""
        if peer != self.rank and not is_recording():
            observer.copies(part, self.group)

    def agree(self, observed: Sequence[Tensor]) -> list[Tensor]:
        """fp32 tensors that are not negative, of at most MAXIMA numbers each -> their elementwise maxima over the group; in
        one kernel for AGREED of them, and MAXIMA numbers."""
        largest = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in observed]
        slot, first, numbers = self._slot(2 * 4 * MAXIMA * self.world, 0), 0, 0
        for last, value in enumerate(observed):
            self._count(value, (self.rank + 1) % self.world)
            if last - first == AGREED or numbers + value.numel() > MAXIMA:
                slot.agree(observed[first:last], largest[first:last])
                first, numbers = last, 0
            numbers += value.numel()
        slot.agree(observed[first:], largest[first:])
        return largest

    @property
    def memory(self) -> list[Tensor]:
        """What launches read and write of it on this rank; it stays where it is."""
        return [span for slot in self._slots.values() for span in slot.spans()]

    def complaint(self) -> str | None:
        """Who has waited too long for whom; None: nobody."""
        return next((said for slot in self._slots.values() if (said := slot.complaint())), None)


class Gathering(NamedTuple):
    """`mine`: this rank's parts, to be written before `gather`. `starts`: of those that move, by their number."""

    transport: Transport
    slot: Slot
    mine: Parts
    starts: dict[int, int]
    dims: Sequence[int | None]

    def gather(self) -> Parts:
        """`mine` -> the parts of all ranks along their dims, in memory of this rank's own. Each rank pulls from the one behind
        it first, so that no two pull from one at a time."""
        transport, slot, world = self.transport, self.slot, self.transport.world
        slot.meet()
        arrived = list(self.mine)
        places = []
        for i, start in self.starts.items():
            part, dim = self.mine[i], self.dims[i] or 0
            height = prod(part.shape[:dim])
            width = part.nbytes // max(1, height)
            arrived[i] = part.new_empty((*part.shape[:dim], world * part.shape[dim], *part.shape[dim + 1 :]))
            places.append((start, part, arrived[i], Place(0, width, height, world * width)))
        for distance in range(1, world + 1):
            source = (transport.rank - distance) % world
            for start, part, to, place in places:
                transport._count(part, source)
                slot.pull(source, start, to, place._replace(offset=source * place.width))
        slot.release()
        return tuple(arrived)


# By name of a group. Nothing puts one there but tests: on two H200s the sum of an exchange of 64 KB chunks was wrong where that
# of 6 KB chunks was right, so until that is understood NCCL carries what groups of GPUs send.
_OF_GROUP: dict[str, Transport] = {}


def transport_of(group: ProcessGroup) -> Transport | None:
    """The transport of a group; None: NCCL or gloo carry all."""
    return _OF_GROUP.get(group.group_name)


def use(transport: Transport) -> None:
    """Let transfers of its group go through it."""
    _OF_GROUP[transport.group.group_name] = transport


def mapped_memory(group: ProcessGroup) -> list[Tensor]:
    """What transfers of a group read and write on this rank so far."""
    transport = _OF_GROUP.get(group.group_name)
    return [] if transport is None else transport.memory


def start(group: ProcessGroup | None) -> None:
    """A direction of a layer of this group begins (`Transport.start`)."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    if transport is not None:
        transport.start()


def destroy() -> None:
    """Give the memory of all transports back; before the process group ends."""
    _OF_GROUP.clear()
