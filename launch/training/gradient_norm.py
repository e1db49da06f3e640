"""Global gradient norm by one all-reduce, bitwise equal on all ranks.

torch's `get_total_norm` of DTensors runs a collective for each mesh axis, and its results may differ in bits between ranks. If
ranks clipped by different norms, replicas would diverge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.comm import observer
from dlp.kernels import canonical
from launch.ranks.links import OWN


class GradientNorm:
    """Function object that returns the 2-norm of the gradients of all parameters as one vector.

    Each gradient element counts once, also if several ranks have copies. All parameters that require gradients must have
    gradients. `invariant`: compute the norm by sums of integers, so that it is bitwise equal on every mesh.
    """

    def __init__(self, parameters: Iterable[Tensor], invariant: bool = False) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        shards = [float(_shards(parameter)) for parameter in self._parameters]
        self._invariant = invariant
        self._copies = torch.tensor([[dist.get_world_size() // int(count)] for count in shards])
        self._weights = torch.tensor(shards, device=self._parameters[0].device) / dist.get_world_size()

    def __call__(self) -> Tensor:
        """Return the norm, fp32 [], equal on all ranks."""
        grads = [_local(parameter.grad) for parameter in self._parameters]
        if self._invariant:
            return self._exactly(grads)
        norms = torch.stack(torch._foreach_norm(grads, dtype=torch.float32))
        squares = norms.square().dot(self._weights)
        if dist.get_world_size() > 1:
            with observer.label(**OWN):
                dist.all_reduce(squares)
        return squares.sqrt()

    def _exactly(self, grads: Sequence[Tensor]) -> Tensor:
        largest = torch.stack([grad.abs().amax() if grad.numel() else grad.new_zeros(()) for grad in grads]).float()
        with observer.label(**OWN):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            digits = canonical.square_sums(grads, largest)
            dist.all_reduce(digits)
        return canonical.norm_of(digits // self._copies.to(digits.device), largest)


def _local(grad: Tensor | None) -> Tensor:
    assert grad is not None, "a parameter has no gradient"
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _shards(parameter: Tensor) -> int:
    """Return the number of shards of a parameter; each shard is on world size / shards ranks."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return prod(mesh.size(axis) for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
