"""What FSDP's gradients are carried as when they are summed over dp_shard: a `ReduceCodec`, by name (see `dlp.parallel.wires`).

FSDP hands over the gradients of a unit as one flat tensor, a part for each rank; blocks of 128 lie along it. Sums are
fp32 in rank order, divided by the number of ranks and rounded once to the dtype of the reduction (`reduce_dtype`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from dlp.comm import collectives, observer
from dlp.comm.collectives import ReduceCodec
from dlp.parallel.wires import WIRES


class WireReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter as an exchange and a sum."""

    def __init__(self, wire: ReduceCodec) -> None:
        self.wire = wire

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """On the current stream, whatever `async_op`. Raises ValueError for another op than a sum or an average."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"gradients on a wire are summed or averaged; got {op}: leave the gradient divide factor as it is"
            )
        with observer.label(layer="", direction="grads"):
            (total,) = collectives.reduce_scatter((input_tensor,), group, self.wire).wait()
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


def set_grad_wire(model: nn.Module, wire: str) -> None:
    """Carry the gradients of every FSDP unit of `model` as one of WIRES; call it after `fully_shard`.

    Raises ValueError for another wire.
    """
    if wire not in WIRES:
        raise ValueError(f"unknown gradient wire {wire!r}: the wires are {', '.join(WIRES)}")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(WireReduceScatter(WIRES[wire]))
