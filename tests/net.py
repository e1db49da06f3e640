"""A small sequence-parallel network with siblings, a column- and a row-parallel linear, and steps of training on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dlp
from dlp.comm.mesh import ParallelDims
from tests import pool as worker

HIDDEN, BATCH, SEQUENCE = 64, 4, 64
RUN_GROUPS = [
    {"name": "siblings", "match": ["blocks.*.{gate,up}"], "style": "column", "siblings": True},
    {"name": "down", "match": ["blocks.*.down"], "style": "row"},
]


class Block(nn.Module):
    """Residual block: norm, then the siblings gate and up (weights [2 size, size]), then down (weight [size, 2 size])."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.gate = nn.Linear(size, 2 * size, bias=False)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x_in = self.norm(x)
        return x + self.down(F.silu(self.gate(x_in)) * self.up(x_in))


class Net(nn.Module):
    """Model: x [B, S, size] -> [B, S, size]. `tp`: the mesh if the blocks run on token shards, else None. `wrap`:
    function that calls a block, for example with recomputation."""

    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.size = size
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.tp: DeviceMesh | None = None
        self.wrap: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.tp is None else dlp.scatter_tokens(x, self.tp)
        for block in self.blocks:
            rows = self.wrap(block, rows)
        return rows if self.tp is None else dlp.gather_tokens(rows, self.tp).view(x.shape)


def net(
    recipe: Any, mesh: DeviceMesh, *groups: dict[str, Any], dtype: torch.dtype = torch.float32, fsdp: bool = False,
    **options: Any,
) -> Net:  # fmt: skip
    """Return the converted network, with the same weights on every mesh; its attached optimizer is `model.optimizer`.
    `groups`: layer groups after the group of all blocks; `fsdp`: shard the network with FSDP; `options`: arguments of
    `dlp.convert`."""
    torch.manual_seed(0)
    model = Net().to(worker.device(), dtype)
    sequence_parallel = mesh["tp"].size() > 1
    first = {"name": "all", "match": ["blocks.**"], "recipe": recipe, "sequence_parallel": sequence_parallel}
    micro = (BATCH // ParallelDims.from_mesh(mesh).dp_size, SEQUENCE)
    dlp.convert(model, [first, *RUN_GROUPS, *groups], mesh, batch=micro, **options)
    if sequence_parallel:
        model.tp = mesh["tp"]
    if fsdp:
        dlp.fully_shard(model, mesh=mesh)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)
    dlp.attach(model, model.optimizer)
    return model


def batch(step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This rank's sequences of a global batch: x and the target of y."""
    generator = torch.Generator().manual_seed(100 + step)
    x, target = (torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator) * (1 + step) for _ in range(2))
    dims = ParallelDims.from_mesh(mesh)
    rank, size = dims.dp_rank, dims.dp_size
    return tuple(t.chunk(size)[rank].to(worker.device()) for t in (x, target))


def gradients(model: Net, x: Tensor, target: Tensor) -> Tensor:
    """Run forward and backward of one microbatch; return the loss."""
    dtype = next(model.parameters()).dtype
    loss = F.mse_loss(model(x.to(dtype)).float(), target, reduction="sum") / BATCH
    (loss * (BATCH // len(x))).backward()  # FSDP averages over dp ranks; the test needs the sum
    return loss.detach()


def train(model: Net, mesh: DeviceMesh, steps: range) -> list[float]:
    """Run SGD steps; return the losses of this rank."""
    losses = []
    for step in steps:
        losses.append(gradients(model, *batch(step, mesh)).item())
        model.optimizer.step()
        model.optimizer.zero_grad()
    return losses


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded parameters, by name."""
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}
