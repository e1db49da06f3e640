"""Whether what was launched is in order: a search for races among the launches of all ranks, on the played device.

    take       inside, launches are taken down: their streams, and what they read and write of the memory of all ranks
    disorder   launches that touch the same bytes, of which one writes and neither waits for the other

A played stream is never behind, so a launch that waits for nobody finds the right bits on CPUs. Here only what a stream has
waited for has happened, by marks, begins, meetings, releases and agreements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dlp.comm.mapped import Transport
from dlp.comm.slots import AGREED, HEADER, MAXIMA, MET, RANKS, SENT, UNREAD, USES
from tests import bound, emulated
from tests.played_transport import STEPS, bases, header

Spans = Any  # int64 [n, 2]: the first byte of each, and the one behind its last
NONE = np.empty((0, 2), dtype=np.int64)
SLOT, RANK = 40, 56  # bits of an address: above them the slot it lies in and whose, or the rank of other memory


class Launch(NamedTuple):
    """`of`: the event or the slot of what waits or tells."""

    name: str
    stream: int
    of: int = 0
    reads: Spans = NONE
    writes: Spans = NONE


class Taken(list[Launch]):
    """By one rank. A kernel touches what it asks for, and writes what changes then."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        super().__init__()
        self._rank, self._world, self._transports = transports[0].rank, transports[0].world, transports
        self._asked = list[Tensor]()

    def at(self, at: Callable[..., Tensor], *what: Any) -> Tensor:
        self._asked.append(at(*what))
        return self._asked[-1]

    def run(self, name: str, kernel: Callable[..., None], *arguments: Any) -> None:
        self._asked = []
        kernel(*arguments)
        *words, stream = arguments
        if name in TOUCHED:
            self.append(Launch(name, stream, 0, *TOUCHED[name](*words)))
        elif name == "agree":
            self += self._agreed(stream, *words)
        elif name in STEPS:
            of = words[0] if "mark" in name else words[0][self._rank]
            self += (Launch(each, stream, of) for each in ((name, "met") if name == "meet" else (name,)))
        else:
            both = [[each for each in self._asked if bool(each._version) is written] for written in (False, True)]
            self.append(Launch(name, stream, 0, *(joined(map(spans, each)) for each in both)))

    def _agreed(self, stream: int, table: int, words: Sequence[int], waiting: Sequence[int]) -> list[Launch]:
        """As two, as `meet` is: until the others have been told, and once they have told."""
        slots, lengths = bases(table, self._world), words[2 * AGREED : 3 * AGREED]
        half = HEADER + header(slots[self._rank])[USES] % 2 * self._world * MAXIMA * 4
        its = lambda first: joined(block(words[first + i], 4 * count) for i, count in enumerate(lengths))  # noqa: E731
        part = lambda owner, of: block(slots[owner] + half + of * MAXIMA * 4, 4 * sum(lengths))  # noqa: E731
        peers = [peer for peer in range(self._world) if peer != self._rank]
        pushed = joined(part(peer, self._rank) for peer in peers)
        came = joined(part(self._rank, peer) for peer in peers)
        slot = slots[self._rank]
        return [Launch("agree", stream, slot, its(0), pushed), Launch("agreed", stream, slot, came, its(AGREED))]

    def named_alike(self) -> list[Launch]:
        """With the addresses and slots that all ranks know them by."""
        slots = [
            (base, HEADER + slot.payload.nbytes, (i * RANKS + owner + 1 << SLOT) - base)
            for i, slot in enumerate(slot for transport in self._transports for slot in transport.slots)
            for owner, base in enumerate(slot._bases[: self._world])  # type: ignore[attr-defined]
        ]
        number = {base: i // self._world for i, (base, *_) in enumerate(slots)}

        def alike(of: Spans) -> Spans:
            inside = [(of[:, :1] >= base) & (of[:, :1] < base + size) for base, size, _ in slots]
            return of + np.select(inside, [moved for _, _, moved in slots], self._rank + 1 << RANK)

        return [Launch(*each[:2], number.get(each.of, each.of), *map(alike, each[3:])) for each in self]


def block(at: int, width: int, height: int = 1, pitch: int = 0) -> Spans:
    first = at + pitch * np.arange(height if width else 0)[:, None]
    return np.concatenate([first, first + width], 1)


def spans(tensor: Tensor) -> Spans:
    width, starts = tensor.itemsize, np.zeros(min(1, tensor.numel()), dtype=np.int64)
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step * tensor.itemsize == width:
            width *= size
        else:
            starts = np.add.outer(starts, step * tensor.itemsize * np.arange(size)).reshape(-1)
    return (tensor.data_ptr() + starts)[:, None] + np.array([0, width])


def joined(every: Iterable[Spans]) -> Spans:
    return np.concatenate([NONE, *every])


TOUCHED = {
    "push_part": lambda part, to, pitch, width, height: (block(part, width * height), block(to, width, height, pitch)),
    "copy_rows": lambda part, pitch, to, to_pitch, width, height: (
        block(part, width, height, pitch), block(to, width, height, to_pitch),
    ),
}  # fmt: skip


@contextmanager
def take(*transports: Transport) -> Iterator[Taken]:
    """Inside `emulation()`, from the first use of transports of the same ranks on."""
    taken, module, gemm = Taken(transports), emulated.Module, emulated.Plan.run
    with ExitStack() as patches:
        put = lambda *what: patches.enter_context(patch.object(*what))  # noqa: E731
        put(emulated, "at", partial(taken.at, emulated.at))
        put(emulated.Plan, "run", lambda plan, *words: taken.run("gemm", partial(gemm, plan), *words))
        for name in {*bound.addresses(), *STEPS} - {"new_event"}:
            if hasattr(module, name):
                put(module, name, staticmethod(partial(taken.run, name, getattr(module, name))))
        yield taken


@contextmanager
def in_order(*transports: Transport) -> Iterator[None]:
    """The same, where no rank may launch anything in disorder."""
    with take(*transports) as taken:
        yield
    every: list[Any] = [None] * transports[0].world
    dist.all_gather_object(every, taken.named_alike(), transports[0].group)
    found = disorder(every) if transports[0].rank == 0 else []
    assert not found, "\n".join(found)


def disorder(taken: Sequence[Sequence[Launch]]) -> list[str]:
    """What all ranks have `named_alike` -> in words, the pairs of launches that are in no order."""
    order = Order(taken)
    ranks = [order.run(rank, launches) for rank, launches in enumerate(taken)]
    while ranks:
        before = len(order.names)
        ranks = [rank for rank in ranks if next(rank, "done") != "done"]
        if ranks and len(order.names) == before:
            return [*sorted(order.found), "ranks wait for each other"]
    return sorted(order.found)


# What a launch waits for in its own slot, from each peer: a word, its least value, and what the word is then. What it tells.
WAITS = {"begin_use": (UNREAD, 0, -1), "met": (SENT, 1, 0), "agreed": (MET, None, None)}
TELLS = {"meet": (SENT, 1), "release_use": (UNREAD, 0), "agree": (MET, None)}  # None: a count, which grows


class Order:
    """`clock[a, b]`: up to which of its launches stream a knows stream b to be. Bytes are told apart by the bounds of what is
    touched: which stream has written them last, and when, and when each has read them last."""

    def __init__(self, taken: Sequence[Sequence[Launch]]) -> None:
        every = sorted({(rank, each.stream) for rank, launches in enumerate(taken) for each in launches})
        self.world, self.streams = len(taken), {stream: i for i, stream in enumerate(every)}
        self.clock, none = np.eye(len(every), dtype=np.int64), np.zeros(len(every), dtype=np.int64)
        self.bounds = np.unique(joined(each for launches in taken for launch in launches for each in launch[3:]))
        self.writer, self.written, *self.read = np.zeros((2 + len(every), len(self.bounds)), dtype=np.int64)
        self.names, self.found = dict[tuple[int, int], str](), set[str]()
        self.marks = defaultdict[tuple[int, int], Any](lambda: none)
        self.words = defaultdict[tuple[int, int, int], tuple[int, Any]](
            lambda: (0, none)
        )  # of a slot, a rank, by number

    def run(self, rank: int, launches: Sequence[Launch]) -> Iterator[None]:
        """One launch after the other; yields where it waits for a peer."""
        for launch in launches:
            name, stream, of, *_ = launch
            mine = self.streams[rank, stream]
            clock = self.clock[mine]
            clock[mine] += 1
            self.names[mine, clock[mine]] = f"{name} of rank {rank}{', on a lane' if stream else ''}"
            word, least, then = WAITS.get(name, (0, 0, None))
            least = self.words[of, rank, MET + rank][0] if least is None else least
            for peer in range(self.world) if name in WAITS else ():
                while peer != rank and self.words[of, rank, word + peer][0] < least:
                    yield
                np.maximum(clock, self.words[of, rank, word + peer][1], out=clock)
                if then is not None:
                    self.words[of, rank, word + peer] = then, clock.copy()
            if name == "await_mark":
                np.maximum(clock, self.marks[rank, of], out=clock)
            self._touch(mine, clock, launch)
            if name == "mark":
                self.marks[rank, of] = clock.copy()
            for peer in range(self.world) if name in TELLS else ():
                word, value = TELLS[name]
                value = self.words[of, peer, word + rank][0] + 1 if value is None else value
                self.words[of, peer, word + rank] = value, clock.copy()

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
