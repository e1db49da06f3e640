"""Vocab-parallel embedding and cross entropy, and entry and exit of the sequence-parallel region.

The vocabulary V is sharded over tp; rank r holds rows [r*V/tp, (r+1)*V/tp). Tokens are the flattened [B*S] = M dimension; rank
r holds the contiguous slice [r*M/tp, (r+1)*M/tp).

    VocabParallelEmbedding   tokens [B, S]              -> [B, S, H], or [M/tp, H]
    scatter_tokens           x [B, S, H] or [M, H]      -> [M/tp, H]      backward gathers
    gather_tokens            x [M/tp, H]                -> [M, H]         backward takes this rank's slice
    cross_entropy            logits [M, V/tp]           -> the summed loss, equal on all ranks

After gather_tokens all tp ranks must compute the same values.

**Tokens and targets outside of the vocabulary**: torch raises for such tokens; a vocabulary-sharded layer must check them
itself. On a CPU the check raises at once. On a GPU, where reading a value would wait for the device, the largest invalid token
is copied to the host, and the next call of the same layer raises. Until then the results are NaN: rows of an embedding, the
loss and its gradient. Compiled code and replays of CUDA graphs only produce the NaN.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import traced
from dlp.comm.mesh import tp_group_of
from dlp.kernels import canonical, ops
from dlp.kernels.launches import capturing
from dlp.parallel.model.checks import OnTheWay
from dlp.parallel.weight.local import fill, local
from dlp.parallel.weight.parameters import SpreadModule

_NONE = torch.iinfo(torch.int64).min  # stands for: no token is outside of the vocabulary
# (layer, device) -> (largest invalid token of the last call, rule for tokens)
_COMING: dict[tuple[str, torch.device], tuple[OnTheWay, str]] = {}

IGNORED = -100


class _ReduceTokens(torch.autograd.Function):
    """Sum rows over tp; each row is zero on all ranks but one. Returns all rows on every rank ("all"), or each rank's token
    shard ("scatter")."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, reduce: str, name: str) -> Tensor:
        ctx.group, ctx.reduce, ctx.name = group, reduce, name
        return (traced.all_reduce if reduce == "all" else traced.reduce_scatter)(rows, group, name, "fprop")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.reduce == "all":
            return grad, None, None, None
        return traced.all_gather(grad, ctx.group, ctx.name, "dgrad"), None, None, None


