"""fully_shard: PyTorch's own, on the data-parallel axes of our mesh, under tensor-parallel layers.

Parameters are gathered in high precision (`mp_policy.param_dtype`) and cast where they are used.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes FSDP works on: (dp_replicate, dp_shard), or dp_shard alone when nothing is replicated."""
    if mesh["dp_replicate"].size() > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]


def fully_shard(module: nn.Module, *, mesh: DeviceMesh, **fsdp2_keywords: Any) -> nn.Module:
    """Shard the module's parameters over dp_shard and replicate them over dp_replicate, where that is more than 1.

    `mesh`: the mesh of `build_mesh`. The other keywords, and all the rest (gradients are averaged over data-parallel
    ranks), are those of `torch.distributed.fsdp.fully_shard`. Call it after `convert`, for each block, then for the model.
    """
    return cast(nn.Module, fsdp.fully_shard(module, mesh=data_parallel_mesh(mesh), **fsdp2_keywords))
