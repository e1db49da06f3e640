"""The true global gradient norm in one reduction, with the same bits on every rank.

`get_total_norm` of DTensors reduces axis by axis, a collective for each, and gives no promise that ranks end with equal
bits; clipping by norms that differ would let replicas drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def gradient_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector, fp32 []. A DTensor counts once, however many ranks hold its parts."""
    norms = torch.stack(torch._foreach_norm([_local(grad) for grad in grads], dtype=torch.float32))
    shards = torch.tensor([float(_shards(grad)) for grad in grads]).to(norms.device, non_blocking=True)
    squares = norms.square().dot(shards) / dist.get_world_size()
    dist.all_reduce(squares)
    return squares.sqrt()


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _shards(grad: Tensor) -> int:
    """Into how many parts the ranks cut it: each part is on world size / shards of them."""
    if not isinstance(grad, DTensor):
        return 1
    mesh = grad.device_mesh
    return prod(mesh.size(axis) for axis, placement in enumerate(grad.placements) if not placement.is_replicate())