class _Lookup(torch.autograd.Function):
    """Look up rows of `weight` [V/tp, H], which holds the vocabulary rows from `first` on, for `tokens` [M].

    The result is zero for a token whose row another rank holds, and NaN for a token outside of the vocabulary (`wrong`, bool
    [M]). The row of `padding_idx` gets no gradient. The gradients of equal tokens are summed in fp32, or exactly if
    `invariant`, and rounded once: tokens repeat so often that a bf16 sum would lose several percent."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, tokens: Tensor, wrong: Tensor, first: int, padding_idx: int | None, invariant: bool
    ) -> Tensor:  # fmt: skip
        index = tokens - first
        mine = ~outside(index, len(weight))
        index = torch.where(mine, index, 0)
        learns = mine if padding_idx is None else mine & (tokens != padding_idx)
        ctx.save_for_backward(index, learns)
        ctx.vocabulary, ctx.dtype, ctx.invariant = len(weight), weight.dtype, invariant
        others = torch.where(wrong, torch.nan, 0.0).to(weight.dtype)
        return torch.where(mine.unsqueeze(-1), F.embedding(index, weight), others.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        index, learns = ctx.saved_tensors
        if ctx.invariant:
            summed = canonical.sums_by_index(grad, index, learns, ctx.vocabulary)
        else:
            rows = torch.where(learns.unsqueeze(-1), grad.float(), 0.0)
            summed = torch.ops.aten.embedding_dense_backward(rows, index, ctx.vocabulary, -1, False)
        return summed.to(ctx.dtype), None, None, None, None, None


class VocabParallelEmbedding(SpreadModule, nn.Embedding):
    """Embedding whose vocabulary is sharded over tp. `dlp.convert` creates this module from `nn.Embedding`.

    Args:
        weight: embedding table, sharded over tp along the vocabulary.
        tp: mesh of the tensor-parallel ranks.
        sequence_parallel: return the token shard of this rank.
        name: name in messages.
        padding_idx: row that gets no gradient.

    Shape:
        - tokens: int64 [B, S], each in [0, V)
        - output: [B, S, H]; with sequence parallelism the token shard [B*S/tp, H]; dtype of `weight`
        - weight on each rank: [V/tp, H]

    Raises:
        IndexError: for tokens outside [0, V). On a GPU the next call raises; until then the rows are NaN.

    Examples:
        >>> mesh = dlp.build_mesh()
        >>> model = nn.Sequential(nn.Embedding(256, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("embedding", "0", style="column")], mesh)
        >>> model(torch.randint(256, (2, 8))).shape
        torch.Size([2, 8, 64])
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
        flat, vocabulary = tokens.reshape(-1), weight.shape[0] * self.group.size()
        wrong = outside(flat, vocabulary)
        refuse(self.name, flat, wrong, f"token ids must be in [0, {vocabulary}), the rows of the embedding")
        first = self.group.rank() * weight.shape[0]
        invariant = getattr(self, "dlp_invariant", False)
        rows: Tensor = _Lookup.apply(weight, flat, wrong, first, self.padding_idx, invariant)
        if self.sequence_parallel:
            sharded: Tensor = _ReduceTokens.apply(rows, self.group, "scatter", self.name)
            return sharded
        whole: Tensor = _ReduceTokens.apply(rows, self.group, "all", self.name)
        return whole.view(*tokens.shape, -1)

    def reset_parameters(self) -> None:
        """Draw the initial values of an nn.Embedding, padding row included, on rank 0; each rank keeps its shard."""
        vocabulary, size, device = self.num_embeddings, self.embedding_dim, self.weight.device
        fill(
            self.weight, nn.Embedding(vocabulary, size, self.padding_idx, device=device, dtype=self.weight.dtype).weight
        )


_CLASSES: dict[type, type] = {}  # user-defined class of embedding -> its vocab-parallel subclass


def cut_vocabulary(module: nn.Embedding, tp: DeviceMesh, sequence_parallel: bool, name: str) -> None:
    """Make an embedding vocab-parallel in place; tp shards the weight along V. A user-defined class keeps its forward, in
    which super().forward(tokens) is the vocab-parallel lookup."""
    cls = type(module)
    if not isinstance(module, VocabParallelEmbedding):
        ours: type = VocabParallelEmbedding
        if cls is not nn.Embedding:
            subclass = type(f"VocabParallel{cls.__name__}", (cls, ours), {"__module__": cls.__module__})
            ours = _CLASSES.setdefault(cls, subclass)
        module.__class__ = ours
    vars(module).update(name=name, group=tp_group_of(tp), sequence_parallel=sequence_parallel)


def _slice(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()].contiguous()


