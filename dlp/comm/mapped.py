"""Transfers between the ranks of one host: each rank pushes its parts into memory of its peers, which all ranks map.

    current stream    ─ write parts ─┐                 ┌─ read arrived parts ─ release
    lane              begin ─────────└─ push ─ meet ───┘

A `Slot` is a piece of such memory on each rank of a group. `begin` waits until the peers have read the previous contents of
their slots, `meet` until all peers have pushed into this rank's slot. Copy engines make the copies, on a lane beside the
current stream (`dlp.kernels.launches`). The launches of a transfer are the same in every step, so that they can be captured:
by `dlp.runtime.capture`, and in a CUDA graph.

A direction of a layer (its forward or its backward) calls `start`, makes its transfers, reads their results and calls `finish`.
All ranks of a group run directions in the same order. The slot of a transfer therefore follows from its size, the style of the
layer and the number of the transfer in its direction, the same on all ranks, whatever each of them has captured. Layers of
column and of row style alternate in a model and have slots of their own, so that peers have long read a slot when it is used
again.

An agreement is one kernel that finds the maxima of a few numbers over the ranks: it writes them to all peers, waits for theirs,
and compares.

Each use of a slot has a number, which stands for the layer, its direction, the transfer and the piece. Ranks write it to the
headers of slots, so that while devices hang, the headers say which rank waits for which transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import Parts, fields
from dlp.comm.slots import AGREED, AGREES, MAXIMA, WAITS_FOR, Slot, Wait, too_long
from dlp.comm.transfers import Exchange, Gathering, views
from dlp.kernels.launches import Lane, is_recording

LEAST = 1 << 16  # bytes of the smallest slot; sizes are powers of two
LayerDirection = tuple[str, str]  # the name of a layer, "forward" or "backward"
NO_LAYER: LayerDirection = "", ""


class Transport:
    """The transfers of one group through mapped memory.

    make        (bytes, group, device, name of a use, lane) -> a `Slot`; called by all ranks together
    transfers   how many transfers the current direction has begun
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, make: Callable[..., Slot], lane: Lane | None = None
    ) -> None:  # fmt: skip
        self.group, self.rank, self.world, self.device = group, group.rank(), group.size(), device
        self._make, self._lane = make, lane
        self._slots: dict[tuple[int, str, int, int], Slot] = {}
        self._style, self._direction, self._used, self.transfers = "", NO_LAYER, list[Slot](), 0
        self._numbers, self._names = dict[tuple[LayerDirection, int, int], int](), dict[int, str]()
        self._name_of_use = partial(_name_of, self._names, self.rank)

    def start(self, style: str = "", direction: LayerDirection = NO_LAYER) -> None:
        """A direction of a layer begins. style: the name of its `ParallelStyle`; layers of one style share slots."""
        self._style, self._direction, self._used, self.transfers = style, direction, [], 0

    def finish(self) -> None:
        """The current direction ends: the current stream has been given all that reads its slots. They are released."""
        for slot in self._used:
            slot.release()
        self._used, self._direction = [], NO_LAYER

    def begin(self, nbytes: int, piece: int = 0, of: int = 0) -> Slot:
        """The slot for the next transfer of the current direction, or for piece `piece` > 0 of transfer `of`; peers may write
        to it from here on. Pieces do not count as transfers: the transfers behind them get the same slots as in a layer that
        sends its parts whole."""
        self.transfers += not piece
        transfer = of or self.transfers
        slot = self._slot(slot_bytes(nbytes), self._style, transfer, piece)
        self._used.append(slot)
        slot.begin(self._number(transfer, piece))
        return slot

    def _number(self, transfer: int, piece: int = 0) -> int:
        """The number, 1 to 2**30 - 1, of a transfer of the current direction, or of its agreements (transfer 0). It is a hash
        of the name, so that it is the same on all ranks, whatever else each of them has run."""
        key = self._direction, transfer, piece
        if key not in self._numbers:
            layer, direction = self._direction
            what = f"transfer {transfer}" if transfer else "an agreement"
            name = (
                f"{f'piece {piece} of ' if piece else ''}{what} of {f'{layer} in {direction}' if layer else 'no layer'}"
            )
            self._numbers[key] = crc32(name.encode()) % (2**30 - 1) + 1
            self._names[self._numbers[key]] = name
        return self._numbers[key]

    def _slot(self, size: int, style: str, transfer: int, piece: int = 0) -> Slot:
        key = size, style, transfer, piece
        if key not in self._slots:
            self._slots[key] = self._make(size, self.group, self.device, self._name_of_use, self._lane)
        return self._slots[key]

    def lease(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dims: Sequence[int | None]
    ) -> Gathering:  # fmt: skip
        """Memory for this rank's parts, to be written and then gathered: each along its dim. A part without a dim is equal on
        all ranks and is not sent. Parts of dim 0 are written right into the slot."""
        sent = [i for i, dim in enumerate(dims) if dim is not None]
        sent_shapes = [_gathered(shapes[i], dims[i], self.world) for i in sent]
        sent_dtypes = [dtypes[i] for i in sent]
        starts, size = fields(sent_shapes, sent_dtypes)
        slot = self.begin(size)
        whole = dict(zip(sent, views(slot.payload, starts, sent_shapes, sent_dtypes), strict=True))
        mine = [
            whole[i].chunk(self.world)[self.rank] if dim == 0 and 0 not in shape else self._empty(shape, dtype)
            for i, (shape, dtype, dim) in enumerate(zip(shapes, dtypes, dims, strict=True))
        ]
        return Gathering(self, slot, tuple(mine), whole, dict(zip(sent, starts, strict=True)), dims)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def gathering(self, parts: Sequence[Tensor], dims: Sequence[int | None]) -> Gathering:
        """A `Gathering` of parts that are written already, each along its dim; one without a dim is equal on all ranks."""
        gathering = self.lease([part.shape for part in parts], [part.dtype for part in parts], dims)
        gathering.mine = tuple(part.contiguous() for part in parts)
        return gathering

    def open(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> Exchange:
        """An `Exchange` of parts [R, ...] of these shapes, whose chunk r comes from rank r."""
        starts, size = fields(shapes, dtypes)
        slot = self.begin(size)
        return Exchange(self, slot, views(slot.payload, starts, shapes, dtypes), starts)

    def all_gather(self, part: Tensor) -> Tensor:
        """[m, ...] -> [R*m, ...], copied out of the slot."""
        (whole,) = self.gathering((part,), (0,)).gather().wait()
        return self._used[-1].copied(whole)

    def kept(self, parts: Sequence[Tensor]) -> Parts:
        """Copies of parts that lie in the slot of the last transfer; they stay when the direction has finished."""
        slot = self._used[-1]
        return tuple(slot.copied(part) if part.is_contiguous() else slot.copied(part.t()).t() for part in parts)

    def count(self, part: Tensor, peer: int) -> None:
        """Tell the observer of bytes that a part goes to a peer."""
        if peer != self.rank and not is_recording():
            observer.copies(part, self.group)

    def agree(self, observed: Sequence[Tensor]) -> list[Tensor]:
        """The elementwise maxima over the group of fp32 tensors without negative values, of at most MAXIMA numbers each. One
        kernel takes up to AGREED tensors and MAXIMA numbers."""
        if not is_recording():
            observer.agrees(sum(value.numel() for value in observed), self.group)
        largest = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in observed]
        slot, first, numbers = self._slot(2 * 4 * MAXIMA * self.world, "agreements", 0), 0, 0
        use = self._number(0)
        for last, value in enumerate(observed):
            if last - first == AGREED or numbers + value.numel() > MAXIMA:
                slot.agree(observed[first:last], largest[first:last], use)
                first, numbers = last, 0
            numbers += value.numel()
        slot.agree(observed[first:], largest[first:], use)
        return largest

    def waits(self) -> list[str]:
        """A line for each pair of ranks of this group of which one waits for the other now."""
        return [self._describe(size, wait) for (size, *_), slot in self._slots.items() for wait in slot.waits()]

    def own_waits(self) -> list[str]:
        """The same, of pairs in which this rank waits."""
        every = ((size, wait) for (size, *_), slot in self._slots.items() for wait in slot.waits())
        return [self._describe(size, wait) for size, wait in every if wait.a == self.rank]

    def _describe(self, size: int, wait: Wait) -> str:
        awaited = WAITS_FOR[wait.what]
        what = f"agreement {wait.use}" if awaited == AGREES else self._name_of_use(wait.use)
        other = f", and is at {self._name_of_use(wait.other)}" if wait.other else ""
        a, b = (dist.get_process_group_ranks(self.group)[rank] for rank in (wait.a, wait.b))
        return f"{what}, a slot of {size} bytes: rank {a} waits for rank {b}, which {awaited}{other}"

    def complaint(self) -> str | None:
        """The message of a kernel, an agreement or a GEMM, that waited longer than PATIENCE and ended the program of its GPU:
        which rank waited for which. None if there is none."""
        found = next((found for slot in self.slots if (found := slot.complaint()) is not None), None)
        if found is None:
            return None
        return too_long(*found, self._name_of_use(found[0].use), dist.get_process_group_ranks(self.group))

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    @property
    def memory(self) -> list[Tensor]:
        """This rank's memory of all slots, which launches read and write. Its addresses do not change."""
        return [span for slot in self._slots.values() for span in slot.spans()]


def _name_of(names: Mapping[int, str], rank: int, number: int) -> str:
    """The name of the use of a slot that has this number, as far as this rank has run it."""
    return names.get(number, f"what rank {rank} has not run yet ({number})")


def slot_bytes(nbytes: int) -> int:
    """The size of the slot for `nbytes`: a power of two, so that layers of several sizes share slots."""
    return max(LEAST, 1 << (nbytes - 1).bit_length())


def _gathered(shape: Sequence[int], dim: int | None, world: int) -> tuple[int, ...]:
    """The shape of the parts of all ranks, joined along `dim`."""
    return tuple(size * world if i == dim else size for i, size in enumerate(shape))
