"""Compute the bytes that the forward of a model saves for backward, by block, and the bytes of the logits.

The model runs on meta tensors with the heads, features and tokens of one rank. Linears, embeddings, attention and norms are
replaced by stand-ins that save the same tensors as in a real run: a linear saves the tensors of its `LinearPlan`, attention its
inputs, output and log-sum-exp, a norm its input and rstd. All tensors that autograd saves are counted, each storage once. With
torch.compile only the inputs and outputs of linears, attention and norms are counted: pointwise operations are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from dlp.parallel.linear.plan import LinearPlan, Result, linear_plan
from dlp.parallel.model.rows import LayerPlan, OtherPlan
from dlp.parallel.style import shard_sizes

REST = ""  # key of tensors that are saved outside of blocks


@dataclass
class Saved:
    """Saved bytes by name of the block, or `REST`.

    eager      without torch.compile
    compiled   with torch.compile
    points     tensors that selective recomputation saves: results of linears and attention, operands of wgrad
    inputs     input of the block
    logits     bytes of the output of the model
    """

    eager: dict[str, int] = field(default_factory=dict)
    compiled: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    logits: int = 0


class _Count:
    """Counter of saved tensors; each storage is counted once. `block`: block whose forward runs, or `REST`; `saved`: result."""

    def __init__(self) -> None:
        self.block, self.saved = REST, Saved()
        self._seen: dict[str, set[int]] = {"eager": set(), "compiled": set(), "points": set()}
        self._opaque: set[int] = set()
        self._alive: list[Any] = []

    def opaque(self, *tensors: Tensor) -> None:
        """Mark inputs and results of a stand-in: if autograd saves them, they count as saved with torch.compile as well."""
        self._opaque.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def point(self, *tensors: Tensor) -> None:
        """Count tensors that selective recomputation saves."""
        for tensor in tensors:
            self._add("points", tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            self._add("eager", tensor)
            if tensor.untyped_storage()._cdata in self._opaque:
                self._add("compiled", tensor)
        return tensor

    def _add(self, kind: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen[kind]:
            self._seen[kind].add(storage._cdata)
            self._alive.append(storage)  # if the storage were freed, a new storage could get the same address
            found = getattr(self.saved, kind)
            found[self.block] = found.get(self.block, 0) + storage.nbytes()


class _Keep(torch.autograd.Function):
    """Autograd function for stand-ins: `apply(count, make, *inputs)` returns the first result of `make(*inputs)`, and saves the
    tensors of the second result for backward."""

    @staticmethod
    def forward(
        ctx: Any, count: _Count, make: Callable[..., tuple[Tensor, Sequence[Tensor]]], *inputs: Tensor
    ) -> Tensor:
        y, kept = make(*inputs)
        ctx.save_for_backward(*kept)
        count.opaque(y, *kept)
        return y


class _Linear(nn.Module):
    """Stand-in for a converted linear. `shared`: dict that the linears of a set of siblings share; it holds their common x and
    the tensors that are saved for x, which count once."""

    def __init__(self, row: LayerPlan, tp: int, count: _Count, shared: dict[str, Any]) -> None:
        super().__init__()
        self.row, self.tp, self.count, self.shared = row, tp, count, shared
        self.sizes = shard_sizes(row.row, *row.shape, tp, row.name)

    def plan(self, x: Tensor) -> LinearPlan:
        row, tokens = self.row, x.numel() // x.shape[-1]
        return linear_plan(row.recipe, row.row, self.tp, tokens, kept=row.options.keeps)

    def forward(self, inputs: Tensor) -> Tensor:
        def make(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            plan, like = self.plan(x), Result(tuple(x.shape), x.dtype)
            y = plan.y(like, self.sizes[0])
            if self.shared.get("x") is not inputs:
                self.shared |= {"x": inputs, "kept": self.kept(plan, x)}
            made = torch.empty(y.shape, dtype=y.dtype, device="meta")
            self.count.point(made, *[kept for kept in self.shared["kept"] if kept is not x])
            return made, self.shared["kept"]

        y: Tensor = _Keep.apply(self.count, make, inputs)
        return y

    def kept(self, plan: LinearPlan, x: Tensor) -> list[Tensor]:
        return plan.saved(x) or [x]


class _Embedding(nn.Module):
    """Stand-in for an embedding, sharded over tp or not. `forward` ignores all arguments except the tokens, since embeddings of
    positions in some models are called with more."""

    def __init__(self, row: OtherPlan, hidden: int, dtype: torch.dtype, tp: int, count: _Count) -> None:
        super().__init__()
        self.row, self.hidden, self.dtype, self.tp, self.count = row, hidden, dtype, tp, count

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        cut = self.row.style == "vocab" and self.row.sequence_parallel
        shape = (tokens.numel() // self.tp, self.hidden) if cut else (*tokens.shape, self.hidden)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)


class _Kernels(TorchFunctionMode):
    """Mode that replaces attention and RMSNorm by stand-ins, which save the same tensors as the GPU kernels."""

    def __init__(self, count: _Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return _Keep.apply(self.count, self._attention, *args[:3])
        if function is F.rms_norm:
            return _Keep.apply(self.count, _normed, args[0])
        return function(*args, **(kwargs or {}))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        batch, heads, sequence, size = q.shape
        out = torch.empty(batch, sequence, heads, size, dtype=q.dtype, device="meta").transpose(1, 2)
        sums = torch.empty(batch, heads, sequence, dtype=torch.float32, device="meta")
        self.count.point(out, sums)
        return out, (q, k, v, out, sums)


def _normed(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    return torch.empty_like(x), (x, torch.empty(x.shape[:-1], dtype=torch.float32, device="meta"))


def saved_by(
    model: nn.Module, blocks: Sequence[str], rows: Sequence[LayerPlan | OtherPlan], tp: int, batch: tuple[int, int],
    weight_dtype: torch.dtype, forward: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
) -> Saved:  # fmt: skip
    """Return the bytes that a forward of one microbatch saves for backward.

    model          model on the meta device, with the heads, features and vocabulary of one tp rank; the model is modified
    blocks         names of the blocks in `model`
    rows           rows of the plan for modules of `model`
    tp             number of tp ranks
    batch          (number of sequences, tokens per sequence) of the microbatch
    weight_dtype   dtype of the results of embeddings
    forward        function of model and tokens that returns logits"""
    count, shared = _Count(), dict[tuple[str, ...], dict[str, Any]]()
    for row in rows:
        module = model.get_submodule(row.name)
        if isinstance(row, LayerPlan):
            of_set = shared.setdefault(row.siblings or (row.name,), {})
            model.set_submodule(row.name, _Linear(row, tp, count, of_set))
        elif isinstance(module, nn.Embedding):
            model.set_submodule(row.name, _Embedding(row, module.embedding_dim, weight_dtype, tp, count))
    for name in blocks:
        _follow(model.get_submodule(name), name, count)
    # allow_non_fake_inputs: parameters of the model are meta tensors, not fake tensors
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor), _Kernels(count), fake:
        logits = forward(model, torch.zeros(batch, dtype=torch.int64, device="meta"))
    count.saved.logits = logits.untyped_storage().nbytes()
    return count.saved


def _follow(block: nn.Module, name: str, count: _Count) -> None:
    """Install hooks by which `count` attributes tensors that are saved in the forward of `block` to `name`."""

    def enter(module: nn.Module, args: Any) -> None:
        count.block, count.saved.inputs[name] = name, args[0].untyped_storage().nbytes()

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        count.block = REST

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
