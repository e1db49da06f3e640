"""The two kinds of transfers through mapped memory (`dlp.comm.mapped`): `Gathering` (all-gather) and `Exchange` (all-to-all).

A `Gathering` sends shards in one piece, or in several pieces, which a consumer can await one by one. An `Exchange` sends each
chunk as soon as the chunk has been computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import Parts, Pending, record
from dlp.comm.slots import Place, Slot
from dlp.comm.wire_checks import Chunks, Transfer, WireChecks

Cuts = Sequence[tuple[int, int]]  # rows [start, stop) of each piece of a shard; the last stop is the number of rows
WHOLE: Cuts = ((0, 1),)  # one piece, the full shard; the two numbers are not read


class SlotSource(Protocol):
    """Protocol with the members of `dlp.comm.mapped.Transport` that a transfer uses.

    transfers   number of transfers that the current pass has begun
    checked     checksums of transfers of the current pass, which are completed at the end of the pass
    """

    group: ProcessGroup
    rank: int
    world: int
    transfers: int
    checked: list[Transfer]

    def begin(self, nbytes: int, piece: int = 0, of: int = 0) -> Slot: ...
    def count(self, part: Tensor, peer: int) -> None: ...


class Gathering:
    """All-gather of parts through mapped memory.

    mine     this rank's parts, which must be written before `send`
    dims     dimension along which each part is gathered; None for a part that is equal on all ranks and is not sent
    whole    index of a part that is sent -> the gathered part, a view of this rank's slot
    starts   index of a part that is sent -> offset of the gathered part in the payload of the slot, in bytes
    """

    def __init__(
        self, transport: SlotSource, slot: Slot, mine: Parts, whole: dict[int, Tensor], starts: dict[int, int],
        dims: Sequence[int | None],
    ) -> None:  # fmt: skip
        self.transport, self.slot, self.mine = transport, slot, mine
        self.whole, self.starts, self.dims, self._transfer = whole, starts, dims, transport.transfers
        self._piece_slots, self._waited, self._kept = [slot], set[int](), False

    def send(self, cuts: Cuts = WHOLE) -> Gathering:
        """Start sending `mine`. Rank r pushes to rank r + 1 first, then to r + 2, and so on, so that no two ranks push to the
        same rank at the same time.

        cuts   rows of each piece; `others` can wait for the pieces one by one. Several pieces need dim 0 for all sent parts
        """
        transport, world = self.transport, self.transport.world
        self._piece_slots = [*(transport.begin(0, piece, self._transfer) for piece in range(1, len(cuts))), self.slot]
        if WireChecks.active is not None and (mine := [part for part, _ in self._sent()]):
            transport.checked.append(WireChecks.active.sends(transport.group, mine, self._arriving(mine)))
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
        """Send `mine`, and return the pending gathered parts, which are valid until the pass ends (`Transport.finish`)."""
        self.send()._keep()
        return Pending((), self.all_parts)

    def others(self, piece: int = -1) -> Parts:
        """Return the gathered parts. This rank's rows of a part are valid only if `mine` is stored in the slot.

        The current stream waits for all rows of other ranks, or with `piece` only for their pieces 0 to `piece`."""
        piece %= len(self._piece_slots)
        if not any(later >= piece for later in self._waited):
            self._piece_slots[piece].wait()
            self._waited.add(piece)
        return tuple(self.whole.get(i, part) for i, part in enumerate(self.mine))

    def all_parts(self) -> Parts:
        """Return the gathered parts, with this rank's rows. The current stream waits for the rows of other ranks."""
        self._keep()
        return self.others()

    def _keep(self) -> None:
        """Copy `mine` into this rank's slot on the current stream, except for parts that are stored there already."""
        for part, place in () if self._kept else self._sent():
            if part.data_ptr() != self.slot.payload.data_ptr() + place.offset:
                self.slot.keep(part, place)
        self._kept = True

    def _arriving(self, mine: Sequence[Tensor]) -> Chunks:
        """Return the gathered parts, split by rank. The entry of this rank is `mine`, because this rank's rows of the
        slot may be unwritten."""
        world = self.transport.world
        cut = [self.whole[i].chunk(world, self.dims[i] or 0) for i in self.starts if self.whole[i].numel()]
        return {rank: [parts[rank] for parts in cut] for rank in range(world)} | {self.transport.rank: mine}

    def _sent(self) -> Iterator[tuple[Tensor, Place]]:
        """Yield each part of this rank that is sent, with its position in the slot of every rank."""
        world, rank = self.transport.world, self.transport.rank
        for i, start in self.starts.items():
            part, dim = self.mine[i], self.dims[i]
            assert dim is not None
            height, width = prod(part.shape[:dim]), prod(part.shape[dim:]) * part.itemsize
            if width * height:
                yield part, Place(start + rank * width, width, height, world * width)


