"""The transfers of a direction (`dlp.comm.mapped`): parts of all ranks gathered along a dimension, or chunks exchanged.

A `Gathering` sends whole shards, or pieces of them that are awaited one by one; of an `Exchange` chunks leave as they are made,
or are stored by the kernel that makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from dlp.comm import observer
from dlp.comm.collectives import Parts, Pending, record
from dlp.comm.slots import Place, Slot
from dlp.kernels.table import Sending

Cuts = Sequence[tuple[int, int]]  # pieces: rows [start, stop), one after the other
WHOLE: Cuts = ((0, 1),)


class Direction(Protocol):
    """What a transfer belongs to (`dlp.comm.mapped.Transport`). `transfers`: how many it has begun so far."""

    rank: int
    world: int
    transfers: int

    def begin(self, nbytes: int, piece: int = 0, of: int = 0, on_lane: bool = True) -> Slot: ...
    def count(self, part: Tensor, peer: int) -> None: ...


class Gathering:
    """`mine`: this rank's parts, to be written before they are sent. `whole` and `starts`: those of all ranks, in the slot, of
    the parts that move, by their number."""

    def __init__(
        self, transport: Direction, slot: Slot, mine: Parts, whole: dict[int, Tensor], starts: dict[int, int],
        dims: Sequence[int | None],
    ) -> None:  # fmt: skip
        self.transport, self.slot, self.mine = transport, slot, mine
        self.whole, self.starts, self.dims, self._place = whole, starts, dims, transport.transfers
        self._met, self._waited, self._kept = [slot], set[int](), False

    def send(self, cuts: Cuts = WHOLE, in_turn: bool = False) -> Gathering:
        """Start sending `mine`. Each rank pushes to the one behind it first, so that no two push to one at a time. `cuts`: rows
        of the parts, which all move along 0, that arrive one piece after the other. `in_turn`: not cut, and a kernel may
        wait itself for each rank's (`coming`)."""
        transport, world = self.transport, self.transport.world
        self._met = [*(transport.begin(0, piece, self._place) for piece in range(1, len(cuts))), self.slot]
        self.slot.follow()
        for cut, met in zip(cuts, self._met, strict=True):
            for distance in range(1, world):
                to = (transport.rank + distance) % world
                for part, place in self._sent():
                    piece, where = (part, place) if len(cuts) == 1 else _piece(part, place, *cut, cuts[-1][1])
                    transport.count(piece, to)
                    self.slot.push(piece, to, where)
                if in_turn:
                    self.slot.tell(to)
            met.meet_told() if in_turn else met.meet()
        return self

    def gather(self) -> Pending[Parts]:
        """`mine` -> the parts of all ranks along their dims, to be read before the direction finishes."""
        self.send()._keep()
        return Pending((), self.all_parts)

    def others(self, piece: int = -1) -> Parts:
        """The parts of all ranks, of which this rank's own may be missing; waits for them, or for those up to a piece."""
        piece %= len(self._met)
        if not any(later >= piece for later in self._waited):
            self._met[piece].wait()
            self._waited.add(piece)
        return tuple(self.whole.get(i, part) for i, part in enumerate(self.mine))

    def coming(self) -> Parts:
        """The parts of all ranks, of which only this rank's own are here."""
        self._keep()
        return tuple(self.whole.get(i, part) for i, part in enumerate(self.mine))

    def all_parts(self) -> Parts:
        """The same, and this rank's own; waits for them."""
        self._keep()
        return self.others()

    def _keep(self) -> None:
        """Put this rank's own parts beside the others', by the current stream."""
        for part, place in () if self._kept else self._sent():
            if part.data_ptr() != self.slot.payload.data_ptr() + place.offset:
                self.slot.keep(part, place)
        self._kept = True

    def _sent(self) -> Iterator[tuple[Tensor, Place]]:
        """Parts that move, and where they lie in all slots."""
        world, rank = self.transport.world, self.transport.rank
        for i, start in self.starts.items():
            part, dim = self.mine[i], self.dims[i]
            assert dim is not None
            height, width = prod(part.shape[:dim]), prod(part.shape[dim:]) * part.itemsize
            if width * height:
                yield part, Place(start + rank * width, width, height, world * width)


