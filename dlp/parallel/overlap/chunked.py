"""chunked: a GEMM runs shard by shard, as shards of the operand arrive or shards of the result are sent.

    gather         from rank - 1 ──►│ from rank - 2 ──►│             gemm_reduce
    gemm     own   │ on rank - 1's rows │ on rank - 2's rows         gemm    for rank + 1 │ for rank + 2 │ own
                                                                     send                 to rank + 1 ─►│ to rank + 2 ─►│ sum

If A is gathered, the GEMM runs on this rank's rows first, then on the shards of rank - 1, rank - 2 and so on. With sends and
receives, the GEMM on a shard waits for this shard alone; with mapped memory, for shards (or pieces) of all other ranks. If the
result is summed over ranks, each rank computes the rows that rank + 1 sums and sends them at once, then the rows for rank + 2
and so on, and its own rows last; contributions are summed in fp32 in rank order, as in `serial`. If shards concatenate along
the contraction dimension (in wgrad), they are sent in the same way, and one GEMM runs when all shards have arrived.

`chunked:2` splits the transfer to or from each other rank into two pieces (`pieces`), so that the first GEMM or the first send
begins earlier; `chunked` is `chunked:1`. The rows of this rank are one GEMM, and a contraction dimension is not split. A piece
ends at the end of a block of the format and, if there are enough rows, of a tile of the GEMM, so there may be fewer pieces.

Shards are sent through mapped memory (`dlp.comm.mapped`). Over several hosts and between CPU ranks, complete shards are
exchanged by sends and receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import lcm
from operator import itemgetter
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives
from dlp.comm.collectives import Parts, Pending, ReduceCodec
from dlp.comm.exchange import DirectExchange, by_distance
from dlp.comm.mapped import Transport
from dlp.comm.transfers import WHOLE, Cuts, Gathering
from dlp.comm.transport import transport_of
from dlp.kernels.ops import rounded
from dlp.parallel.overlap import Sent, Work
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

Contribution = tuple[int, int, Parts]  # rank that sums these rows, first row among the rows of that rank, packed rows
TILE = 128, 256  # rows and columns of the result tile that one SM computes at a time in a large GEMM


class Shards(Protocol):
    """Shards of all ranks that are being gathered."""

    def of(self, rank: int, piece: int) -> QuantizedTensor:
        """Return the shard of `rank`. The current stream waits at least for pieces 0 to `piece` of this shard."""
        ...

    def whole(self) -> QuantizedTensor: ...


@dataclass(frozen=True)
class MappedShards:
    """Shards that are gathered through mapped memory. This rank's shard `mine` is available immediately."""

    mine: QuantizedTensor
    group: ProcessGroup
    gathering: Gathering

    def of(self, rank: int, piece: int) -> QuantizedTensor:
        if rank == self.group.rank():
            return self.mine
        rows = self.mine.shape[0]
        return _cut(self.mine.format.wrap(self.gathering.others(piece)), rank * rows, (rank + 1) * rows, "gather")

    def whole(self) -> QuantizedTensor:
        return self.mine.format.wrap(self.gathering.all_parts())


@dataclass(frozen=True)
class SentShards:
    """Shards that are gathered by sends and receives.

    mine       this rank's shard; only parts that are equal on all ranks, and therefore not gathered, are read from it
    dims       for each part the dimension along which shards concatenate; None: the part is equal on all ranks
    exchange   the sends and receives
    """

    mine: QuantizedTensor
    dims: list[int | None]
    group: ProcessGroup
    exchange: DirectExchange

    def _stored(self) -> list[Tensor | None]:
        arrived = iter(self.exchange.arrived)
        return [None if dim is None else next(arrived) for dim in self.dims]

    def of(self, rank: int, piece: int) -> QuantizedTensor:
        self.exchange.wait(rank)
        pairs = zip(self._stored(), self.mine.parts, strict=True)
        return self.mine.format.wrap([part if whole is None else whole[rank] for whole, part in pairs])

    def whole(self) -> QuantizedTensor:
        for rank in range(self.group.size()):
            self.exchange.wait(rank)
        return self.mine.format.wrap(collectives.join(self._stored(), self.mine.parts, self.dims))


