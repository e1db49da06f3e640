"""A slot: one buffer on each rank of a group. All ranks of the group map all buffers of a slot, and write to them.

    begin       waits until all peers have released their buffers; then this rank may push to the peers
    push        copies a part (a tensor of this rank) into the buffer of a peer
    meet        barrier: signals all peers that this rank has pushed its parts, and waits until all peers have pushed
    wait        makes the current stream wait for `meet`, which runs on the side stream
    release     signals all peers that this rank has read its buffer

All ranks use a slot in the same order. Ranks signal by flags in the headers of the buffers (`dlp/kernels/csrc/transport.cu`).
The arguments of launches do not depend on the step, so that the launches can be recorded once and repeated in every step.
Torch's symmetric memory allocates the buffers and exchanges addresses; NVLink multicast is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.kernels.cuda_codes import copied_rows
from dlp.kernels.launches import Lane, await_mark, launch, new_event

PATIENCE = 600.0  # seconds that a rank waits for another rank, which may be compiling or saving
RANKS = 32  # maximum number of ranks that share a slot
HEADER = 512  # bytes of a buffer before the payload
# PAD: bytes that torch adds to each mapping, approximately. GRANULE: mapped memory is allocated in multiples of these bytes.
PAD, GRANULE = 16 << 10, 2 << 20
MAXIMA, AGREED = 1 << 16, 8  # one amax agreement takes at most MAXIMA fp32 values in at most AGREED tensors
# Clauses of messages: the action that the awaited rank has not done yet. `Wait.what` is an index into this tuple.
WAITS_FOR = ("has not read the previous transfer", "has not sent its part", AGREES := "has not agreed")
# Indices of int32 flags in a header (`dlp/kernels/csrc/transport.cu`). UNREAD, SENT and MET are indices of the first of RANKS
# flags, one for each rank. USES is the index of a single number.
UNREAD, SENT, MET, USES = 0, RANKS, 2 * RANKS, 3 * RANKS
Named = Callable[[int], str]  # maps the number of a use of a slot to a name for messages


class Place(NamedTuple):
    """Position of a part in the payload of a buffer: `height` rows of `width` bytes each. The first row begins at byte
    `offset`; the row stride is `pitch` bytes."""

    offset: int
    width: int
    height: int
    pitch: int


class Wait(NamedTuple):
    """Pair of ranks of a group in which rank `a` waits for rank `b`.

    what    index of the outstanding action of `b` in WAITS_FOR
    use     number of the use of the slot that `a` has begun. For an amax agreement, the function `waiting` puts the index of
            the agreement here
    other   number of the use that `b` has begun, if `b` has begun a different use; else 0
    """

    a: int
    b: int
    what: int
    use: int
    other: int = 0


class Slot(Protocol):
    """Protocol of a slot, as one rank uses it. The docstring of this file states the order of the calls.

    `begin`, `follow`, `push` and `meet` run on the side stream; the other methods up to `agree` run on the current stream.

    payload     uint8, this rank's buffer without the header
    begin       use: number of this use of the slot, 1 to 2**30 - 1, which ranks write to the headers
    follow      makes the side stream wait for the current stream
    push        copies a part into the buffer of rank `to`
    keep        copies a part into this rank's buffer
    copied      returns a copy of a contiguous part of the buffer
    agree       writes the elementwise maxima of `observed` over the ranks to `largest`
    spans       returns this rank's memory whose addresses launches use
    complaint   if a kernel waited longer than PATIENCE and ended the program of this GPU: returns the wait, the value that the
                kernel expected and the last value that it read; else None
    waits       returns the pairs of ranks in which one rank waits for the other now
    """

    payload: Tensor

    def begin(self, use: int) -> None: ...
    def follow(self) -> None: ...
    def push(self, part: Tensor, to: int, place: Place) -> None: ...
    def keep(self, part: Tensor, place: Place) -> None: ...
    def meet(self) -> None: ...
    def wait(self) -> None: ...
    def copied(self, part: Tensor) -> Tensor: ...
    def release(self) -> None: ...
    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor], use: int) -> None: ...
    def spans(self) -> list[Tensor]: ...
    def complaint(self) -> tuple[Wait, int, int] | None: ...
    def waits(self) -> list[Wait]: ...


class CudaSlot:
    """Slot in memory of the GPUs of one host."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, named: Named, lane: Lane) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        rank, world = group.rank(), group.size()
        self._memory = _SymmetricMemory.empty_strided_p2p((HEADER + nbytes,), (1,), torch.uint8, device)
        self._memory[:HEADER].zero_()
        torch.cuda.synchronize(device)
        self._handle = rendezvous(self._memory, group)  # a barrier: afterwards the headers of all ranks are zero
        self.payload = self._memory[HEADER:]
        bases = [int(base) for base in self._handle.buffer_ptrs]
        self._payloads = [base + HEADER for base in bases]
        self._table = torch.tensor(bases, dtype=torch.int64, device=device)
        self._report = torch.zeros(8, dtype=torch.int32).pin_memory()  # a kernel that has waited too long writes here
        self._reported = torch.zeros((), dtype=torch.int32, device=device)
        self._set(lane, bases, (int(PATIENCE * 1e3), self._report.data_ptr(), self._reported.data_ptr(), rank, world))

    def _set(self, lane: Lane, bases: Sequence[int], waiting: tuple[int, ...]) -> None:
        self._lane, self._waiting, self._arrived, self._use = lane, waiting, new_event(), 0
        self._bases = (*bases, *[0] * (RANKS - len(bases)), *waiting[3:])

    def begin(self, use: int) -> None:
        self._use = use
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

    def wait(self) -> None:
        await_mark(self._arrived, self.payload)

    def copied(self, part: Tensor) -> Tensor:
        return copied_rows(part.view(1, -1)).view(part.shape)

    def release(self) -> None:
        launch("release_use", self.payload, self._bases)

    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor], use: int) -> None:
        blank = [0] * (AGREED - len(observed))
        words = [*(t.data_ptr() for t in observed), *blank, *(t.data_ptr() for t in largest), *blank]
        words += [*(t.numel() for t in observed), *blank, len(observed), MAXIMA]
        launch("agree", self.payload, self._table.data_ptr(), tuple(words), (*self._waiting, use))

    def spans(self) -> list[Tensor]:
        return [self.payload]

    def complaint(self) -> tuple[Wait, int, int] | None:
        """Return the report of an amax agreement that waited longer than PATIENCE and ended the program of this GPU: the pair
        of ranks, the value that the kernel waited for, and the last value that the kernel read. None without such a report."""
        reported, rank, peer, what, wanted, seen, use, _ = self._report.tolist()
        return (Wait(rank, peer, what, use), wanted, seen) if reported else None

    def headers(self) -> list[list[int]]:
        """Return the header flags of all ranks, read on a separate stream, since other streams may hang."""
        with torch.cuda.stream(torch.cuda.Stream(self.payload.device)):
            words = [self._handle.get_buffer(rank, (HEADER // 4,), torch.int32) for rank in range(self._waiting[4])]
            return [each.cpu().tolist() for each in words]

    def waits(self) -> list[Wait]:
        """Return the pairs of ranks in which one rank waits, or soon will wait, for an action of the other rank in this
        slot."""
        return waiting(self.headers())


def mapped_bytes(nbytes: int) -> int:
    """Return the bytes of GPU memory that one rank needs for a slot with a payload of `nbytes`."""
    return -(-(HEADER + nbytes + PAD) // GRANULE) * GRANULE


def waiting(headers: Sequence[Sequence[int]]) -> list[Wait]:
    """Return the pairs of ranks in which one rank waits, or soon will wait, for the other.

    headers   headers[r] contains the flags in the header of the buffer of rank r; all buffers belong to one slot"""
    found = []
    for a, b in permutations(range(len(headers)), 2):
        of_a, of_b = headers[a], headers[b]
        if of_b[MET + a] > max(of_a[USES], of_a[MET + b]):
            found.append(Wait(a, b, 2, of_b[MET + a]))
        elif use := of_a[UNREAD + b]:  # a has begun a use
            # a waits for the push of b if a has signalled that it pushed, and b has not
            awaits_push, other = of_b[SENT + a] and not of_a[SENT + b], of_b[UNREAD + a]
            found.append(Wait(a, b, 1 if awaits_push else 0, use, other if other != use else 0))
    return found


def too_long(wait: Wait, wanted: int, seen: int, where: str, ranks: Sequence[int]) -> str:
    """Return the message for a wait that took longer than PATIENCE.

    wanted, seen   the expected value of a flag, and the last value that was read
    where          name of the use of the slot
    ranks          global rank of each rank of the group
    """
    return (
        f"rank {ranks[wait.a]} has waited {PATIENCE:g} s for rank {ranks[wait.b]}, which {WAITS_FOR[wait.what]} ({where}, use "
        f"{wanted}, last seen {seen}): rank {ranks[wait.b]} has exited, hangs, or runs another layer"
    )
