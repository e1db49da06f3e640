"""fused: one GEMM over all rows, which waits inside for those of each other rank, or stores those of its result there.

    gather        from rank - 1 ──►│ from rank - 2 ──►│                gemm_reduce
    gemm     own ... rank - 1's ... rank - 2's rows, as they arrive   gemm    for rank + 1 ... rank + 2 ... own │ tell
                                                                                                               all │ sum

`chunked` launches a GEMM for each shard, and each of them ends in a wave of tiles that leaves multiprocessors idle. Here tiles
of a rank's own rows come first, then those of the rank whose shard arrives first, and so on; only the part of the kernel that
is about to read rows waits for them, for a word in this rank's memory (`dlp/kernels/csrc/gemm_sm90.cu`). It gives the bits of
the same kernel over rows that are all here.

A kernel that waits inside holds the GPU, so what it waits for is moved by copy engines and by streams themselves, never by
another kernel (`dlp.comm.mapped`). Formats that no such kernel multiplies, and ranks without mapped memory, run as `chunked`
does; a GEMM of such a format that another kernel runs, shards that are no whole tiles, and contractions that are no multiple of
512, since TMA brings the scales of four blocks, as `serial` does.

Of a result that is summed over ranks, the same kernel stores the rows of each rank into that rank's memory, where `chunked`
would copy them: tiles of the next rank first, this rank's own last. It waits for nothing inside. The stream waits in front of
it until the memory is free, and tells the others behind it; contributions are summed in rank order, as ever. A sum that is
carried as something else than bf16, which the kernel stores, is `chunked`'s.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Pending, ReduceCodec
from dlp.comm.transfers import Gathering
from dlp.comm.transport import transport_of
from dlp.kernels.table import kind_of
from dlp.parallel.overlap import Gather, Lease, Overlap, Sent, load
from dlp.quant.gemm import Gemm, awaited_inside, sending, while_arriving
from dlp.quant.tensor import Format, QuantizedTensor

LOG = logging.getLogger("dlp")
CHUNKED = load("chunked")
UNTRIED = (
    "overlap = 'fused': a GEMM that waits inside for the rows of other ranks, or stores rows there, has run on one GPU that "
    "ranks shared, and not between GPUs yet, so nobody knows that it is right there; run pytest tests/multigpu/test_fused.py "
    "tests/multigpu/test_stress.py --device cuda before you train with it, or choose 'serial' or 'chunked'"
)


@dataclass(frozen=True)
class FusedGather:
    mine: QuantizedTensor
    gathering: Gathering

    def whole(self) -> QuantizedTensor:
        return self.mine.format.wrap(self.gathering.all_parts())

    def gemm(self, gemm: Gemm) -> Tensor:
        rows = self.mine.shape[0]
        run = while_arriving(gemm, self.mine.format.wrap(self.gathering.coming()), rows)
        if run is None:
            return gemm(self.whole())
        return run(self.gathering.slot.arriving(rows))


@dataclass(frozen=True)
class FusedLease:
    mine: QuantizedTensor
    gathering: Gathering

    def gather(self) -> FusedGather:
        return FusedGather(self.mine, self.gathering.send(in_turn=True))


class Fused:
    name = "fused"
    launches_only = True  # where ranks map each other's memory
    calls_only = True  # elsewhere

    @property
    def at_once(self) -> Overlap:
        return CHUNKED

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> Lease:  # fmt: skip
        transport = transport_of(group)
        if transport is None or not _waits(fmt, dim, device):
            return CHUNKED.lease(fmt, shape, dim, group, dtype=dtype, device=device)
        _warn()
        gathering = transport.lease(fmt.part_shapes(shape), fmt.part_dtypes(dtype), fmt.moves_along(dim))
        return FusedLease(fmt.wrap(gathering.mine), gathering)

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> Gather:
        transport = transport_of(group)
        if transport is None or not _waits(a.format, dim, a.payload.device):
            return CHUNKED.gather(a, dim, group)
        _warn()
        return FusedLease(a, transport.gathering(a.parts, a.format.moves_along(dim))).gather()

    def gemm_reduce(
        self, a: QuantizedTensor, gemm: Gemm, group: ProcessGroup, *, reduce: str, dtype: torch.dtype, codec: ReduceCodec
    ) -> Pending[Tensor]:  # fmt: skip
        transport, rows = transport_of(group), a.shape[0] // group.size()
        chunks = group.size(), rows, gemm.b.shape[0]
        as_stored = codec.kinds(chunks, dtype) == ([chunks], [torch.bfloat16])
        run = sending(gemm, a, rows) if transport and as_stored and a.shape[0] == group.size() * rows else None
        if transport is None or run is None:
            return CHUNKED.gemm_reduce(a, gemm, group, reduce=reduce, dtype=dtype, codec=codec)
        _warn()
        exchange = transport.open([chunks], [torch.bfloat16], on_lane=False)
        run(exchange.sending())
        arriving = exchange.stored()

        def finish() -> Tensor:
            scattered = codec.total(arriving.wait(), dtype)
            return scattered if reduce == "scatter" else transport.all_gather(scattered)

        return Pending((), finish)

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        return CHUNKED.sent(y, ranks, reduce=reduce, codec=codec)


@functools.cache
def _warn() -> None:
    """Whoever chose it, by a group, by a keyword or by times, is told once."""
    LOG.warning("%s", UNTRIED)


def _waits(fmt: Format, dim: int, device: torch.device) -> bool:
    """Whether a GEMM may wait inside for shards of this format that are joined along `dim`."""
    return dim == 0 and awaited_inside(fmt, kind_of(device)) is not None


STRATEGY = Fused()
