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
from dlp.comm.collectives import Pending
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import QuantizedTensor

_REDUCE = {"all": collectives.all_reduce, "scatter": collectives.reduce_scatter}


@dataclass(frozen=True)
class SerialGather:
    shard: QuantizedTensor
    pending: Pending[tuple[Tensor, ...]]

    def whole(self) -> QuantizedTensor:
        return self.shard.format.wrap(self.pending.wait())

    def gemm(self, gemm: Gemm) -> Tensor:
        return gemm(self.whole())


class Serial:
    name = "serial"

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> SerialGather:
        dims = [part.moves_along(dim) for part in a.format.parts]
        return SerialGather(a, collectives.all_gather(a.parts, dims, group))

    def gemm_reduce(
        self, a: QuantizedTensor, gemm: Gemm, group: ProcessGroup, *, reduce: str, wire: torch.dtype
    ) -> Pending[Tensor]:
        return _REDUCE[reduce](gemm(a).to(wire), group)


STRATEGY = Serial()
