"""serial: a GEMM runs when its operand has arrived; a reduction starts when its GEMM is done.

    gather ──────►│ gemm
                    gemm │ reduce ──────►

Transfers are asynchronous all the same, so a gather started early (wgrad's, before dgrad runs) and a reduction awaited
late (dgrad's, after wgrad) run under the GEMM between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives
from dlp.comm.collectives import Parts, Pending, ReduceCodec
from dlp.parallel.overlap import Sent
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

_REDUCE = {"all": collectives.all_reduce, "scatter": collectives.reduce_scatter}


@dataclass(frozen=True)
class SerialGather:
    format: Format
    pending: Pending[Parts]

    def whole(self) -> QuantizedTensor:
        return self.format.wrap(self.pending.wait())

    def gemm(self, gemm: Gemm) -> Tensor:
        return gemm(self.whole())


@dataclass(frozen=True)
class SerialLease:
    mine: QuantizedTensor
    dims: list[int | None]
    group: ProcessGroup
    storage: list[Tensor | None] | None = None

    def gather(self) -> SerialGather:
        pending = collectives.all_gather(self.mine.parts, self.dims, self.group, self.storage)
        return SerialGather(self.mine.format, pending)


class Serial:
    name = "serial"

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> SerialLease:  # fmt: skip
        dims = fmt.moves_along(dim)
        storage, mine = collectives.room(fmt.part_shapes(shape), fmt.part_dtypes(dtype), dims, group, device)
        return SerialLease(fmt.wrap(mine), dims, group, storage)

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> SerialGather:
        return SerialLease(a, a.format.moves_along(dim), group).gather()

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
        reduced = _REDUCE[reduce]((gemm(a).to(dtype),), group, codec)
        return Pending((), lambda: reduced.wait()[0])

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        chunks = collectives.shares(y, ranks) if reduce == "all" else y.unflatten(0, (ranks, -1))
        packed = codec.pack(chunks)
        whole = [(y.dtype, (ranks - 1) * chunks[0].nbytes)] if reduce == "all" else []
        return [(packed[0].dtype, (ranks - 1) * collectives.record(packed)), *whole]


STRATEGY = Serial()
