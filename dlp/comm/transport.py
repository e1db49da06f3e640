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

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from math import prod
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import Parts, Pending, fields, record
from dlp.comm.slots import AGREED, AGREES, MAXIMA, RANKS, WAITS_FOR, CudaSlot, Place, Slot, Wait, too_long
from dlp.comm.watch import Watch
from dlp.kernels import loader
from dlp.kernels.launches import Lane, is_recording

LEAST = 1 << 16  # bytes of a slot; sizes are powers of two
Cuts = Sequence[tuple[int, int]]  # pieces: rows [start, stop), one after the other
WHOLE: Cuts = ((0, 1),)
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
        self._kind, self._who, self._used, self._transfers = "", NOBODY, list[Slot](), 0
        self._numbers, self._names = dict[tuple[Who, int, int], int](), dict[int, str]()
        self._named = partial(_name_of, self._names, self.rank)

    def start(self, kind: str = "", who: Who = NOBODY) -> None:
        """A direction of a layer begins. Those of one kind share slots."""
        self._kind, self._who, self._used, self._transfers = kind, who, [], 0

    def finish(self) -> None:
        """What came in this direction has been read."""
        for slot in self._used:
            slot.release()
        self._used, self._who = [], NOBODY

    def _begin(self, nbytes: int, piece: int = 0, of: int = 0) -> Slot:
        """The slot of the next transfer of a direction, or of a piece `of` one, which peers may write to. Transfers are counted
        without their pieces, so that those behind have the slots that they have in other layers, which may send whole."""
        self._transfers += not piece
        place = of or self._transfers
        slot = self._slot(slot_bytes(nbytes), self._kind, place, piece)
        self._used.append(slot)
        slot.begin(self._number(place, piece))
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
        slot = self._begin(size)
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

    def open(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> Exchange:
        """Room for parts [R, ...], whose chunk r rank r will send."""
        starts, size = fields(shapes, dtypes)
        slot = self._begin(size)
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
        """Who has waited too long for whom in an agreement, once a GPU has ended its work for it; None: nobody."""
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


class Gathering:
    """`mine`: this rank's parts, to be written before they are sent. `whole` and `starts`: those of all ranks, in the slot, of
    the parts that move, by their number."""

    def __init__(
        self, transport: Transport, slot: Slot, mine: Parts, whole: dict[int, Tensor], starts: dict[int, int],
        dims: Sequence[int | None],
    ) -> None:  # fmt: skip
        self.transport, self.slot, self.mine = transport, slot, mine
        self.whole, self.starts, self.dims, self._place = whole, starts, dims, transport._transfers
        self._met, self._waited, self._kept = [slot], set[int](), False

    def send(self, cuts: Cuts = WHOLE) -> Gathering:
        """Start sending `mine`. Each rank pushes to the one behind it first, so that no two push to one at a time. `cuts`: rows
        of the parts, which all move along 0, that arrive one piece after the other."""
        transport, world = self.transport, self.transport.world
        self._met = [*(transport._begin(0, piece, self._place) for piece in range(1, len(cuts))), self.slot]
        self.slot.follow()
        for cut, met in zip(cuts, self._met, strict=True):
            for distance in range(1, world):
                to = (transport.rank + distance) % world
                for part, place in self._sent():
                    piece, where = (part, place) if len(cuts) == 1 else _piece(part, place, *cut, cuts[-1][1])
                    transport.count(piece, to)
                    self.slot.push(piece, to, where)
            met.meet()
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

    def __init__(self, transport: Transport, slot: Slot, arrived: Parts, starts: Sequence[int]) -> None:
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


def slot_bytes(nbytes: int) -> int:
    """What a slot for so many bytes takes: powers of two, so that few sizes serve all layers."""
    return max(LEAST, 1 << (nbytes - 1).bit_length())


def _gathered(shape: Sequence[int], dim: int | None, world: int) -> tuple[int, ...]:
    return tuple(size * world if i == dim else size for i, size in enumerate(shape))


def views(
    memory: Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Parts:  # fmt: skip
    """Bytes -> the tensors that begin there."""
    return tuple(
        memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        if prod(shape) else torch.empty(tuple(shape), dtype=dtype, device=memory.device)
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    )  # fmt: skip


_OF_GROUP: dict[str, Transport | None] = {}  # by name of a group
_WHY_NOT: dict[str, str] = {}


def transport_of(group: ProcessGroup) -> Transport | None:
    """The transport of a group; None: NCCL or gloo carry all."""
    return _OF_GROUP.get(group.group_name)


def ask_for(group: ProcessGroup, device_type: str) -> None:
    """Let transfers of a group, whose ranks are on "cuda" or "cpu", go through memory that its ranks map, where they can;
    `describe` says whether. Called by all of its ranks, before the first layer that sends over it runs."""
    name = group.group_name
    if name not in _OF_GROUP:
        _WHY_NOT[name] = _obstacle(group, device_type)
        _OF_GROUP[name] = None if _WHY_NOT[name] else _on_gpus(group)


def _on_gpus(group: ProcessGroup) -> Transport:
    device = torch.device("cuda", torch.cuda.current_device())
    made = Transport(group, device, CudaSlot, Lane(device))
    Watch(made).start()
    return made


def _obstacle(group: ProcessGroup, device_type: str) -> str:
    """Why the ranks of a group do not push into each other's memory, the same on all ranks; empty: they do."""
    if device_type != "cuda":
        return "its ranks are on CPUs"
    if not 1 < group.size() <= RANKS:
        return f"it has {group.size()} ranks, of 2 to {RANKS}"
    mine = (socket.gethostname(), _boot(), loader.missing(), torch.cuda.current_device())
    all_of: list[tuple[str, str, str, int]] = [mine] * group.size()
    dist.all_gather_object(all_of, mine, group)
    if len({each[:2] for each in all_of}) > 1:
        return "its ranks are on several hosts"
    for rank, each in enumerate(all_of):
        if each[2]:
            return f"its rank {rank} has no kernels: {each[2]}"
    devices = {each[3] for each in all_of}
    if len(devices) == group.size():  # else each rank sees a GPU of its own only, or all share one, and mapping tells
        for a, b in permutations(sorted(devices), 2):
            if not torch.cuda.can_device_access_peer(a, b):
                return f"cuda:{a} cannot reach the memory of cuda:{b}"
    return ""


def describe(name: str, group: ProcessGroup) -> str:
    """How what a group of this name sends is carried, and why."""
    if transport_of(group) is not None:
        return f"transport: {name} pushes into memory that its ranks map; directions of its layers are captured"
    by = carrier(group)
    calls = f"a captured direction calls {by} between its launches"
    return f"transport: {name} sends by {by}, since {why_not(group)}; {calls}"


def carrier(group: ProcessGroup) -> str:
    """Whose collectives a group has: "nccl", beside which gloo carries what lies on CPUs, or "gloo"."""
    return "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"


def why_not(group: ProcessGroup) -> str:
    """Why a group has no transport."""
    return _WHY_NOT.get(group.group_name) or "nobody asked for mapped memory"


def _boot() -> str:
    """Of one host, and of no other one of that name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def use(group: ProcessGroup, transport: Transport | None) -> None:
    """Let transfers of a group go through a transport; None: by NCCL or gloo."""
    _OF_GROUP[group.group_name] = transport


def mapped_memory() -> list[Tensor]:
    """What transfers read and write on this rank so far, of whatever group."""
    return [memory for transport in _OF_GROUP.values() if transport is not None for memory in transport.memory]


def start(group: ProcessGroup | None, kind: str = "", who: Who = NOBODY) -> None:
    """A direction of a layer of this group begins (`Transport.start`)."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    if transport is not None:
        transport.start(kind, who)


def finish(group: ProcessGroup | None) -> None:
    """A direction of a layer of this group ends (`Transport.finish`)."""
    transport = None if group is None else _OF_GROUP.get(group.group_name)
    if transport is not None:
        transport.finish()


def complaint() -> str | None:
    """Who has waited too long for whom in an agreement, once a GPU has ended its work for it; None: nobody."""
    every = (transport for transport in _OF_GROUP.values() if transport is not None)
    return next((said for transport in every if (said := transport.complaint()) is not None), None)


def waits() -> list[str]:
    """Who has not done what others wait for, in all mapped memory, as it is now; while devices hang, too, which waits of
    streams would do for ever."""
    return [said for transport in _OF_GROUP.values() if transport is not None for said in transport.waits()]


def kept(group: ProcessGroup | None, parts: Sequence[Tensor]) -> Parts:
    """Parts that were gathered, where they stay when the direction has finished."""
    transport = None if group is None else transport_of(group)
    return tuple(parts) if transport is None else transport.kept(parts)


def destroy() -> None:
    """Give the memory of all transports back; before the process group ends."""
    _OF_GROUP.clear()
    _WHY_NOT.clear()
