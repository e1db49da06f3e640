"""serial: a GEMM runs after the gather of its operand, and a reduction starts after its GEMM.

    gather ──────►│ gemm
                    gemm │ reduce ──────►

Collectives are asynchronous, so some transfers still overlap a GEMM: the gather for wgrad starts before dgrad runs, and wgrad
runs before the stream waits for the reduction of dgrad. With mapped memory (`dlp.comm.mapped`), transfers are kernel launches,
so that a complete pass can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives
from dlp.comm.collectives import Parts, Pending, ReduceCodec
from dlp.comm.mapped import Transport
from dlp.comm.transport import transport_of
from dlp.kernels.ops import rounded
from dlp.parallel.overlap import Sent, Work
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

_REDUCE = {"all": collectives.all_reduce, "scatter": collectives.reduce_scatter}


@dataclass(frozen=True)
class SerialGather:
    format: Format
    pending: Pending[Parts]

    def whole(self) -> QuantizedTensor:
        return QuantizedTensor(self.format, self.pending.wait())

    def gemm(self, gemm: Gemm) -> Tensor:
        return gemm(QuantizedTensor(self.format, self.pending.wait()))


@dataclass(frozen=True)
class SerialLease:
    """Output buffer of a gather under `serial`. `start`: function that starts the gather of `mine`."""

    mine: QuantizedTensor
    start: Callable[[], Pending[Parts]]

    def gather(self) -> SerialGather:
        return SerialGather(self.mine.format, self.start())


class Serial:
    name = "serial"
    launches_only = True  # if memory is mapped
    calls_only = True  # without mapped memory

    @property
    def at_once(self) -> Serial:
        return self

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> SerialLease:  # fmt: skip
        dims, shapes, dtypes = fmt.moves[dim], fmt.part_shapes(shape), fmt.part_dtypes(dtype)
        transport = transport_of(group)
        if transport is not None:
            leased = transport.lease(shapes, dtypes, dims)
            return SerialLease(fmt.wrap(leased.mine), leased.gather)
        storage, mine = collectives.room(shapes, dtypes, dims, group, device)
        return SerialLease(fmt.wrap(mine), lambda: collectives.all_gather(mine, dims, group, storage))

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> SerialGather:
        dims, transport = a.format.moves[dim], transport_of(group)
        if transport is not None:
            return SerialGather(a.format, transport.gathering(a.parts, dims).gather())
        return SerialGather(a.format, collectives.all_gather(a.parts, dims, group))

    def gemm_reduce(
        self, a: QuantizedTensor, gemm: Gemm, group: ProcessGroup, *, reduce: str, dtype: torch.dtype, codec: ReduceCodec
    ) -> Pending[Tensor]:  # fmt: skip
        transport = transport_of(group)
        if transport is not None:
            return _summed(a, gemm, transport, reduce, dtype, codec)
        y = gemm(a)
        return _REDUCE[reduce](y if y.dtype == dtype else rounded(y, dtype), group, codec)

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        packed, whole = codec.pack(_chunks(y, ranks, reduce)), _chunks(y, ranks, reduce)[0].nbytes
        gathered = [(y.dtype, (ranks - 1) * whole)] if reduce == "all" else []
        return [(packed[0].dtype, (ranks - 1) * collectives.record(packed)), *gathered]

    def seconds(self, work: Work) -> float:
        transfer = work.transfer + work.meeting
        if work.gathers:
            return transfer + sum(work.gemms) + work.behind
        return sum(work.gemms) + max(transfer, work.behind)


def _chunks(y: Tensor, ranks: int, reduce: str) -> Tensor:
    """Split y [M, N] into R chunks, [R, ...], one for each of `ranks` ranks: rank r sums the chunks r of all ranks."""
    return collectives.shares(y, ranks) if reduce == "all" else y.unflatten(0, (ranks, -1))


@cache
def _shape_of_chunks(rows: int, cols: int, ranks: int, reduce: str) -> tuple[int, ...]:
    return tuple(_chunks(torch.empty(rows, cols, device="meta"), ranks, reduce).shape)


def _summed(
    a: QuantizedTensor, gemm: Gemm, transport: Transport, reduce: str, dtype: torch.dtype, codec: ReduceCodec
) -> Pending[Tensor]:
    """Run `gemm_reduce` through mapped memory."""
    chunks = _shape_of_chunks(a.shape[0], gemm.b.shape[0], transport.world, reduce)
    exchange = transport.open(*codec.kinds(chunks, dtype))  # before the GEMM, so that the wait for peers runs under it
    y = rounded(gemm(a), dtype)
    packed = codec.pack(_chunks(y, transport.world, reduce))
    own = transport.rank, tuple(part[transport.rank] for part in packed)
    arriving = exchange.send_all(packed, own=False)

    def finish() -> Tensor:
        total = codec.total(arriving.wait(), dtype, own)
        if reduce == "scatter":
            return total
        return transport.all_gather(total).view(-1)[: y.numel()].view(y.shape)

    return Pending((), finish)


STRATEGY = Serial()
