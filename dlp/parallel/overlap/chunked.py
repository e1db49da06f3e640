"""chunked: a GEMM runs shard by shard, as its operand arrives or as its result leaves.

    gather         from rank - 1 ──►│ from rank - 2 ──►│             gemm_reduce
    gemm     own   │ on rank - 1's rows │ on rank - 2's rows         gemm    for rank + 1 │ for rank + 2 │ own
                                                                     send                 to rank + 1 ─►│ to rank + 2 ─►│ sum

A gathered operand is multiplied own rows first, then in the order in which shards are sent. Of a result that is summed
over ranks, each rank's rows are computed, sent to it at once, and its own come last; contributions are summed in fp32
in rank order, as `serial` does. A contraction that is gathered (wgrad's) arrives the same way and is contracted as one.

Shards travel by sends and receives between CPUs, and between GPUs by copy engines, through symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives, symmetric
from dlp.comm.collectives import Pending, ReduceCodec
from dlp.comm.exchange import DirectExchange, Exchange, by_distance
from dlp.parallel.overlap import Sent
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

EXCHANGES: dict[str, Callable[..., Exchange]] = {"cpu": DirectExchange, "cuda": symmetric.exchange}


@dataclass(frozen=True)
class ChunkedGather:
    """`mine`: this rank's shard; only its parts that are equal on all ranks are read here."""

    mine: QuantizedTensor
    dims: list[int | None]
    group: ProcessGroup
    exchange: Exchange

    def _stored(self) -> list[Tensor | None]:
        arrived = iter(self.exchange.arrived)
        return [None if dim is None else next(arrived) for dim in self.dims]

    def _shard(self, rank: int) -> QuantizedTensor:
        pairs = zip(self._stored(), self.mine.parts, strict=True)
        return self.mine.format.wrap([part if whole is None else whole[rank] for whole, part in pairs])

    def whole(self) -> QuantizedTensor:
        for rank in range(self.group.size()):
            self.exchange.wait(rank)
        return self.mine.format.wrap(collectives.join(self._stored(), self.mine.parts, self.dims))

    def gemm(self, gemm: Gemm) -> Tensor:
        rows, total = self.mine.shape[0], gemm.accumulate
        for rank in [self.group.rank(), *(source for _, _, source in by_distance(self.group))]:
            self.exchange.wait(rank)
            here = slice(rank * rows, (rank + 1) * rows)
            into = None if gemm.accumulate is None else gemm.accumulate[here]
            y = replace(gemm, accumulate=into)(self._shard(rank))
            total = y.new_empty((self.group.size() * rows, y.shape[1])) if total is None else total
            if into is None:
                total[here] = y
        assert total is not None
        return total


@dataclass(frozen=True)
class ChunkedLease:
    mine: QuantizedTensor
    dims: list[int | None]
    group: ProcessGroup
    exchange: Exchange

    def gather(self) -> ChunkedGather:
        self.exchange.keep()
        for distance, _, _ in by_distance(self.group):
            self.exchange.step(distance)
        return ChunkedGather(self.mine, self.dims, self.group, self.exchange)


class Chunked:
    name = "chunked"
    launches_only = False

    def __init__(self, exchanges: dict[str, Callable[..., Exchange]] = EXCHANGES) -> None:
        self.exchanges = exchanges

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> ChunkedLease:  # fmt: skip
        dims = fmt.moves_along(dim)
        kinds = list(zip(fmt.part_shapes(shape), fmt.part_dtypes(dtype), strict=True))
        moving = [kind for kind, along in zip(kinds, dims, strict=True) if along is not None]
        shapes, dtypes = [s for s, _ in moving], [d for _, d in moving]
        exchange = self.exchanges[device.type](group, shapes, dtypes, 1, device)
        outgoing = iter(exchange.outgoing[0])
        mine = [torch.empty(s, dtype=d, device=device) if along is None else next(outgoing)
                for (s, d), along in zip(kinds, dims, strict=True)]  # fmt: skip
        return ChunkedLease(fmt.wrap(mine), dims, group, exchange)

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> ChunkedGather:
        """The operand exists elsewhere: one copy into its segment comes first."""
        payload = a.payload
        lease = self.lease(a.format, a.shape, dim, group, dtype=payload.dtype, device=payload.device)
        a.format.fill(lease.mine, *a.parts)
        return lease.gather()

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
        """Raises ValueError where the format of `a` cannot be cut between the rows of two ranks."""
        rows, exchange = -(-a.shape[0] // group.size()), None
        for distance, rank in [*((distance, to) for distance, to, _ in by_distance(group)), (0, group.rank())]:
            contribution = codec.pack(_rows_for(rank, rows, a, gemm).to(dtype)[None])
            if exchange is None:
                kinds = [part.shape[1:] for part in contribution], [part.dtype for part in contribution]
                exchange = self.exchanges[a.payload.device.type](group, *kinds, group.size(), a.payload.device)
            for to, part in zip(exchange.outgoing[rank], contribution, strict=True):
                to.copy_(part[0])
            exchange.step(distance) if distance else exchange.keep()
        assert exchange is not None
        scattered = _total(exchange, group, dtype, codec)
        return scattered if reduce == "scatter" else _whole(scattered, a.shape[0], group)

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        rows = y.new_empty((1, -(-len(y) // ranks), y.shape[1]))
        parts = [*codec.pack(rows), *([rows] if reduce == "all" else [])]
        return [(part.dtype, (ranks - 1) * part.nbytes) for part in parts]


def _rows_for(rank: int, rows: int, a: QuantizedTensor, gemm: Gemm) -> Tensor:
    """The GEMM on the rows of A whose results are `rank`'s, [rows, N]; with zeros below the last row of A."""
    total = a.shape[0]
    start, stop = min(rank * rows, total), min((rank + 1) * rows, total)
    if start == stop:
        return torch.zeros((rows, gemm.b.shape[0]), device=a.payload.device)
    into = None if gemm.accumulate is None else gemm.accumulate[start:stop]
    y = replace(gemm, accumulate=into)(_cut(a, start, stop, gemm.which))
    return F.pad(y, (0, 0, 0, rows - len(y))) if len(y) < rows else y


def _cut(a: QuantizedTensor, start: int, stop: int, which: str) -> QuantizedTensor:
    """Rows of an operand, as views."""
    total = a.shape[0]
    if stop - start == total:
        return a
    if not (a.format.concatenates(0, stop - start) and a.format.concatenates(0, start)):
        raise ValueError(
            f"{which}: chunked cuts {total} rows at {start} and {stop}, inside a block of {a.format.name}; "
            f"set overlap = 'serial' for this GEMM"
        )
    dims = a.format.moves_along(0)
    scaled = ((part, dim, part.shape[dim] if dim is not None else 0) for part, dim in zip(a.parts, dims, strict=True))
    return a.format.wrap([
        part if dim is None else part.narrow(dim, start * size // total, (stop - start) * size // total)
        for part, dim, size in scaled
    ])  # fmt: skip


def _total(exchange: Exchange, group: ProcessGroup, dtype: torch.dtype, codec: ReduceCodec) -> Pending[Tensor]:
    def finish() -> Tensor:
        for rank in range(group.size()):
            exchange.wait(rank)
        return codec.total(exchange.arrived, dtype)

    return Pending((), finish)


def _whole(scattered: Pending[Tensor], rows: int, group: ProcessGroup) -> Pending[Tensor]:
    """Every rank's rows of a sum -> all of them."""
    return Pending((), lambda: collectives.all_gather((scattered.wait(),), (0,), group).wait()[0][:rows])


STRATEGY = Chunked()