@dataclass(frozen=True)
class ChunkedGather:
    cuts: Cuts  # (first row, end) of each piece of a shard
    group: ProcessGroup
    shards: Shards

    def whole(self) -> QuantizedTensor:
        return self.shards.whole()

    def gemm(self, gemm: Gemm) -> Tensor:
        rows, total, me = self.cuts[-1][1], gemm.accumulate, self.group.rank()
        if total is None:
            device = gemm.b.payload.device
            total = torch.empty((self.group.size() * rows, gemm.b.shape[0]), dtype=gemm.out_dtype, device=device)
        others = [source for _, _, source in by_distance(self.group)]
        arriving = [(source, number, cut) for number, cut in enumerate(self.cuts) for source in others]
        for rank, number, (start, stop) in [(me, 0, (0, rows)), *arriving]:
            into = total[rank * rows + start : rank * rows + stop]
            adds = gemm.accumulate is not None
            shard = _cut(self.shards.of(rank, number), start, stop, gemm.which)
            replace(gemm, out=None if adds else into, accumulate=into if adds else None)(shard)
        return total


@dataclass(frozen=True)
class SentLease:
    mine: QuantizedTensor
    dims: list[int | None]
    group: ProcessGroup
    exchange: DirectExchange
    chunks: int

    def gather(self) -> ChunkedGather:
        for distance, _, _ in by_distance(self.group):
            self.exchange.start_round(distance)
        shards = SentShards(self.mine, self.dims, self.group, self.exchange)
        return ChunkedGather(_cuts_of(self.mine, self.dims, self.chunks), self.group, shards)


@dataclass(frozen=True)
class MappedLease:
    mine: QuantizedTensor
    group: ProcessGroup
    gathering: Gathering
    chunks: int

    def gather(self) -> ChunkedGather:
        return _arriving(self.mine, self.group, self.gathering, self.chunks)


def _arriving(mine: QuantizedTensor, group: ProcessGroup, gathering: Gathering, chunks: int) -> ChunkedGather:
    cuts = _cuts_of(mine, gathering.dims, chunks)
    sent = gathering.send(cuts if len(cuts) > 1 else WHOLE)
    return ChunkedGather(cuts, group, MappedShards(mine, group, sent))


def _cuts_of(mine: QuantizedTensor, dims: Sequence[int | None], chunks: int) -> Cuts:
    """Split the rows of a shard into pieces; one piece if a part concatenates along another dimension than the first."""
    rows = mine.shape[0]
    return pieces(rows, chunks, unit_of(mine.format)) if {*dims} <= {0, None} else ((0, rows),)


def unit_of(fmt: Format) -> int:
    """Return the number of rows at whose multiples an operand in this format is cut into pieces."""
    return lcm(fmt.block[0] or 1, fmt.multiple[0])