class Exchange:
    """All-to-all of parts through mapped memory: chunk j of each part goes to rank j.

    arrived   parts [R, ...], whose chunk r is from rank r; valid from `wait` until the pass ends (`Transport.finish`)
    """

    def __init__(self, transport: SlotSource, slot: Slot, arrived: Parts, starts: Sequence[int]) -> None:
        self.arrived = arrived
        self._transport, self._slot, self._starts = transport, slot, starts
        # (receiver, first row, chunks) of each send; the list keeps the chunks alive while copies read them
        self._sent = list[tuple[int, int, Sequence[Tensor]]]()

    def send(self, chunks: Sequence[Tensor], to: int, row: int = 0) -> None:
        """Send chunk `to` of each part, or some rows of the chunk, to rank `to`, which may be this rank. The copies start after
        all earlier work of the current stream, such as the kernels that write the chunks.

        chunks   for each part: chunk `to`, or consecutive rows of it
        row      index of the first of these rows in the full chunk"""
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
        self._sent.append((to, row, chunks))

    def sent(self) -> Pending[Parts]:
        """Return the pending `arrived`. The caller must have sent all chunks."""
        if WireChecks.active is not None:
            self._transport.checked.append(WireChecks.active.sends(self._transport.group, *self._ends()))
        self._slot.meet()
        return Pending([self], lambda: self.arrived)

    def _ends(self) -> tuple[Chunks, Chunks]:
        """Return the chunks for each other rank, and the memory of the chunks from each other rank.

        Two ranks send rows with the same indices to each other; the sent rows therefore determine the received rows."""
        outgoing, arriving = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for to, row, chunks in self._sent:
            if to != self._transport.rank:
                outgoing.setdefault(to, []).extend(chunks)
                rows = [part[to, row : row + len(chunk)] for part, chunk in zip(self.arrived, chunks, strict=True)]
                arriving.setdefault(to, []).extend(rows)
        return outgoing, arriving

    def wait(self) -> None:
        self._slot.wait()
        self._sent.clear()

    def send_all(self, parts: Sequence[Tensor], *, own: bool = True) -> Pending[Parts]:
        """Send chunk j of each part [R, ...] to rank j. `own`: also copy this rank's chunk to `arrived`.

        The observer counts for each peer the bytes that `collectives.all_to_all` sends to one rank."""
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
    """Return the piece of a part that belongs to rows [start, stop) of an operand with `rows` rows, and the position of the
    piece in the slot of every rank.

    The part may have fewer rows than the operand, for example the scales of blocks."""
    first, last = start * len(part) // rows, stop * len(part) // rows
    piece = part[first:last]
    return piece, Place(place.offset + part[:first].nbytes, piece.nbytes, 1, piece.nbytes)


def views(
    memory: Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Parts:  # fmt: skip
    """Return views of `memory`, a uint8 tensor, with these shapes and dtypes, which begin at the byte offsets `starts`."""
    return tuple(
        memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        if prod(shape) else torch.empty(tuple(shape), dtype=dtype, device=memory.device)
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    )  # fmt: skip
