"""Search for races among the launches of all ranks on the emulated device.

    disorder  returns the races: pairs of launches (`tests.launch_trace`) that access the same bytes, at least one of them
              to write, without waiting for each other; and signals that are lost, because a launch writes a flag of a
              slot (`dlp.comm.slots`) before the previous value was read

The emulated device runs every launch immediately, so a missing wait changes no bits on CPUs, not even with kernels that
are compiled for CPUs (tests/cuda_on_cpu). The search assumes that a launch has finished before a launch on another stream
only if the other stream has waited for it: by events, or by the calls `begin`, `meet`, `release` and `agree` of a slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from dlp.comm.mapped import Transport
from dlp.comm.slots import MET, SENT, UNREAD
from tests.launch_trace import CALLS, Launch, joined, take


@contextmanager
def in_order(*transports: Transport) -> Iterator[None]:
    """Context at whose end rank 0 raises AssertionError if `disorder` finds a race, a lost signal or a deadlock among the
    launches of all ranks inside the context."""
    with take(*transports) as taken:
        yield
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, taken.named_alike())
    found = disorder(every) if dist.get_rank() == 0 else []
    assert not found, "\n".join(found)


def disorder(taken: Sequence[Sequence[Launch]]) -> list[str]:
    """Return a description of each race and each lost signal, and "ranks wait for each other" if no rank can continue.
    `taken`: the launches of each rank, from `named_alike`."""
    order = Order(taken)
    ranks = [order.run(rank, launches) for rank, launches in enumerate(taken)]
    while ranks:
        before = len(order.names)
        ranks = [rank for rank in ranks if next(rank, "done") != "done"]
        if ranks and len(order.names) == before:
            return [*sorted(order.found), "ranks wait for each other"]
    return sorted(order.found)


# Launches that wait for a flag of each peer in this rank's buffer: index of the first flag, smallest value that ends the
# wait (None: the value of this rank's flag), and value that the launch writes afterwards (None: nothing).
WAITS = {"begin_use": (UNREAD, 0, -1), "met": (SENT, 1, 0), "agreed": (MET, None, None)}
# Launches that write a flag in the buffer of each peer: index of the flags, and the value. None: the launch increments
# the flag.
TELLS = {"meet": (SENT, 1), "release_use": (UNREAD, 0), "agree": (MET, None)}


class Word(NamedTuple):
    """Flag in a buffer: its value, and the launch that wrote it (row of `clock` at that time, stream, index on the
    stream)."""

    value: int
    clock: Any
    stream: int = 0
    when: int = 0


WHERE = {0: "", CALLS: ", a collective"}


class Order:
    """State of the search (vector clocks). `clock[a, b]` is the index of the last launch of stream b that stream a has
    waited for; the streams of all ranks are numbered together. Memory is divided at the bounds of all accesses; for each
    piece, the state has the last write, and the last read by each stream."""

    def __init__(self, taken: Sequence[Sequence[Launch]]) -> None:
        every = sorted({(rank, each.stream) for rank, launches in enumerate(taken) for each in launches})
        self.world, self.streams = len(taken), {stream: i for i, stream in enumerate(every)}
        self.clock, none = np.eye(len(every), dtype=np.int64), np.zeros(len(every), dtype=np.int64)
        self.bounds = np.unique(joined(each for launches in taken for launch in launches for each in launch[3:]))
        self.writer, self.written, *self.read = np.zeros((2 + len(every), len(self.bounds)), dtype=np.int64)
        self.names, self.found = dict[tuple[int, int], str](), set[str]()
        self.marks = defaultdict[tuple[int, int], Any](lambda: none)
        # Flags by slot, rank and index
        self.words = defaultdict[tuple[int, int, int], Word](lambda: Word(0, none))

    def run(self, rank: int, launches: Sequence[Launch]) -> Iterator[None]:
        """Run one launch after the other; yield while a launch waits for a peer."""
        for launch in launches:
            name, stream, of, *_ = launch
            mine = self.streams[rank, stream]
            clock = self.clock[mine]
            clock[mine] += 1
            self.names[mine, clock[mine]] = f"{name} of rank {rank}{WHERE.get(stream, ', on a side stream')}"
            word, least, then = WAITS.get(name, (0, 0, None))
            least = self.words[of, rank, MET + rank].value if least is None else least
            for peer in range(self.world) if name in WAITS else ():
                while peer != rank and self.words[of, rank, word + peer].value < least:
                    yield
                np.maximum(clock, self.words[of, rank, word + peer].clock, out=clock)
                if then is not None and peer != rank:
                    self._write(mine, (of, rank, word + peer), then)
            if name == "await_mark":
                np.maximum(clock, self.marks[rank, of], out=clock)
            self._touch(mine, clock, launch)
            if name == "mark":
                self.marks[rank, of] = clock.copy()
            for peer in range(self.world) if name in TELLS else ():
                if peer == rank and name != "agree":  # `agree` also increments this rank's flag
                    continue
                word, value = TELLS[name]
                at = of, peer, word + rank
                self._write(mine, at, self.words[at].value + 1 if value is None else value)

    def _write(self, mine: int, at: tuple[int, int, int], value: int) -> None:
        clock, before = self.clock[mine], self.words[at]
        if before.when > clock[before.stream]:
            self.found.add(
                f"{self.names[mine, clock[mine]]} does not wait for {self.names[before.stream, before.when]}"
            )
        if before.value == value:
            self.found.add(f"{self.names[mine, clock[mine]]} sets a flag again before a peer has read the flag")
        self.words[at] = Word(value, clock.copy(), mine, int(clock[mine]))

    def _touch(self, mine: int, clock: Any, launch: Launch) -> None:
        for where, writes in ((launch.reads, False), (launch.writes, True)):
            first, last = np.searchsorted(self.bounds, where).T
            at = np.concatenate([np.empty(0, dtype=np.int64), *map(np.arange, first, last)])
            earlier = [(self.writer[at], self.written[at])]
            earlier += [(np.full_like(at, other), read[at]) for other, read in enumerate(self.read) if writes]
            for other, when in earlier:
                late = when > clock[other]
                self.found |= {
                    f"{self.names[mine, clock[mine]]} does not wait for {self.names[each]}"
                    for each in zip(other[late], when[late], strict=True)
                }
            if writes:
                self.writer[at], self.written[at] = mine, clock[mine]
            else:
                self.read[mine][at] = clock[mine]