@cache
def pieces(rows: int, chunks: int, unit: int, columns: int = 0, processors: int = 0) -> Cuts:
    """Split `rows` rows into at most `chunks` pieces. All pieces but the last are multiples of `unit` rows and, if there are
    enough rows, of tile rows.

    If the result of the GEMM has `columns` columns and is computed on `processors` SMs (0: not known), the size of these pieces
    is rounded to complete waves of tiles, since a partial wave would leave SMs idle."""
    tiled, across = lcm(unit, TILE[0]), -(-columns // TILE[1])
    step = tiled if rows >= chunks * tiled else unit
    size = -(-rows // chunks)
    waves = round(size * across / TILE[0] / processors) if processors else 0
    if waves:
        size = waves * processors // across * TILE[0]
    size = max(step, round(size / step) * step)
    starts = range(0, max(rows, 1), size)[:chunks]
    return tuple((start, min(start + size, rows) if start != starts[-1] else rows) for start in starts)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@dataclass(frozen=True)
class Chunked:
    """Strategy `chunked`. `chunks`: number of pieces of the transfer to or from each other rank."""

    chunks: int = 1
    launches_only: ClassVar[bool] = True  # if memory is mapped
    calls_only: ClassVar[bool] = True  # without mapped memory

    @property
    def name(self) -> str:
        return "chunked" if self.chunks == 1 else f"chunked:{self.chunks}"

    @property
    def at_once(self) -> Chunked:
        return Chunked()

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> SentLease | MappedLease:  # fmt: skip
        dims, shapes, dtypes = fmt.moves[dim], fmt.part_shapes(shape), fmt.part_dtypes(dtype)
        transport = transport_of(group)
        if transport is not None:
            gathering = transport.lease(shapes, dtypes, dims)
            return MappedLease(fmt.wrap(gathering.mine), group, gathering, self.chunks)
        kinds = list(zip(shapes, dtypes, strict=True))
        moving = [kind for kind, along in zip(kinds, dims, strict=True) if along is not None]
        exchange = DirectExchange(group, [s for s, _ in moving], [d for _, d in moving], 1, device)
        outgoing = iter(exchange.outgoing[0])
        mine = [torch.empty(s, dtype=d, device=device) if along is None else next(outgoing)
                for (s, d), along in zip(kinds, dims, strict=True)]  # fmt: skip
        return SentLease(fmt.wrap(mine), dims, group, exchange, self.chunks)

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> ChunkedGather:
        """Gather an operand that was not cast into the output buffer of the gather. Mapped memory sends from the memory of the
        operand; sends and receives need a copy in the output buffer first."""
        transport = transport_of(group)
        if transport is not None:
            return _arriving(a, group, transport.gathering(a.parts, a.format.moves[dim]), self.chunks)
        payload = a.payload
        lease = self.lease(a.format, a.shape, dim, group, dtype=payload.dtype, device=payload.device)
        assert isinstance(lease, SentLease)
        for part, into, along in zip(a.parts, lease.mine.parts, lease.dims, strict=True):
            if along is not None:
                collectives.put(part, into)
        return replace(lease, mine=a).gather()

    def gemm_reduce(
        self,
        a: QuantizedTensor,
        gemm: Gemm,
        group: ProcessGroup,
        *,
        reduce: str,
        dtype: torch.dtype,
        codec: ReduceCodec,
    ) -> Pending[Tensor]:
        """Run the GEMM and the reduction. Raises ValueError if a block of the format of `a` has rows of two ranks."""
        total, rows = a.shape[0], -(-a.shape[0] // group.size())
        shapes, dtypes = codec.kinds((group.size(), rows, gemm.b.shape[0]), dtype)
        device = a.payload.device
        transport = transport_of(group)
        cuts = pieces(rows, self.chunks, unit_of(a.format), gemm.b.shape[0], _processors(device))
        made, own = _contributions(a, gemm, group, cuts, dtype, codec), None
        if transport is None:
            arriving = _sent(made, shapes, dtypes, group, device)
        else:
            exchange = transport.open(shapes, dtypes)
            for rank, row, parts in made:
                if rank == group.rank():
                    own = rank, parts  # not sent: this rank adds its contribution to the received contributions
                else:
                    exchange.send(parts, rank, row)
            arriving = exchange.sent()

        def finish() -> Tensor:
            scattered = codec.total(arriving.wait(), dtype, own)
            if reduce == "scatter":
                return scattered
            return _whole(scattered, group, transport)[:total]

        return Pending((), finish)

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        rows = y.new_empty((1, -(-len(y) // ranks), y.shape[1]))
        parts = [*codec.pack(rows), *([rows] if reduce == "all" else [])]
        return [(part.dtype, (ranks - 1) * part.nbytes) for part in parts]

    def seconds(self, work: Work) -> float:
        ours, others = work.rows, work.rows * (work.ranks - 1)
        columns, processors = work.columns[-1], work.processors
        cuts = pieces(ours, self.chunks, unit_of(work.format), 0 if work.gathers else columns, processors)
        shares = [(stop - start) / ours for start, stop in cuts]

        def gemm(i: int, rows: int) -> float:
            return (
                work.gemms[i]
                * _waves(rows, work.columns[i], processors)
                / _waves(ours + others, work.columns[i], processors)
            )

        if work.gathers:
            now, here = gemm(0, ours), 0.0
            for (start, stop), share in zip(cuts, shares, strict=True):
                here += share * work.transfer + work.meeting
                now = max(now, here) + (work.ranks - 1) * gemm(0, stop - start)
            pieced = [gemm(i, ours) + sum((work.ranks - 1) * gemm(i, stop - start) for start, stop in cuts)
                      for i in range(1, len(work.gemms))]  # fmt: skip
            return now + sum(pieced) + work.behind
        now, sent = sum(work.gemms[:-1]), 0.0
        for _ in range(work.ranks - 1):
            for (start, stop), share in zip(cuts, shares, strict=True):
                now += gemm(-1, stop - start)
                sent = max(sent, now) + share * work.transfer / (work.ranks - 1)
        return max(now + gemm(-1, ours) + work.behind, sent + work.meeting)


def _waves(rows: int, columns: int, processors: int) -> float:
    """Number of output-tile waves, rounded up; `rows` if the number of SMs is unknown."""
    return -(-(-(-rows // TILE[0]) * -(-columns // TILE[1])) // processors) if processors else rows


def _contributions(
    a: QuantizedTensor, gemm: Gemm, group: ProcessGroup, cuts: Cuts, dtype: torch.dtype, codec: ReduceCodec
) -> Iterator[Contribution]:
    """Compute and yield the contributions of this rank: for each other rank the pieces of its rows, then the rows of this rank
    as one piece."""
    rows, me = cuts[-1][1], group.rank()
    others = [(to, start, stop) for _, to, _ in by_distance(group) for start, stop in cuts]
    for rank, start, stop in [*others, (me, 0, rows)]:
        y = rounded(_rows_between(rank * rows + start, rank * rows + stop, a, gemm), dtype)
        yield rank, start, tuple(part[0] for part in codec.pack(y[None]))


def _sent(
    contributions: Iterable[Contribution], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype],
    group: ProcessGroup, device: torch.device,
) -> Pending[Parts]:  # fmt: skip
    """Send the contributions, all pieces for one rank in one round, and return the received contributions [R, ...], pending."""
    exchange = DirectExchange(group, [shape[1:] for shape in shapes], dtypes, group.size(), device)
    distances = iter(by_distance(group))
    for rank, of_rank in groupby(contributions, itemgetter(0)):
        for _, row, parts in of_rank:
            for to, part in zip(exchange.outgoing[rank], parts, strict=True):
                collectives.put(part, to[row : row + len(part)])
        if rank != group.rank():
            exchange.start_round(next(distances)[0])

    def finish() -> Parts:
        for rank in range(group.size()):
            exchange.wait(rank)
        return exchange.arrived

    return Pending((), finish)


def _rows_between(start: int, stop: int, a: QuantizedTensor, gemm: Gemm) -> Tensor:
    """Run the GEMM on rows [start, stop) of A; rows after the last row of A are zero in the result."""
    rows, total = stop - start, a.shape[0]
    start, stop = min(start, total), min(stop, total)
    if start == stop:
        return torch.zeros((rows, gemm.b.shape[0]), device=a.payload.device)
    into = None if gemm.accumulate is None else gemm.accumulate[start:stop]
    y = replace(gemm, accumulate=into)(_cut(a, start, stop, gemm.which))
    return F.pad(y, (0, 0, 0, rows - len(y))) if len(y) < rows else y


def _cut(a: QuantizedTensor, start: int, stop: int, which: str) -> QuantizedTensor:
    """Return rows [start, stop) of an operand, as views. Raises ValueError if a block of the format is cut. `which`: name of
    the GEMM, for the message."""
    total = a.shape[0]
    if stop - start == total:
        return a
    if not (a.format.concatenates(0, stop - start) and a.format.concatenates(0, start)):
        raise ValueError(
            f"{which}: chunked cuts {total} rows at {start} and {stop}, inside a block of {a.format.name}; "
            f"set overlap = 'serial' for this GEMM"
        )
    dims = a.format.moves[0]
    scaled = ((part, dim, part.shape[dim] if dim is not None else 0) for part, dim in zip(a.parts, dims, strict=True))
    return a.format.wrap([
        part if dim is None else part.narrow(dim, start * size // total, (stop - start) * size // total)
        for part, dim, size in scaled
    ])  # fmt: skip


def _whole(scattered: Tensor, group: ProcessGroup, transport: Transport | None) -> Tensor:
    """Gather the rows of the sum from all ranks."""
    if transport is not None:
        return transport.all_gather(scattered)
    return collectives.all_gather((scattered,), (0,), group).wait()[0]


STRATEGY, in_chunks = Chunked(), Chunked
