"""Transfers between the GPUs of one host: each rank copies its parts into memory of its peers; all ranks map this memory.

    current stream    ─ write parts ─┐                  ┌─ read received parts ─ release
    side stream       begin ─────────└─ push ─ barrier ─┘

A `Slot` is a buffer of such memory on each rank of a group. `begin` waits until the peers have read the previous contents of
their buffers; the barrier `meet` waits until all peers have pushed into this rank's buffer. Copy engines make the copies, on a
side stream (`dlp.kernels.launches`). The launches of a transfer are the same in every step, so that `dlp.runtime.capture` and
CUDA graphs can capture them.

A pass of a layer (forward or backward) calls `start`, runs the transfers, reads the results and calls `finish`. All ranks of a
group run passes in the same order. The slot of a transfer is determined by its size, the style of the layer, the index of the
transfer in the pass and the index of the piece (a transfer may send a shard in several pieces). These are equal on all ranks,
even if only some ranks have captured the pass. Layers of column and of row style alternate in a model and use different slots.
Therefore peers have usually read a slot before it is used again.

An amax agreement of up to AGREED tensors is one kernel: it writes the values of this rank to all peers, waits for the values of
the peers, and computes the maxima.

Each use of a slot has a number, which identifies the layer, the pass, the transfer and the piece. Ranks write this number to
the headers of slots, so that during a hang the headers tell which rank waits for which transfer.
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
from dlp.comm.wire_checks import Transfer
from dlp.kernels.launches import Lane, is_recording

LEAST = 1 << 16  # bytes of the smallest slot; sizes are powers of two
LayerPass = tuple[str, str]  # name of a layer, and "forward" or "backward"
NO_LAYER: LayerPass = "", ""


class Transport:
    """Transport of one group through mapped memory: allocates slots, and creates transfers in them.

    make        function that allocates a `Slot`; arguments: bytes of the payload, group, device, function that names a use
                by its number, side stream. All ranks of the group call `make` together
    transfers   number of transfers that the current pass has begun
    checked     checksums of transfers of the current pass, which `finish` completes (`dlp.comm.wire_checks`)
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, make: Callable[..., Slot], lane: Lane | None = None
    ) -> None:  # fmt: skip
        self.group, self.rank, self.world, self.device = group, group.rank(), group.size(), device
        self._make, self._lane = make, lane
        self._slots: dict[tuple[int, str, int, int], Slot] = {}
        self._style, self._pass, self._used, self.transfers = "", NO_LAYER, list[Slot](), 0
        self.checked = list[Transfer]()
        self._numbers, self._names = dict[tuple[LayerPass, int, int], int](), dict[int, str]()
        self._name_of_use = partial(_name_of, self._names, self.rank)

    def start(self, style: str = "", layer_pass: LayerPass = NO_LAYER) -> None:
        """Begin a pass of a layer. style: name of the layer's `ParallelStyle`; only layers of the same style share slots."""
        self._style, self._pass, self._used, self.transfers, self.checked = style, layer_pass, [], 0, []

    def finish(self) -> None:
        """End the current pass: release the slots. All launches that read the slots must have been issued on the current
        stream."""
        for transfer in self.checked:
            transfer.wait()
        for slot in self._used:
            slot.release()
        self._used, self._pass, self.checked = [], NO_LAYER, []

    def begin(self, nbytes: int, piece: int = 0, of: int = 0) -> Slot:
        """Begin the next transfer of the current pass, or with `piece` > 0 a further piece of transfer `of`; return the slot.

        The launches after this call may push to the slots of the peers. A piece does not count as a transfer, so that later
        transfers of the pass use the same slots whether a shard is sent in one piece or in several pieces."""
        self.transfers += not piece
        transfer = of or self.transfers
        slot = self._slot(slot_bytes(nbytes), self._style, transfer, piece)
        self._used.append(slot)
        slot.begin(self._number(transfer, piece))
        return slot

    def _number(self, transfer: int, piece: int = 0) -> int:
        """Return the number of a transfer, 1 to 2**30 - 1: a hash of layer, pass, transfer and piece, equal on all ranks.

        transfer   index of the transfer in the current pass; 0: the amax agreements of the pass
        piece      index of the piece of the transfer"""
        key = self._pass, transfer, piece
        if key not in self._numbers:
            layer, pass_name = self._pass
            what = f"transfer {transfer}" if transfer else "an agreement"
            name = (
                f"{f'piece {piece} of ' if piece else ''}{what} of {f'{layer} in {pass_name}' if layer else 'no layer'}"
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
        """Return a `Gathering` whose parts `mine` are allocated but not yet written. The caller writes `mine`, then sends.

        A part with dim None is equal on all ranks and is not sent. The memory of parts with dim 0 lies in the slot, so that
        this rank's rows need no copy.
        """
        sent = [i for i, dim in enumerate(dims) if dim is not None]
        sent_shapes = [_gathered(shapes[i], dims[i], self.world) for i in sent]
        sent_dtypes = [dtypes[i] for i in sent]
        starts, size = fields(sent_shapes, sent_dtypes)
        slot = self.begin(size)
        whole = dict(zip(sent, views(slot.payload, starts, sent_shapes, sent_dtypes), strict=True))
        mine = [
            whole[i].chunk(self.world)[self.rank]
            if dim == 0 and 0 not in shape
            else torch.empty(tuple(shape), dtype=dtype, device=self.device)
            for i, (shape, dtype, dim) in enumerate(zip(shapes, dtypes, dims, strict=True))
        ]
        return Gathering(self, slot, tuple(mine), whole, dict(zip(sent, starts, strict=True)), dims)

    def gathering(self, parts: Sequence[Tensor], dims: Sequence[int | None]) -> Gathering:
        """Return a `Gathering` of existing parts. A part with dim None is equal on all ranks and is not sent."""
        gathering = self.lease([part.shape for part in parts], [part.dtype for part in parts], dims)
        gathering.mine = tuple(part.contiguous() for part in parts)
        return gathering

    def open(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> Exchange:
        """Return an `Exchange` of parts of these shapes [R, ...] and dtypes."""
        starts, size = fields(shapes, dtypes)
        slot = self.begin(size)
        return Exchange(self, slot, views(slot.payload, starts, shapes, dtypes), starts)

    def all_gather(self, part: Tensor) -> Tensor:
        """Gather [m, ...] to [R*m, ...], and copy the result out of the slot."""
        (whole,) = self.gathering((part,), (0,)).gather().wait()
        return self._used[-1].copied(whole)

    def kept(self, parts: Sequence[Tensor]) -> Parts:
        """Copy parts out of the slot of the last transfer, and return the copies, which stay valid after the pass."""
        slot = self._used[-1]
        return tuple(slot.copied(part) if part.is_contiguous() else slot.copied(part.t()).t() for part in parts)

    def count(self, part: Tensor, peer: int) -> None:
        """Let the observer count a copy of `part` to rank `peer`, unless `peer` is this rank or launches are recorded."""
        if peer != self.rank and not is_recording():
            observer.copies(part, self.group)

    def agree(self, observed: Sequence[Tensor]) -> list[Tensor]:
        """Return the elementwise maxima of nonnegative fp32 tensors over the ranks. Each tensor has at most MAXIMA values.

        One kernel processes at most AGREED tensors with together at most MAXIMA values."""
        if not is_recording():
            observer.agrees(sum(value.numel() for value in observed), self.group)
        observed = [value.contiguous() for value in observed]
        largest = [torch.empty_like(value) for value in observed]
        slot, first, numbers = self._slot(2 * 4 * MAXIMA * self.world, "agreements", 0), 0, 0
        use = self._number(0)
        for last, value in enumerate(observed):
            if last - first == AGREED or numbers + value.numel() > MAXIMA:
                slot.agree(observed[first:last], largest[first:last], use)
                first, numbers = last, 0
            numbers += value.numel()
        slot.agree(observed[first:], largest[first:], use)
        return largest

    def waits(self, *, own: bool = False) -> list[str]:
        """Return one line for each pair of ranks of this group in which one rank waits for the other now. `own`: only pairs in
        which this rank waits."""
        every = ((size, wait) for (size, *_), slot in self._slots.items() for wait in slot.waits())
        return [self._describe(size, wait) for size, wait in every if not own or wait.a == self.rank]

    def _describe(self, size: int, wait: Wait) -> str:
        awaited = WAITS_FOR[wait.what]
        what = f"agreement {wait.use}" if awaited == AGREES else self._name_of_use(wait.use)
        other = f", and is at {self._name_of_use(wait.other)}" if wait.other else ""
        a, b = (dist.get_process_group_ranks(self.group)[rank] for rank in (wait.a, wait.b))
        return f"{what}, a slot of {size} bytes: rank {a} waits for rank {b}, which {awaited}{other}"

    def complaint(self) -> str | None:
        """Return the message of an amax agreement that waited longer than PATIENCE and ended the program of this GPU; the
        message names both ranks. None if there is no such agreement."""
        found = next((found for slot in self.slots if (found := slot.complaint()) is not None), None)
        if found is None:
            return None
        return too_long(*found, self._name_of_use(found[0].use), dist.get_process_group_ranks(self.group))

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    @property
    def memory(self) -> list[Tensor]:
        """This rank's memory of all slots, whose addresses do not change. Captured launches read and write this memory."""
        return [span for slot in self._slots.values() for span in slot.spans()]


def _name_of(names: Mapping[int, str], rank: int, number: int) -> str:
    """Return the name of the use of a slot with this number, or a description if this rank has not run this use yet."""
    return names.get(number, f"a transfer that rank {rank} has not run yet ({number})")


def slot_bytes(nbytes: int) -> int:
    """Return the payload in bytes of the slot for a transfer of `nbytes`: a power of two, so that layers of different sizes
    share slots."""
    return max(LEAST, 1 << (nbytes - 1).bit_length())


def _gathered(shape: Sequence[int], dim: int | None, world: int) -> tuple[int, ...]:
    """Return the shape of a part of this shape after a gather along `dim`."""
    return tuple(size * world if i == dim else size for i, size in enumerate(shape))
