"""What travels between the ranks of a host: pushed into memory that every rank maps from every other one.

    current stream    ─ write parts ─┐                 ┌─ read what came ─ release
    lane              begin ─────────└─ push ─ meet ───┘

A `Slot` is a piece of such memory on all ranks. `begin` waits until the peers have read what their slots held before, `meet`
until all of them have written into this one. Copies are made by copy engines, on a lane beside the current stream
(`dlp.kernels.launches`). All of it are launches that are the same every time: they can be taken down once and launched
again, and captured in a CUDA graph.

A direction of a layer `start`s, makes its transfers, and `finish`es: then what came has been read. All ranks of a group do so
in the same order. So which slot a transfer gets follows from its size and its place in the direction alone, and not from
what a rank has captured by then; directions of two kinds take turns, so that slots are free long before they are used again.

An agreement finds the maxima of a few numbers over ranks in one kernel: it writes them to all peers, waits, and compares.

What ranks tell each other through a slot is a number for the layer, its direction, the transfer and its piece. It is launched
with the rest, so whoever reads a slot while devices hang can tell which of them is awaited.
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

LEAST = 1 << 16  # bytes of a slot; sizes are powers of two
Who = tuple[str, str]  # a layer and its direction
NOBODY: Who = "", ""


class Transport:
    """What the ranks of one group move through memory that they share. `make`: a slot of so many bytes, on all ranks."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, make: Callable[..., Slot], lane: Lane | None = None
    ) -> None:  # fmt: skip
        self.group, self.rank, self.world, self.device = group, group.rank(), group.size(), device
        self._make, self._lane = make, lane
        self._slots: dict[tuple[int, str, int, int], Slot] = {}
        self._kind, self._who, self._used, self.transfers = "", NOBODY, list[Slot](), 0
        self._numbers, self._names = dict[tuple[Who, int, int], int](), dict[int, str]()
        self._named = partial(_name_of, self._names, self.rank)

    def start(self, kind: str = "", who: Who = NOBODY) -> None:
        """A direction of a layer begins. Those of one kind share slots."""
        self._kind, self._who, self._used, self.transfers = kind, who, [], 0

    def finish(self) -> None:
        """What came in this direction has been read."""
        for slot in self._used:
            slot.release()
        self._used, self._who = [], NOBODY

    def begin(self, nbytes: int, piece: int = 0, of: int = 0, on_lane: bool = True) -> Slot:
        """The slot of the next transfer of a direction, or of a piece `of` one, which peers may write to. Transfers are counted
        without their pieces, so that those behind have the slots that they have in other layers, which may send whole.
        `on_lane`: what writes to the peers is on the lane, else on the current stream."""
        self.transfers += not piece
        place = of or self.transfers
        slot = self._slot(slot_bytes(nbytes), self._kind, place, piece)
        self._used.append(slot)
        slot.begin(self._number(place, piece), on_lane)
        return slot

    def _number(self, transfer: int, piece: int = 0) -> int:
        """Of what the current direction does, 0 its agreements: the same on all ranks, whatever they have run before."""
        key = self._who, transfer, piece
        if key not in self._numbers:
            layer, direction = self._who
            what = f"transfer {transfer}" if transfer else "an agreement"
            said = (
                f"{f'piece {piece} of ' if piece else ''}{what} of {f'{layer} in {direction}' if layer else 'no layer'}"
            )
            self._numbers[key] = crc32(said.encode()) % (2**30 - 1) + 1
            self._names[self._numbers[key]] = said
        return self._numbers[key]

    def _slot(self, size: int, kind: str, place: int, piece: int = 0) -> Slot:
        key = size, kind, place, piece
        if key not in self._slots:
            self._slots[key] = self._make(size, self.group, self.device, self._named, self._lane)
        return self._slots[key]

    def lease(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dims: Sequence[int | None]
    ) -> Gathering:  # fmt: skip
        """Memory for this rank's parts, of which those with a dim will be gathered along it; the others are equal on all."""
        moving = [i for i, dim in enumerate(dims) if dim is not None]
        wholes = [_gathered(shapes[i], dims[i], self.world) for i in moving]
        kinds = [dtypes[i] for i in moving]
        starts, size = fields(wholes, kinds)
        slot = self.begin(size)
        whole = dict(zip(moving, views(slot.payload, starts, wholes, kinds), strict=True))
        mine = [
            whole[i].chunk(self.world)[self.rank] if dim == 0 and 0 not in shape else self._empty(shape, dtype)
            for i, (shape, dtype, dim) in enumerate(zip(shapes, dtypes, dims, strict=True))
        ]
        return Gathering(self, slot, tuple(mine), whole, dict(zip(moving, starts, strict=True)), dims)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def gathering(self, parts: Sequence[Tensor], dims: Sequence[int | None]) -> Gathering:
        """Of parts that lie elsewhere; without a dim one is equal on all ranks."""
        made = self.lease([part.shape for part in parts], [part.dtype for part in parts], dims)
        made.mine = tuple(part.contiguous() for part in parts)
        return made

    def open(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, on_lane: bool = True) -> Exchange:
        """Room for parts [R, ...], whose chunk r rank r will send; or store by a kernel, not `on_lane`."""
        starts, size = fields(shapes, dtypes)
        slot = self.begin(size, on_lane=on_lane)
        return Exchange(self, slot, views(slot.payload, starts, shapes, dtypes), starts)

    def all_gather(self, part: Tensor) -> Tensor:
        """[m, ...] -> [R*m, ...], in memory of its own."""
        (whole,) = self.gathering((part,), (0,)).gather().wait()
        return self._used[-1].copied(whole)

    def kept(self, parts: Sequence[Tensor]) -> Parts:
        """Parts that came in this direction, in memory of their own."""
        slot = self._used[-1]
        return tuple(slot.copied(part) if part.is_contiguous() else slot.copied(part.t()).t() for part in parts)

    def count(self, part: Tensor, peer: int) -> None:
        """For whoever counts bytes: a part goes to a peer."""
        if peer != self.rank and not is_recording():
            observer.copies(part, self.group)

    def agree(self, observed: Sequence[Tensor]) -> list[Tensor]:
        """fp32 tensors that are not negative, of at most MAXIMA numbers each -> their elementwise maxima over the group; in
        one kernel for AGREED of them, and MAXIMA numbers."""
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
        """Who has not done what others of this group wait for."""
        return [self._told(size, wait) for (size, *_), slot in self._slots.items() for wait in slot.waits()]

    def own_waits(self) -> list[str]:
        """What this rank waits for."""
        every = ((size, wait) for (size, *_), slot in self._slots.items() for wait in slot.waits())
        return [self._told(size, wait) for size, wait in every if wait.a == self.rank]

    def _told(self, size: int, wait: Wait) -> str:
        awaited = WAITS_FOR[wait.what]
        what = f"agreement {wait.use}" if awaited == AGREES else self._named(wait.use)
        other = f", and is at {self._named(wait.other)}" if wait.other else ""
        a, b = (dist.get_process_group_ranks(self.group)[rank] for rank in (wait.a, wait.b))
        return f"{what}, a slot of {size} bytes: rank {a} waits for rank {b}, which {awaited}{other}"

    def complaint(self) -> str | None:
        """Who has waited too long for whom, in an agreement or a GEMM, once a GPU has ended its work for it; None: nobody."""
        found = next((found for slot in self.slots if (found := slot.complaint()) is not None), None)
        if found is None:
            return None
        return too_long(*found, self._named(found[0].use), dist.get_process_group_ranks(self.group))

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    @property
    def memory(self) -> list[Tensor]:
        """What launches read and write of it on this rank; it stays where it is."""
        return [span for slot in self._slots.values() for span in slot.spans()]


def _name_of(names: Mapping[int, str], rank: int, number: int) -> str:
    """What a number stands for on this rank of a group."""
    return names.get(number, f"what rank {rank} has not run yet ({number})")


def slot_bytes(nbytes: int) -> int:
    """What a slot for so many bytes takes: powers of two, so that few sizes serve all layers."""
    return max(LEAST, 1 << (nbytes - 1).bit_length())


def _gathered(shape: Sequence[int], dim: int | None, world: int) -> tuple[int, ...]:
    return tuple(size * world if i == dim else size for i, size in enumerate(shape))