class Exchange:
    """`arrived`: parts [R, ...], whose chunk r came from rank r, to be read after `wait` and before the direction finishes."""

    def __init__(self, transport: Direction, slot: Slot, arrived: Parts, starts: Sequence[int]) -> None:
        self.arrived = arrived
        self._transport, self._slot, self._starts, self._sent = transport, slot, starts, list[Tensor]()

    def send(self, chunks: Sequence[Tensor], to: int, row: int = 0) -> None:
        """This rank's chunk of each part to a rank, itself among them, or rows of it, from `row` on. They have been written."""
        for chunk in chunks:
            self._transport.count(chunk, to)
        if to != self._transport.rank:
            self._slot.follow()
        self._push(chunks, to, row)

    def _push(self, chunks: Sequence[Tensor], to: int, row: int = 0) -> None:
        rank = self._transport.rank
        for chunk, start, arrived in zip(chunks, self._starts, self.arrived, strict=True):
            first = rank * arrived[0].nbytes + (arrived[0, :row].nbytes if row else 0)
            place = Place(start + first, chunk.nbytes, 1, chunk.nbytes)
            if to != rank and chunk.nbytes:
                self._slot.push(chunk, to, place)
            elif chunk.nbytes and chunk.data_ptr() != self._slot.payload.data_ptr() + place.offset:
                self._slot.keep(chunk, place)
        self._sent += chunks

    def sending(self) -> Sending:
        """Where a kernel of the current stream stores the rows of the one part, this rank's chunk for each rank."""
        ((start, arrived),) = zip(self._starts, self.arrived, strict=True)
        return self._slot.sending(len(arrived[0]), start + self._transport.rank * arrived[0].nbytes)

    def stored(self) -> Pending[Parts]:
        """The kernel has been launched -> `arrived`, with this rank's chunk."""
        for peer, chunk in enumerate(self.arrived[0]):
            self._transport.count(chunk, peer)
        self._slot.follow()
        return self.sent()

    def sent(self) -> Pending[Parts]:
        """All chunks have been sent -> `arrived`."""
        self._slot.meet()
        return Pending([self], lambda: self.arrived)

    def wait(self) -> None:
        self._slot.wait()
        self._sent.clear()

    def send_all(self, parts: Sequence[Tensor], *, own: bool = True) -> Pending[Parts]:
        """Chunk j of each part [R, ...] to rank j; counted as one record for each, as `collectives.all_to_all` sends. `own`: to
        this rank, too, else it is read where it is."""
        transport, first = self._transport, parts[0]
        whole = (
            torch.empty(record(parts) // first.itemsize, dtype=first.dtype, device="meta")
            if observer.counting()
            else first
        )
        self._slot.follow()
        for distance in range(1, transport.world + own):
            to = (transport.rank + distance) % transport.world
            transport.count(whole, to)
            self._push([part[to] for part in parts], to)
        return self.sent()


def _piece(part: Tensor, place: Place, start: int, stop: int, rows: int) -> tuple[Tensor, Place]:
    """Of a part that moves along 0, what belongs to rows [start, stop) of so many, and where it lies in all slots."""
    first, last = start * len(part) // rows, stop * len(part) // rows
    piece = part[first:last]
    return piece, Place(place.offset + part[:first].nbytes, piece.nbytes, 1, piece.nbytes)


def views(
    memory: Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Parts:  # fmt: skip
    """Bytes -> the tensors that begin there."""
    return tuple(
        memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        if prod(shape) else torch.empty(tuple(shape), dtype=dtype, device=memory.device)
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    )  # fmt: skip
