"""scatter_tokens and gather_tokens: the borders of the sequence-parallel region.

Tokens are the flattened [B*S] dimension; rank r of tp holds the contiguous slice [r*M/tp, (r+1)*M/tp).

    scatter_tokens   x [B, S, H] or [M, H], whole  -> [M/tp, H]      backward gathers
    gather_tokens    x [M/tp, H]                   -> [M, H]         backward takes this rank's slice

What follows gather_tokens must be computed alike on every tp rank, as it is on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import collectives, wire


def tp_group(tp: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """The tp process group of a mesh with a tp axis, of a 1-D mesh, or the group itself."""
    if not isinstance(tp, DeviceMesh):
        return tp
    return tp["tp"].get_group() if tp.ndim > 1 else tp.get_group()


def _slice(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()].contiguous()


def _gather(x: Tensor, group: ProcessGroup, direction: str) -> Tensor:
    with wire.label(layer="tokens", direction=direction):
        return collectives.all_gather((x,), (0,), group).wait()[0]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return _slice(x.reshape(-1, x.shape[-1]), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group, "dgrad").view(ctx.shape), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group, "fprop")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _slice(grad, ctx.group), None


def scatter_tokens(x: Tensor, tp: DeviceMesh | ProcessGroup) -> Tensor:
    """x [B, S, H] or [M, H], equal on all tp ranks -> this rank's token shard [M/tp, H].

    Raises ValueError when tp does not divide the number of tokens.
    """
    group, tokens = tp_group(tp), x.numel() // x.shape[-1]
    if tokens % group.size():
        raise ValueError(
            f"scatter_tokens: tp {group.size()} does not divide {tokens} tokens (x {tuple(x.shape)}); choose micro_batch x "
            f"sequence divisible by tp"
        )
    result: Tensor = _Scatter.apply(x, group)
    return result


def gather_tokens(x: Tensor, tp: DeviceMesh | ProcessGroup) -> Tensor:
    """Token shards [M/tp, H] -> [M, H], whole on every tp rank; view it with B and S from configuration."""
    result: Tensor = _Gather.apply(x, tp_group(tp))
    return result
