"""A slot: a piece of memory that every rank of a group has, and maps from every other one.

    begin      until every rank has released what was pushed before: the slots of peers may be written; a number says for what
    push       a part of this rank's into a peer's slot, or its own
    meet       this rank has pushed; `wait`: until all have
    tell       this rank has pushed to one of them, where a kernel that runs may see it; `meet_told`: all have been told
    release    this rank has read its slot

All uses of a slot happen in the same order on all ranks. What ranks wait for is counted in memory
(`dlp/kernels/csrc/transport.cu`), so that each of these is a launch that never changes. Of torch's symmetric memory only
allocation and the exchange of addresses are used: nothing of it needs multicast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.kernels.cuda_codes import copied_rows
from dlp.kernels.launches import Lane, await_mark, launch, new_event
from dlp.kernels.table import Arriving, Sending

PATIENCE = 600.0  # seconds that a rank waits for another, which may be compiling or saving
RANKS = 32  # at most so many share a slot
HEADER = 512  # bytes of a slot before its payload
PAD, GRANULE = 16 << 10, 2 << 20  # bytes: what torch adds to memory that it maps, about; it is mapped in whole granules
MAXIMA, AGREED = 1 << 16, 8  # numbers, and tensors, in one agreement
WAITS_FOR = ("has not read what was sent before", "has not sent its part", AGREES := "has not agreed")
UNREAD, SENT, MET, USES = 0, RANKS, 2 * RANKS, 3 * RANKS  # words of a header (`dlp/kernels/csrc/transport.cu`)
# Copies between GPUs have engines; within one they may be kernels, which a GEMM that waits for them must leave multiprocessors.
SHARED, SPARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", 4  # torch's switch that lets ranks share a GPU
Named = Callable[[int], str]  # what the number says that a use of a slot began with


class Place(NamedTuple):
    """Where a part lies in a slot: `height` rows of `width` bytes, the first at `offset`, `pitch` bytes apart."""

    offset: int
    width: int
    height: int
    pitch: int


class Wait(NamedTuple):
    """Rank `a` of a group waits for its rank `b`, as WAITS_FOR[what] says. `use`: what `a` uses the slot for, the number that
    it began with, or the count of an agreement; `other`: what `b` uses it for, if for something else."""

    a: int
    b: int
    what: int
    use: int
    other: int = 0


class Slot(Protocol):
    """`payload`: this rank's bytes. `begin`, `push` and `meet` happen on a lane, `wait` makes the current stream wait for
    what they brought, and `arriving` tells a kernel how to wait for `rows` of each rank. On the current stream this rank
    `keep`s a part of its own there, copies one out of it (`copied`), `release`s the slot, and ranks `agree`. `use`: a number
    of 1 to 2**30 - 1, which the ranks tell each other.

    A kernel of the current stream may store into the slots of all ranks itself, `rows` for each from byte `offset` of the
    payload on (`sending`), if the slot did not `begin` `on_lane` but on that stream, in front of it; `meet` tells behind it."""

    payload: Tensor

    def begin(self, use: int, on_lane: bool = True) -> None: ...
    def follow(self) -> None: ...
    def push(self, part: Tensor, to: int, place: Place) -> None: ...
    def keep(self, part: Tensor, place: Place) -> None: ...
    def meet(self) -> None: ...
    def tell(self, to: int) -> None: ...
    def meet_told(self) -> None: ...
    def arriving(self, rows: int) -> Arriving: ...
    def sending(self, rows: int, offset: int) -> Sending: ...
    def wait(self) -> None: ...
    def copied(self, part: Tensor) -> Tensor: ...
    def release(self) -> None: ...
    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor], use: int) -> None: ...
    def spans(self) -> list[Tensor]: ...
    def complaint(self) -> tuple[Wait, int, int] | None: ...
    def waits(self) -> list[Wait]: ...


class CudaSlot:
    """Between GPUs of one host."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, named: Named, lane: Lane) -> None:
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
        self._set(lane, bases, (int(PATIENCE * 1e3), self._report.data_ptr(), self._said.data_ptr(), rank, world))

    def _set(self, lane: Lane, bases: Sequence[int], waiting: tuple[int, ...]) -> None:
        self._told = False
        self._lane, self._waiting, self._arrived, self._use = lane, waiting, new_event(), 0
        self._bases = (*bases, *[0] * (RANKS - len(bases)), *waiting[3:])

    def begin(self, use: int, on_lane: bool = True) -> None:
        self._use = use
        if not on_lane:  # what the lane still waits for does not hold up the kernel
            launch("begin_use", self.payload, self._bases, use)
            return
        self._lane.follow(self.payload)
        self._lane.launch("begin_use", self._bases, use)

    def follow(self) -> None:
        self._lane.follow(self.payload)

    def push(self, part: Tensor, to: int, place: Place) -> None:
        offset, width, height, pitch = place
        self._lane.launch("push_part", part.data_ptr(), self._payloads[to] + offset, pitch, width, height)

    def keep(self, part: Tensor, place: Place) -> None:
        offset, width, height, pitch = place
        launch("push_part", part, part.data_ptr(), self.payload.data_ptr() + offset, pitch, width, height)

    def meet(self) -> None:
        self._lane.launch("meet", self._bases, self._use)
        self._lane.mark(self._arrived)

    def tell(self, to: int) -> None:
        self._told = True
        self._lane.launch("tell", self._bases, to, self._use)

    def meet_told(self) -> None:
        self._lane.launch("await_sent", self._bases)
        self._lane.mark(self._arrived)

    def arriving(self, rows: int) -> Arriving:
        sent, spare = self._bases[self._waiting[3]] + 4 * SENT, SPARE if os.environ.get(SHARED) == "1" else 0
        return Arriving((sent, rows, self._arrived, spare), (*self._waiting, self._use))

    def sending(self, rows: int, offset: int) -> Sending:
        return Sending(self._bases, (HEADER + offset, rows))

    def wait(self) -> None:
        await_mark(self._arrived, self.payload)

    def copied(self, part: Tensor) -> Tensor:
        return copied_rows(part.view(1, -1)).view(part.shape)

    def release(self) -> None:
        if self._told:
            self.wait()  # the lane has seen what is forgotten
            launch("forget_sent", self.payload, self._bases)
            self._told = False
        launch("release_use", self.payload, self._bases)

    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor], use: int) -> None:
        blank = [0] * (AGREED - len(observed))
        words = [*(t.data_ptr() for t in observed), *blank, *(t.data_ptr() for t in largest), *blank]
        words += [*(t.numel() for t in observed), *blank, len(observed), MAXIMA]
        launch("agree", self.payload, self._table.data_ptr(), tuple(words), (*self._waiting, use))

    def spans(self) -> list[Tensor]:
        """Memory of this rank that launches name."""
        return [self.payload]

    def complaint(self) -> tuple[Wait, int, int] | None:
        """Who has waited too long for whom, with the count that it waited for and the last one it saw, once the device has
        ended the program for it."""
        told, rank, peer, what, wanted, seen, use, _ = self._report.tolist()
        return (Wait(rank, peer, what, use), wanted, seen) if told else None

    def headers(self) -> list[list[int]]:
        """The words of all ranks' headers now, by a stream of its own, since others may hang."""
        with torch.cuda.stream(torch.cuda.Stream(self.payload.device)):
            words = [self._handle.get_buffer(rank, (HEADER // 4,), torch.int32) for rank in range(self._waiting[4])]
            return [each.cpu().tolist() for each in words]

    def waits(self) -> list[Wait]:
        """What ranks of the group have not done yet in this slot, as far as others wait for it, or soon will."""
        return waiting(self.headers())


def mapped_bytes(nbytes: int) -> int:
    """What a slot for so many bytes takes on a GPU."""
    return -(-(HEADER + nbytes + PAD) // GRANULE) * GRANULE


def waiting(headers: Sequence[Sequence[int]]) -> list[Wait]:
    """The headers of all ranks of a slot -> who has done its part, and who has not."""
    found = []
    for a, b in permutations(range(len(headers)), 2):
        mine, its = headers[a], headers[b]
        if its[MET + a] > max(mine[USES], mine[MET + b]):
            found.append(Wait(a, b, 2, its[MET + a]))
        elif use := mine[UNREAD + b]:  # a has begun; told means that a has pushed and b has not taken note of it
            told, other = its[SENT + a] and not mine[SENT + b], its[UNREAD + a]
            found.append(Wait(a, b, 1 if told else 0, use, other if other != use else 0))
    return found


def too_long(wait: Wait, wanted: int, seen: int, where: str, ranks: Sequence[int]) -> str:
    """What is said of a wait that took longer than PATIENCE. `ranks`: those of the group, in the world."""
    return (
        f"rank {ranks[wait.a]} has waited {PATIENCE:g} s for rank {ranks[wait.b]}, which {WAITS_FOR[wait.what]} ({where}, use "
        f"{wanted}, last seen {seen}): that rank has ended, hangs, or runs another layer"
    )
