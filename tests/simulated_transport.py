"""The transport of GPUs, simulated on the CPU: the memory of `CudaSlot` is files that ranks map, and its kernels are
Python functions of addresses.

Work on the current stream runs immediately. Work on a side stream runs immediately, too, or, with `late`, in a thread
that runs the work only when another stream waits for it or after some time. A late side stream exposes memory that is
released or overwritten before the side stream has read it.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.slots import AGREED, HEADER, MAXIMA, MET, RANKS, SENT, UNREAD, USES, CudaSlot, Named
from dlp.kernels.launches import Lane
from tests.shared_slot import SharedSlot

PATIENCE = 60.0
EVENTS = itertools.count(1)


class SimulatedLane(Lane):
    """Simulated side stream. `late`: seconds by which the stream delays work for which no other stream waits; 0 runs
    work immediately."""

    def __init__(self, late: float = 0.0) -> None:
        self.stream, self._fork, self._late = next(EVENTS), next(EVENTS), late
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._given = self._done = self._wanted = 0
        self._changed, self._failed = threading.Condition(), list[BaseException]()
        # Event -> number of jobs that had been submitted when the event was last recorded
        self.marks: dict[int, int] = {}
        if late:
            LATE[self.stream] = self
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def give(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append((time.monotonic() + self._late, job))
            self._given += 1
            self._changed.notify_all()

    def until(self, count: int) -> None:
        """Wait until the side stream has finished its first `count` jobs."""
        with self._changed:
            self._wanted = max(self._wanted, count)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._done >= count or self._failed, PATIENCE)
        if self._failed:
            raise self._failed[0]

    def stands(self) -> None:
        """Wait until the side stream has no work left, or its work waits for a peer."""
        while self._done < self._given and self._thread.ident not in BLOCKED:
            time.sleep(0.001)

    def end(self) -> None:
        """Let the thread end after its remaining work. Do not wait for the end."""
        if LATE.pop(self.stream, None):
            self.give(sys.exit)

    def _work(self) -> None:
        while not self._failed:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                due, job = self._waiting[0]
                self._changed.wait_for(lambda: self._wanted > self._done, max(0.0, due - time.monotonic()))
                self._waiting.popleft()
            try:
                job()
            except BaseException as error:
                self._failed.append(error)
            with self._changed:
                self._done += 1
                self._changed.notify_all()


LATE: dict[int, SimulatedLane] = {}  # late side streams by stream number
BLOCKED = set[int | None]()  # threads that wait for a peer


class SimulatedSlot(CudaSlot):
    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, named: Named, lane: Lane) -> None:
        shared = SharedSlot(nbytes, group, device, named)
        self.payload, self._shared = shared.payload, shared
        self._payloads = [payload.data_ptr() for payload in shared._payloads]
        self._table = torch.tensor([address - HEADER for address in self._payloads])
        self._set(lane, self._table.tolist(), (0, 0, 0, group.rank(), group.size()))

    def headers(self) -> list[list[int]]:
        return [whole[:HEADER].view(torch.int32).tolist() for whole in self._shared.memory]

    def spans(self) -> list[Tensor]:
        """Return all memory whose addresses launches can contain: headers and payloads of all ranks, and the table of
        addresses."""
        return [*self._shared.memory, self._table]


def header(address: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * (HEADER // 4)).from_address(address)


def bases(slots: int, world: int) -> list[int]:
    return list((ctypes.c_int64 * world).from_address(slots))


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        BLOCKED.add(threading.get_ident())
        assert time.monotonic() < deadline, f"a rank has waited for another rank for {PATIENCE} s"
        time.sleep(1e-4)  # a spinning rank uses the core of a working rank
    BLOCKED.discard(threading.get_ident())


def peers(slots: Sequence[int]) -> tuple[int, list[int], list[Any]]:
    """Return (rank, others, headers): this rank, the other ranks, and the headers of all ranks."""
    rank, world = slots[RANKS:]
    return rank, [peer for peer in range(world) if peer != rank], [header(base) for base in slots[:world]]


def begin_use(slots: Sequence[int], use: int, stream: int) -> None:
    rank, others, headers = peers(slots)
    for peer in others:
        until(lambda peer=peer: headers[rank][UNREAD + peer] == 0)
        headers[rank][UNREAD + peer] = use


def meet(slots: Sequence[int], use: int, stream: int) -> None:
    rank, others, headers = peers(slots)
    for peer in others:
        assert not headers[peer][SENT + rank], f"rank {peer} did not await what rank {rank} sent before"
        headers[peer][SENT + rank] = use
    for peer in others:
        until(lambda peer=peer: headers[rank][SENT + peer] >= 1)
        headers[rank][SENT + peer] = 0


def release_use(slots: Sequence[int], stream: int) -> None:
    rank, others, headers = peers(slots)
    for peer in others:
        assert headers[peer][UNREAD + rank], f"rank {rank} releases what rank {peer} has not begun"
        headers[peer][UNREAD + rank] = 0


def push_part(part: int, to: int, pitch: int, width: int, height: int, stream: int) -> None:
    for row in range(height):
        ctypes.memmove(to + row * pitch, part + row * width, width)


def copy_rows(source: int, pitch: int, to: int, to_pitch: int, width: int, height: int, stream: int) -> None:
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, source + row * pitch, width)


def new_event() -> int:
    return next(EVENTS)


def mark(event: int, stream: int) -> None:
    if stream in LATE:
        LATE[stream].marks[event] = LATE[stream]._given


def await_mark(event: int, stream: int) -> None:
    """Wait for an event: let the late side stream that recorded the event finish the work before it. A late
    side stream itself does not wait, because other streams run their work immediately."""
    for lane in LATE.values() if stream not in LATE else ():
        if event in lane.marks:
            lane.until(lane.marks[event])


def agree(slots: int, words: Sequence[int], waiting: Sequence[int], stream: int) -> None:
    rank, world = waiting[3:5]
    sources, targets, lengths = words[:AGREED], words[AGREED : 2 * AGREED], words[2 * AGREED : 3 * AGREED]
    every, use = bases(slots, world), header(bases(slots, world)[rank])[USES] + 1
    half = HEADER + use % 2 * world * MAXIMA * 4
    numbers = lambda address, count: (ctypes.c_uint32 * count).from_address(address)  # noqa: E731
    mine = [value for at, count in zip(sources, lengths, strict=True) if at for value in numbers(at, count)]
    for peer in range(world):
        if peer != rank:
            numbers(every[peer] + half + rank * MAXIMA * 4, len(mine))[:] = mine
    headers = [header(base) for base in every]
    for peer in range(world):
        headers[peer][MET + rank] = use
    until(lambda: all(headers[rank][MET + peer] >= use for peer in range(world)))
    headers[rank][USES] = use
    for peer in range(world):
        if peer != rank:
            mine = [
                max(pair) for pair in zip(mine, numbers(every[rank] + half + peer * MAXIMA * 4, len(mine)), strict=True)
            ]
    for at, count in zip(targets, lengths, strict=True):
        if at:
            numbers(at, count)[:], mine = mine[:count], mine[count:]


def _on_stream(step: Callable[..., None]) -> Callable[..., None]:
    """Wrap a step: run it immediately, or submit it if its stream is a late side stream."""

    @wraps(step)
    def run(*arguments: Any) -> None:
        lane = LATE.get(arguments[-1])
        lane.give(partial(step, *arguments)) if lane else step(*arguments)

    return run


STEPS = {each.__name__: staticmethod(each) for each in (new_event, mark, await_mark)} | {
    each.__name__: staticmethod(_on_stream(each))
    for each in (begin_use, meet, release_use, push_part, copy_rows, agree)
}
