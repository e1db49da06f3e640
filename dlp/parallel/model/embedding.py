"""Where a model enters what tp cuts, and where it leaves: vocab-parallel embedding and cross entropy, and the borders of
the sequence-parallel region.

The vocabulary V is cut over tp, rank r holds rows [r*V/tp, (r+1)*V/tp). Tokens are the flattened [B*S] = M dimension; rank r
holds the contiguous slice [r*M/tp, (r+1)*M/tp).

    VocabParallelEmbedding   tokens [B, S]              -> [B, S, H], or [M/tp, H]
    scatter_tokens           x [B, S, H] or [M, H]      -> [M/tp, H]      backward gathers
    gather_tokens            x [M/tp, H]                -> [M, H]         backward takes this rank's slice
    cross_entropy            logits [M, V/tp]           -> the summed loss, equal on all ranks

What follows gather_tokens must be computed alike on every tp rank, as it is on one rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import collectives, observer
from dlp.comm.mesh import tp_group_of
from dlp.kernels import ops
from dlp.parallel.weight.local import fill, local
from dlp.parallel.weight.parameters import SpreadModule

IGNORED = -100


class _ReduceTokens(torch.autograd.Function):
    """Rows that only one rank fills -> the whole rows on every rank ("all") or each rank's token shard ("scatter")."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, reduce: str, name: str) -> Tensor:
        ctx.group, ctx.reduce, ctx.name = group, reduce, name
        op = collectives.all_reduce if reduce == "all" else collectives.reduce_scatter
        with observer.label(layer=name, direction="fprop"):
            return op(rows, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.reduce == "all":
            return grad, None, None, None
        with observer.label(layer=ctx.name, direction="dgrad"):
            return collectives.all_gather((grad,), (0,), ctx.group).wait()[0], None, None, None


class _Lookup(torch.autograd.Function):
    """Rows of `weight` [V/tp, H] at `index` [M], zero where `mine`, bool [M], says that another rank has the row; rows get a
    gradient where `learns`, bool [M]. The gradients of equal tokens are summed in fp32 and rounded once: a text repeats tokens
    so often that a bf16 sum would lose several percent."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, mine: Tensor, learns: Tensor) -> Tensor:
        ctx.save_for_backward(index, learns)
        ctx.vocabulary, ctx.dtype = len(weight), weight.dtype
        return F.embedding(index, weight) * mine.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, learns = ctx.saved_tensors
        rows = grad.float() * learns.unsqueeze(-1)
        summed = torch.ops.aten.embedding_dense_backward(rows, index, ctx.vocabulary, -1, False)
        return summed.to(ctx.dtype), None, None, None


class VocabParallelEmbedding(SpreadModule, nn.Embedding):
    """tokens [B, S] int64 -> [B, S, H], or this rank's token shard [B*S/tp, H] with sequence parallelism; dtype of `weight`.

    `weight` [V, H], cut over tp along V. The row `padding_idx` gets no gradient.
    """

    dlp_made = "vocabulary"
    tp_partial: tuple[str, ...] = ()
    name: str
    group: ProcessGroup
    sequence_parallel: bool

    def __init__(
        self, weight: nn.Parameter, tp: DeviceMesh, sequence_parallel: bool, name: str = "embedding",
        padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.weight = weight
        cut_vocabulary(self, tp, sequence_parallel, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallelEmbedding:
        new = memo[id(self)] = object.__new__(type(self))
        memo[id(self.group)] = self.group  # a process group cannot be copied
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight, self.name)
        index = tokens.reshape(-1) - self.group.rank() * weight.shape[0]
        mine = (index >= 0) & (index < weight.shape[0])
        learns = mine if self.padding_idx is None else mine & (tokens.reshape(-1) != self.padding_idx)
        rows: Tensor = _Lookup.apply(weight, torch.where(mine, index, 0), mine, learns)
        if self.sequence_parallel:
            sharded: Tensor = _ReduceTokens.apply(rows, self.group, "scatter", self.name)
            return sharded
        whole: Tensor = _ReduceTokens.apply(rows, self.group, "all", self.name)
        return whole.view(*tokens.shape, -1)

    def reset_parameters(self) -> None:
        """The initial values of an nn.Embedding, padding row included: rank 0 draws them, each rank keeps its part."""
        vocabulary, size, device = self.num_embeddings, self.embedding_dim, self.weight.device
        fill(
            self.weight, nn.Embedding(vocabulary, size, self.padding_idx, device=device, dtype=self.weight.dtype).weight
        )


_CLASSES: dict[type, type] = {}  # one per class of embedding


def cut_vocabulary(module: nn.Embedding, tp: DeviceMesh, sequence_parallel: bool, name: str) -> None:
    """Make an embedding whose weight tp cuts along V vocab-parallel, in place. A class of its own keeps its forward, whose
    super().forward(tokens) is the one above."""
    cls = type(module)
    if not isinstance(module, VocabParallelEmbedding):
        ours: type = VocabParallelEmbedding
        if cls is not nn.Embedding:
            subclass = type(f"VocabParallel{cls.__name__}", (cls, ours), {"__module__": cls.__module__})
            ours = _CLASSES.setdefault(cls, subclass)
        module.__class__ = ours
    vars(module).update(name=name, group=tp.get_group(), sequence_parallel=sequence_parallel)


def _slice(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()].contiguous()


def _gather(x: Tensor, group: ProcessGroup, direction: str) -> Tensor:
    with observer.label(layer="tokens", direction=direction):
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
    group, tokens = tp_group_of(tp), x.numel() // x.shape[-1]
    if tokens % group.size():
        raise ValueError(
            f"scatter_tokens: tp {group.size()} does not divide {tokens} tokens (x {tuple(x.shape)}); choose micro_batch x "
            f"sequence divisible by tp"
        )
    result: Tensor = _Scatter.apply(x, group)
    return result


def gather_tokens(x: Tensor, tp: DeviceMesh | ProcessGroup) -> Tensor:
    """Token shards [M/tp, H] -> [M, H], whole on every tp rank; view it with B and S from configuration."""
    result: Tensor = _Gather.apply(x, tp_group_of(tp))
    return result


class _CrossEntropy(torch.autograd.Function):
    """Sum over tokens of lse - logits[target] + z_loss lse^2, lse = logsumexp(logits). Saves the logits and one fp32 lse per
    token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None, z_loss: float) -> Tensor:
        column = targets if group is None else targets - group.rank() * logits.shape[1]  # of this rank, if it is one
        lse, picked = ops.log_sum_exp(logits, column)
        if group is not None and group.size() > 1:
            with observer.label(layer="cross_entropy", direction="fprop"):
                (both,) = collectives.all_gather((torch.stack([lse, picked])[None],), (0,), group).wait()
            lse, picked = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        valid = targets != IGNORED
        ctx.save_for_backward(logits, column, valid, lse)
        ctx.z_loss = z_loss
        loss = lse - picked if z_loss == 0 else lse - picked + z_loss * lse.square()
        return (loss * valid).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, valid, lse = ctx.saved_tensors
        if ctx.z_loss == 0:
            return ops.softmax_gradient(logits, column, lse, grad * valid), None, None, None
        more = 2 * ctx.z_loss * lse * grad * valid  # of the softmax, not of what is taken off at the target
        gradient = ops.softmax_gradient(logits, column, lse, grad * valid + more)
        mine = (column >= 0) & (column < logits.shape[1])
        at = torch.where(mine, column, 0).unsqueeze(1)
        gradient.scatter_add_(1, at, (more * mine).to(gradient.dtype).unsqueeze(1))
        return gradient, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, tp: DeviceMesh | ProcessGroup | None = None, *, z_loss: float = 0.0
) -> Tensor:
    """The summed cross entropy, in nats, fp32 scalar, equal on all tp ranks.

    logits [M, V/tp] (column-parallel head, any float dtype), targets [M] int64 in [0, V), -100 is ignored. Divide by the
    global number of valid tokens once. z_loss: weight of each token's squared logsumexp, which is added and keeps logits from
    drifting (arXiv 2204.02311). fp32 logits are nowhere stored, but on a CPU for a chunk of tokens at a time.
    """
    if len(logits) != targets.numel():
        raise ValueError(f"cross_entropy: {len(logits)} rows of logits, but {targets.numel()} targets")
    loss: Tensor = _CrossEntropy.apply(logits, targets.reshape(-1), None if tp is None else tp_group_of(tp), z_loss)
    return loss