class _Scatter(torch.autograd.Function):
    """See `scatter_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        # copy: torch.compile of torch 2.11 loses the gradient of an autograd function that returns a view of x
        return _slice(x.reshape(-1, x.shape[-1]), group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return traced.all_gather(grad, ctx.group, "tokens", "dgrad").view(ctx.shape), None


class _Gather(torch.autograd.Function):
    """See `gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return traced.all_gather(x, group, "tokens", "fprop")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _slice(grad, ctx.group), None


def scatter_tokens(x: Tensor, tp: DeviceMesh | ProcessGroup) -> Tensor:
    """Return the token shard of this rank; backward gathers the gradient.

    Args:
        x: tokens, equal on all tp ranks.
        tp: tensor-parallel ranks.

    Shape:
        - x: [B, S, H] or [M, H]
        - output: [M/tp, H]

    Returns:
        The token shard.

    Raises:
        ValueError: when tp does not divide the number of tokens.

    Examples:
        >>> dlp.scatter_tokens(torch.randn(2, 8, 64), dlp.build_mesh()).shape  # tp = 1
        torch.Size([16, 64])
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
    """Gather token shards of all tp ranks; backward returns the gradient of this rank's shard.

    Args:
        x: token shard of this rank.
        tp: tensor-parallel ranks.

    Shape:
        - x: [M/tp, H]
        - output: [M, H], equal on all tp ranks

    Returns:
        All tokens. Restore B and S with `view`.

    Examples:
        >>> dlp.gather_tokens(torch.randn(16, 64), dlp.build_mesh()).shape  # tp = 1
        torch.Size([16, 64])
    """
    result: Tensor = _Gather.apply(x, tp_group_of(tp))
    return result


class _CrossEntropy(torch.autograd.Function):
    """Compute the sum over tokens of counts * (lse - logits[target] + z_loss * lse^2), where lse = logsumexp(logits).

    `counts`, fp32 [M], is 0 for an ignored token, NaN for a target outside of the vocabulary, else 1. Saves the logits, and
    per token the local index of the target (int64) and two fp32 numbers."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counts: Tensor, group: ProcessGroup | None, z_loss: float, invariant: bool
    ) -> Tensor:  # fmt: skip
        column = targets if group is None else targets - group.rank() * logits.shape[1]  # local index
        if invariant:
            lse, picked = _segments_of_vocabulary(logits, column, group)
        else:
            lse, picked = ops.log_sum_exp(logits, column)
        if not invariant and group is not None and group.size() > 1:
            both = traced.all_gather(torch.stack([lse, picked])[None], group, "cross_entropy", "fprop")
            lse, picked = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        ctx.save_for_backward(logits, column, counts, lse)
        ctx.z_loss = z_loss
        loss = lse - picked if z_loss == 0 else lse - picked + z_loss * lse.square()
        return _times(loss, counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, column, counts, lse = ctx.saved_tensors
        weight = _times(grad, counts)
        if ctx.z_loss == 0:
            return ops.softmax_gradient(logits, column, lse, weight), None, None, None, None, None
        more = _times(2 * ctx.z_loss * lse * grad, counts)  # gradient of z_loss * lse^2 with respect to lse
        gradient = ops.softmax_gradient(logits, column, lse, weight + more)
        mine = ~outside(column, logits.shape[1])
        at = torch.where(mine, column, 0).unsqueeze(1)
        gradient.scatter_add_(1, at, torch.where(mine, more, 0.0).to(gradient.dtype).unsqueeze(1))
        return gradient, None, None, None, None, None


def _segments_of_vocabulary(logits: Tensor, column: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the logsumexp of each row over the full vocabulary and the logit of the target, fp32 [M] each. Both are computed
    from the canonical segments of the vocabulary, so that kernels get equal shapes on every mesh."""
    count = canonical.segments_on_rank(logits.shape[1], 1 if group is None else group.size())
    width = logits.shape[1] // count
    parts = [ops.log_sum_exp(part.contiguous(), column - i * width) for i, part in enumerate(logits.split(width, 1))]
    both = torch.stack([torch.stack(part) for part in parts])
    if group is not None:
        both = traced.all_gather(both, group, "cross_entropy", "fprop")
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)


def _times(values: Tensor, counts: Tensor) -> Tensor:
    """Return values * counts, and 0 where `counts` is 0, even if the value is NaN or Inf."""
    return torch.where(counts == 0, 0.0, values * counts)


def cross_entropy(
    logits: Tensor, targets: Tensor, tp: DeviceMesh | ProcessGroup | None = None, *, ignore_index: int = IGNORED,
    z_loss: float = 0.0, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return the cross entropy summed over tokens, for logits whose vocabulary is sharded over tp.

    The sum is in nats and equal on all tp ranks. Divide by the global number of tokens that are not ignored. fp32 logits are
    not stored, except on a CPU for a chunk of tokens at a time.

    Args:
        logits: output of a column-parallel head, any floating dtype.
        targets: each in [0, V) or `ignore_index`.
        tp: ranks that share the vocabulary; None: this rank has the complete vocabulary.
        ignore_index: tokens with this target add nothing to the loss and get no gradient, whatever their logits are.
        z_loss: weight of the squared logsumexp of each token, which keeps logits from drifting (arXiv 2204.02311).
        invariant: compute equal bits for every number of ranks, as in a model of `dlp.convert(..., invariant=True)`.

    Shape:
        - logits: [M, V/tp]
        - targets: int64 [M], or any shape with M elements
        - output: fp32 scalar

    Returns:
        The summed loss.

    Raises:
        ValueError: when the number of targets differs from the number of rows.
        TypeError: for targets that are not int64, or logits that are not floating-point.
        IndexError: for targets outside [0, V): on a CPU at once, on a GPU in the next call; until then the loss is NaN.

    Examples:
        >>> logits = torch.randn(8, 256, requires_grad=True)
        >>> loss = dlp.cross_entropy(logits, torch.randint(256, (8,))) / 8
        >>> loss.backward()
    """
    if len(logits) != targets.numel():
        raise ValueError(f"cross_entropy: {len(logits)} rows of logits, but {targets.numel()} targets")
    if targets.dtype != torch.int64:
        raise TypeError(
            f"cross_entropy: targets are token numbers, int64; got {targets.dtype}: convert them by .long()"
        )
    if not logits.is_floating_point():
        raise TypeError(f"cross_entropy: logits must be floating-point; got {logits.dtype}: convert them first")
    group, flat = None if tp is None else tp_group_of(tp), targets.reshape(-1)
    vocabulary = logits.shape[1] * (1 if group is None else group.size())
    counted = flat != ignore_index
    wrong = counted & outside(flat, vocabulary)
    refuse("cross_entropy", flat, wrong, f"targets must be in [0, {vocabulary}), or ignore_index ({ignore_index})")
    counts = counted.float().masked_fill_(wrong, torch.nan)
    loss: Tensor = _CrossEntropy.apply(logits, flat, counts, group, z_loss, invariant)
    return loss


# Tokens outside of the vocabulary


def outside(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the mask of tokens outside of [0, vocabulary): bool, in the shape of the tokens."""
    return (tokens < 0) | (tokens >= vocabulary)


def refuse(name: str, tokens: Tensor, wrong: Tensor, rule: str) -> None:
    """Raise IndexError for tokens outside of the vocabulary: on a CPU for tokens of this call, on a GPU for tokens of the
    previous call. Compiled code, fake tensors and captures of CUDA graphs check nothing.

    wrong   mask of these tokens, bool
    name    name of the layer, for the message
    rule    requirement on tokens, for the message
    """
    if torch.compiler.is_compiling() or isinstance(tokens, FakeTensor) or tokens.is_meta or not tokens.numel():
        return
    if _reads_at_once(tokens):
        if wrong.any():
            _raise(name, int(tokens[wrong][0]), rule, "")
    elif not capturing():
        before = _COMING.pop((name, tokens.device), None)
        _COMING[name, tokens.device] = OnTheWay(torch.where(wrong, tokens, _NONE).amax()[None]), rule
        if before is not None and (worst := int(before[0].read()[0])) != _NONE:
            _raise(name, worst, before[1], " in the previous call")


def _reads_at_once(tokens: Tensor) -> bool:
    return not tokens.is_cuda


def _raise(name: str, token: int, rule: str, when: str) -> None:
    raise IndexError(f"{name}: {token} is out of range{when}: {rule}; check the tokenizer and the data")
