"""A small network that FSDP shards, and training steps. The weights consist of complete scale blocks in every recipe."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dlp
from dlp.comm.mesh import ParallelDims
from tests import pool as worker
from tests.net import RUN_GROUPS, Net, full

BATCH, SEQUENCE = 4, 32
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shardnet(
    recipe: Any, mesh: DeviceMesh, *, size: int = 0, options: dict[str, Any] | None = None,
    lr: float = 1e-3, compiled: str = "", adamw: bool = False, down: Any = None,
    **keywords: Any,
) -> Net:  # fmt: skip
    """Return the network with the same weights on every mesh, converted and sharded. The attached optimizer is
    `model.optimizer`.

    Args:
        size: number of features; 0: a size for which shards consist of complete scale blocks in every recipe.
        options: arguments of `dlp.convert`.
        compiled: torch.compile backend for the first residual block; "": no compilation.
        down: recipe of the layers `down`; None: `recipe`.
        keywords: arguments of `dlp.fully_shard`, which is called for each residual block and for the model.
    """
    torch.manual_seed(0)
    model = Net(size or (256 if recipe == "fp8_block" else 128)).to(worker.device())
    tp = mesh["tp"].size() > 1
    first = {"name": "all", "match": ["blocks.**"], "recipe": recipe, "sequence_parallel": tp}
    micro = (BATCH // ParallelDims.from_mesh(mesh).dp_size, SEQUENCE)
    last = [] if down is None else [{"name": "other", "match": ["blocks.*.down"], "recipe": down}]
    dlp.convert(model, [first, *RUN_GROUPS, *last], mesh, batch=micro, **(options or {}))
    model.tp = mesh["tp"] if tp else None
    for block in model.blocks[:1] if compiled else ():
        block.compile(backend=compiled)
    for module in (*model.blocks, model):
        dlp.fully_shard(module, mesh=mesh, **{"mp_policy": BF16, **keywords})
    kind = torch.optim.AdamW if adamw else torch.optim.SGD
    model.optimizer = kind(model.parameters(), lr=lr)
    dlp.attach(model, model.optimizer)
    return model


def backward(model: Net, mesh: DeviceMesh, step: int) -> float:
    """Run forward and backward of one microbatch, this rank's sequences of a global batch; return the loss."""
    generator = torch.Generator().manual_seed(100 + step)
    x, target = (torch.randn(BATCH, SEQUENCE, model.size, generator=generator) for _ in range(2))
    dims = ParallelDims.from_mesh(mesh)
    rank, size = dims.dp_rank, dims.dp_size
    x, target = (t.chunk(size)[rank].to(worker.device()) for t in (x, target))
    loss = F.mse_loss(model(x.bfloat16()).float(), target, reduction="sum") / BATCH
    loss.backward()
    return loss.item()


def train(model: Net, mesh: DeviceMesh, steps: range, microbatches: int = 1) -> list[float]:
    losses = []
    for step in steps:
        losses += [backward(model, mesh, step * microbatches + i) for i in range(microbatches)]
        model.optimizer.step()
        model.optimizer.zero_grad()
    return losses


def whole(tensor: Tensor) -> Tensor:
    return full(tensor).detach().clone()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded parameters and gradients, by name."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    return found | {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
