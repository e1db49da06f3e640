"""The two transfers of `dlp.comm.mapped`: a `Gathering` of parts along a dimension, and an `Exchange` of chunks (all-to-all).

A gathering sends whole shards, or cuts them into pieces that arrive one after the other. An exchange sends each chunk when it
has been computed.
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

Cuts = Sequence[tuple[int, int]]  # rows [start, stop) of each piece of a shard; the last stop is the number of rows
WHOLE: Cuts = ((0, 1),)


class SlotSource(Protocol):
    """What a transfer needs of its `dlp.comm.mapped.Transport`. `transfers`: how many the current direction has begun."""

    rank: int
    world: int
    transfers: int

    def begin(self, nbytes: int, piece: int = 0, of: int = 0) -> Slot: ...
    def count(self, part: Tensor, peer: int) -> None: ...


class Gathering:
    """The parts of all ranks, gathered along their dims.

    mine     this rank's parts, to be written before `send`
    dims     of each part: the dimension that it is gathered along; None: it is equal on all ranks, and not sent
    whole    by the index of a part that is sent: the parts of all ranks, a view of the slot
    starts   by the same index: its offset in the slot, in bytes
    """

    def __init__(
        self, transport: SlotSource, slot: Slot, mine: Parts, whole: dict[int, Tensor], starts: dict[int, int],
        dims: Sequence[int | None],
    ) -> None:  # fmt: skip
        self.transport, self.slot, self.mine = transport, slot, mine
        self.whole, self.starts, self.dims, self._transfer = whole, starts, dims, transport.transfers
        self._piece_slots, self._waited, self._kept = [slot], set[int](), False

    def send(self, cuts: Cuts = WHOLE) -> Gathering:
        """Start sending `mine`. Rank r pushes to r + 1 first, then to r + 2, so that no two ranks push to one at a time.

        cuts   the pieces in which the parts, all of dim 0, are sent; `others` waits for them one by one
        """
        transport, world = self.transport, self.transport.world
        self._piece_slots = [*(transport.begin(0, piece, self._transfer) for piece in range(1, len(cuts))), self.slot]
        self.slot.follow()
        for cut, piece_slot in zip(cuts, self._piece_slots, strict=True):
            for distance in range(1, world):
                to = (transport.rank + distance) % world
                for part, place in self._sent():
                    piece, where = (part, place) if len(cuts) == 1 else _piece(part, place, *cut, cuts[-1][1])
                    transport.count(piece, to)
                    self.slot.push(piece, to, where)
            piece_slot.meet()
        return self

    def gather(self) -> Pending[Parts]:
        """Send `mine`; the result is the parts of all ranks, to be read before the direction finishes."""
        self.send()._keep()
        return Pending((), self.all_parts)

    def others(self, piece: int = -1) -> Parts:
        """The parts of all ranks, without this rank's own unless these were written into the slot. The current stream waits for
        all of them, or for the rows up to those of a piece."""
        piece %= len(self._piece_slots)
        if not any(later >= piece for later in self._waited):
            self._piece_slots[piece].wait()
            self._waited.add(piece)
        return tuple(self.whole.get(i, part) for i, part in enumerate(self.mine))

    def all_parts(self) -> Parts:
        """The parts of all ranks, this rank's own among them. The current stream waits for them."""
        self._keep()
        return self.others()

    def _keep(self) -> None:
        """Copy this rank's own parts into its slot, on the current stream, unless they were written there."""
        for part, place in () if self._kept else self._sent():
            if part.data_ptr() != self.slot.payload.data_ptr() + place.offset:
                self.slot.keep(part, place)
        self._kept = True

    def _sent(self) -> Iterator[tuple[Tensor, Place]]:
        """This rank's parts that are sent, and their place in the slots of all ranks."""
        world, rank = self.transport.world, self.transport.rank
        for i, start in self.starts.items():
            part, dim = self.mine[i], self.dims[i]
            assert dim is not None
            height, width = prod(part.shape[:dim]), prod(part.shape[dim:]) * part.itemsize
            if width * height:
                yield part, Place(start + rank * width, width, height, world * width)


class Exchange:
    """Chunk j of each part goes to rank j.

    arrived   parts [R, ...], whose chunk r came from rank r; to be read after `wait` and before the direction finishes
    """

    def __init__(self, transport: SlotSource, slot: Slot, arrived: Parts, starts: Sequence[int]) -> None:
        self.arrived = arrived
        self._transport, self._slot, self._starts, self._sent = transport, slot, starts, list[Tensor]()

    def send(self, chunks: Sequence[Tensor], to: int, row: int = 0) -> None:
        """Send this rank's chunk of each part to rank `to`, which may be this rank; or rows of the chunks, from `row` on. The
        current stream has written them."""
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

    def sent(self) -> Pending[Parts]:
        """Called when all chunks have been sent; the result is `arrived`."""
        self._slot.meet()
        return Pending([self], lambda: self.arrived)

    def wait(self) -> None:
        self._slot.wait()
        self._sent.clear()

    def send_all(self, parts: Sequence[Tensor], *, own: bool = True) -> Pending[Parts]:
        """Send chunk j of each part [R, ...] to rank j. `own`: copy this rank's chunk to `arrived`, too. Observers of bytes see
        one record for each peer, as `collectives.all_to_all` sends them."""
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
    """The share of a part of dim 0 that belongs to rows [start, stop) of `rows`, and its place in the slots of all ranks. The
    part may have fewer rows, as scales of blocks do."""
    first, last = start * len(part) // rows, stop * len(part) // rows
    piece = part[first:last]
    return piece, Place(place.offset + part[:first].nbytes, piece.nbytes, 1, piece.nbytes)


def views(
    memory: Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Parts:  # fmt: skip
    """Tensors of these shapes and dtypes as views of `memory`, bytes, the first of each at `starts`."""
    return tuple(
        memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        if prod(shape) else torch.empty(tuple(shape), dtype=dtype, device=memory.device)
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    )  # fmt: skip
