"""Context parallelism: each rank of cp has a part of every sequence, and attention gathers the keys and values of all ranks.

    sequence    S tokens in 2R equal chunks for R ranks; rank r has chunks r and 2R-1-r, so that causal attention costs
                every rank the same: (r + 1) + (2R - r) chunks of keys

                R = 2    rank 0: chunks 0, 3        rank 1: chunks 1, 2

    forward     k, v of this rank -> one gather over cp -> k, v of the sequence, in the order of positions
                queries of chunk c attend to keys 0 .. (c + 1) S / 2R
    backward    gradients of all k, v -> one reduce-scatter over cp, summed in fp32 in the order of ranks

Positions, the order of gathered tokens and the last key of each query chunk follow from `Context.chunks`. All other modules of
a transformer compute tokens independently of each other. For weights, ranks of cp are data-parallel: `dlp.fully_shard` sums the
gradients.

torch's own context parallelism (torch.distributed.tensor.experimental) is not used, because it registers attention kernels of
GPUs only, and dlp also runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import traced
from dlp.comm.mesh import CP, ParallelDims
from dlp.runtime.causal import causal

LAYER = "attention"  # layer name of the transfers in ledgers
AFTER = 1  # a chunk of queries attends to all earlier chunks and to itself
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Context:
    """Part of each sequence that one rank of cp holds: two chunks of tokens.

    A model for a mesh with cp > 1 holds a Context as an attribute of the module that computes attention; `dlp.convert` raises
    otherwise.

    Args:
        ranks: number of ranks of cp.
        rank: index of this rank.
        group: process group of cp; None: `gather` repeats this rank's tokens, for memory estimates on the meta device.

    Examples:
        >>> context = dlp.Context(ranks=2, rank=1)
        >>> context.split(torch.arange(8)[None])
        tensor([[2, 3, 4, 5]])
    """

    ranks: int
    rank: int
    group: ProcessGroup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # dynamo cannot trace the choice of a backend in `causal`, so `causal` becomes one call in dynamo's graph
        if self.ranks > 1:
            torch.compiler.allow_in_graph(causal)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Context:
        """Return the context of this rank on a mesh of `dlp.build_mesh`. With cp = 1, the context is the full sequence."""
        dims = ParallelDims.from_mesh(mesh)
        return cls(1, 0) if dims.cp == 1 else cls(dims.cp, dims.rank(CP), dims.group(CP))

    @property
    def chunks(self) -> tuple[int, int]:
        """Indices of this rank's chunks among 2 * ranks chunks of a sequence, in order."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor with full sequences: tokens, targets or activations.

        Raises:
            ValueError: for a length that is not a multiple of 2 * ranks.
        """
        if self.ranks == 1:
            return x
        if x.shape[dim] % (2 * self.ranks):
            raise ValueError(
                f"cp = {self.ranks} needs sequences of a multiple of {2 * self.ranks} tokens, since each rank has 2 chunks of "
                f"equal length; got {x.shape[dim]}: pad the sequences"
            )
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat([chunks[chunk] for chunk in self.chunks], dim)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the position of each of this rank's `length` tokens in the full sequence, int64 [length]."""
        if self.ranks == 1:
            return torch.arange(length, device=device)
        size = length // 2
        return torch.cat([torch.arange(size, device=device) + chunk * size for chunk in self.chunks])

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the parts of all ranks to full sequences. Backward sums the gradients over the ranks, and returns
        the gradients of this rank's tokens."""
        if self.ranks == 1:
            return x
        if self.group is None:
            return torch.cat([x] * self.ranks, dim)
        gathered: Tensor = _Gather.apply(x, self, dim)
        return gathered

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Tensor:
        """Compute causal attention of this rank's queries to the keys of the full sequence.

        Args:
            q, k, v: heads of this rank's tokens.
            attend: function (q, k, v) -> output that computes causal attention of the last q.shape[2] positions to the
                keys of all positions; None: `dlp.runtime.causal.causal`.

        Shape:
            - q: [B, heads, S / ranks, D]; k, v: [B, kv heads, S / ranks, D]
            - output: the shape of q
        """
        attend = attend or causal
        if self.ranks == 1:
            return attend(q, k, v)
        k, v = self.gather(torch.stack([k, v]), 3)
        size = q.shape[2] // 2
        ends = [(chunk + AFTER) * size for chunk in self.chunks]
        parts = zip(q.split(size, 2), ends, strict=True)
        return torch.cat([attend(part, k[:, :, :end], v[:, :, :end]) for part, end in parts], 2)


class _Gather(torch.autograd.Function):
    """Gather tokens along a dimension, in the order of positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, dim: int) -> Tensor:
        ctx.context, ctx.dim = context, dim
        assert context.group is not None
        halves = torch.stack(x.chunk(2, dim))  # [2, ...]
        every = traced.all_gather(halves[None], context.group, LAYER, "fprop")  # [R, 2, ...]
        return torch.cat([*every[:, 0].unbind(), *every[:, 1].flip(0).unbind()], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        context, ranks = ctx.context, ctx.context.ranks
        chunks = torch.stack(grad.chunk(2 * ranks, ctx.dim))
        by_rank = torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], 1)  # [R, 2, ...]
        (own,) = traced.reduce_scatter(by_rank, context.group, LAYER, "dgrad")
        return torch.cat([own[0], own[1]], ctx.dim), None, None


def check_context(model: nn.Module, cp: int) -> None:
    """Raise ValueError if cp > 1 for a model whose attention would see only a part of each sequence."""
    if cp == 1:
        return
    whole = (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
    for name, module in model.named_modules():
        if isinstance(module, whole) or getattr(module, "reads_sequences", False):
            raise ValueError(
                f"{name or type(model).__name__}: {type(module).__name__} reads whole sequences, and with cp = {cp} each rank "
                f"has only a part: compute attention by dlp.Context.attention, or set cp = 1"
            )
    if not any(isinstance(value, Context) for module in model.modules() for value in vars(module).values()):
        raise ValueError(
            f"cp = {cp}, but no module of the model holds a dlp.Context, so that attention would see only this rank's tokens: "
            f"compute attention and positions by dlp.Context.of(mesh), keep the Context as an attribute, or set cp = 1"
        )
