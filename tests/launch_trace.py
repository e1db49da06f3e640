"""Record launches on the emulated device, with the stream and the bytes that each launch reads and writes.

    take  records the launches and collectives of the code inside. `Taken.named_alike` replaces addresses by numbers that
          mean the same memory on all ranks

A kernel of the emulated device looks up tensors by address: the tensors that it changes are its writes, the others its
reads. `meet` and `agree` of a slot (`dlp.comm.slots`) are recorded as two launches: signal the peers, and wait for the
peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives, exchange, transport
from dlp.comm.mapped import Transport
from dlp.comm.slots import AGREED, HEADER, MAXIMA, RANKS, USES
from tests import emulated, pointer_arguments
from tests.simulated_transport import STEPS, bases, header, new_event

Spans = Any  # int64 [n, 2], a row per span of memory: its first byte, and the byte after its last
NONE = np.empty((0, 2), dtype=np.int64)
CALLS = -1  # stream of the recorded collectives
# Addresses after `named_alike`. In a slot, the bits from SLOT on are 1 + RANKS * (number of the slot) + (rank that has the
# buffer). Outside of slots, the bits from RANK on are 1 + rank.
SLOT, RANK = 40, 56


class Launch(NamedTuple):
    """A launch. `of`: the event or the slot with which the launch waits or signals; 0 for other launches."""

    name: str
    stream: int
    of: int = 0
    reads: Spans = NONE
    writes: Spans = NONE


class Taken(list[Launch]):
    """Launches of one rank, in the order of recording."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        super().__init__()
        self._rank, self._world, self._transports = dist.get_rank(), dist.get_world_size(), transports
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

    def call(self, start: Callable[..., list[Any]], group: ProcessGroup, *given: Any) -> list[Any]:
        """Record a collective on stream CALLS, which waits for the current stream. The current stream waits for the
        collective when `wait` of the returned work is called."""
        tensors = [each for each in given if isinstance(each, Tensor)]
        before, after = new_event(), new_event()
        self.append(Launch("mark", 0, before))
        self.append(Launch("await_mark", CALLS, before))
        touched = (joined(map(spans, each)) for each in CALLED[start.__name__][1](tensors))
        self.append(Launch(start.__name__, CALLS, 0, *touched))
        self.append(Launch("mark", CALLS, after))
        awaited = partial(self.append, Launch("await_mark", 0, after))
        return [Awaited(work, awaited) for work in start(group, *given)]

    def _agreed(self, stream: int, table: int, words: Sequence[int], waiting: Sequence[int]) -> list[Launch]:
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
        """Return the launches with numbers in place of addresses and slots. A number means the same memory, or the same
        slot, on all ranks."""
        slots = [
            (base, HEADER + slot.payload.nbytes, (i * RANKS + owner + 1 << SLOT) - base)
            for i, slot in enumerate(slot for transport in self._transports for slot in transport.slots)
            for owner, base in enumerate(slot._bases[: self._world])  # type: ignore[attr-defined]
        ]
        number = {base: i // self._world for i, (base, *_) in enumerate(slots)}

        def alike(of: Spans) -> Spans:
            by = np.full((len(of), 1), self._rank + 1 << RANK)
            for base, size, moved in slots:
                by[(of[:, 0] >= base) & (of[:, 0] < base + size)] = moved
            return of + by

        return [Launch(*each[:2], number.get(each.of, each.of), *map(alike, each[3:])) for each in self]


class Awaited(NamedTuple):
    """The work of a collective. `wait` also calls `taken`, which records the wait."""

    work: Any
    taken: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.taken()


def block(at: int, width: int, height: int = 1, pitch: int = 0) -> Spans:
    first = at + pitch * np.arange(height if width else 0)[:, None]
    return np.concatenate([first, first + width], 1)


def spans(tensor: Tensor) -> Spans:
    """Return the spans of a tensor. Rows that are adjacent in memory are one span."""
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


def gathered(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts that an all-gather reads and the segments that it writes. A part that is already in its segment
    of the gathered buffer is not written."""
    written = [(part, piece) for whole, part in zip(tensors[::2], tensors[1::2], strict=True)
               for piece in whole.chunk(len(whole) // len(part) if len(part) else 1)]  # fmt: skip
    return list(tensors[1::2]), [piece for part, piece in written if piece.data_ptr() != part.data_ptr()]


def halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


CALLED: dict[str, tuple[Any, Callable[[Sequence[Tensor]], Any]]] = {  # module; tensors read, tensors written
    "_start_gathers": (collectives, gathered), "_start_exchange": (collectives, lambda each: (each[1:], each[:1])),
    "_start_round": (exchange, halves), "_start_maxima": (transport, lambda each: ((), each)),
}  # fmt: skip


@contextmanager
def take(*transports: Transport) -> Iterator[Taken]:
    """Record launches inside `emulation()`. The context must begin before the first use of any transport."""
    taken, module, gemm = Taken(transports), emulated.Module, emulated.Plan.run
    with ExitStack() as patches:
        put = lambda *what: patches.enter_context(patch.object(*what))  # noqa: E731
        put(emulated, "at", partial(taken.at, emulated.at))
        put(emulated.Plan, "run", lambda plan, *words: taken.run("gemm", partial(gemm, plan), *words))
        for name, (where, _) in CALLED.items():
            put(where, name, partial(taken.call, getattr(where, name)))
        for name in {*pointer_arguments.addresses(), *STEPS} - {"new_event"}:
            if hasattr(module, name):
                put(module, name, staticmethod(partial(taken.run, name, getattr(module, name))))
        yield taken
