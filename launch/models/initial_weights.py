"""Random initial weights. They depend only on seed, parameter name and shape, so that every mesh starts with equal weights."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.comm.mesh import DP_SHARD, DP_SHARD_CP, TP, placement_on
from launch.models.modules import Llama
from launch.models.settings import Model


def initial_value(name: str, shape: torch.Size, config: Model, seed: int) -> Tensor:
    """Return the unsharded initial value of a parameter, fp32 on the CPU.

    Biases are 0, weights of norms 1. Matrices are normal with standard deviation 0.02; o_proj and down_proj, which add to the
    residual stream, have 0.02 / sqrt(2 * layers).
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * config.layers) if writes_residual else 0.02
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def this_ranks_part(full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of `full`, the unsharded value of `parameter`: sharded over tp first, then by FSDP."""
    if not isinstance(parameter, DTensor):
        return full
    for axis in (TP, DP_SHARD, DP_SHARD_CP):
        dim = getattr(placement_on(axis, parameter), "dim", None)
        if dim is not None:
            group = parameter.device_mesh.get_group(axis)
            chunks, rank = full.chunk(group.size(), dim), group.rank()
            full = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return full


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill the parameters of an allocated model. Each rank computes one unsharded tensor at a time and copies its shard."""
    for name, parameter in model.named_parameters():
        full = initial_value(name, parameter.shape, model.config, seed)
        kept = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        kept.copy_(this_ranks_part(full, parameter))
