"""Bytes that the forward of a model saves for backward, by block, and the size of the logits.

The model runs on meta tensors with a rank's share of heads, features and tokens. An opaque operation of a real run is replaced
by a stand-in that saves the same tensors: a linear saves the tensors of its `LinearPlan`, attention its inputs, output and
log-sum-exp, a norm its input and rstd. The count covers all tensors that autograd saves, each storage once. torch.compile saves
the inputs and outputs of opaque operations of a block, and recomputes the pointwise operations.
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

REST = ""  # tensors that are saved outside of blocks


@dataclass
class Saved:
    """Bytes by name of the block that saves them, REST outside of blocks; also the bytes with torch.compile, and the bytes of
    the outputs of linears and attention only.

    inputs     bytes of each block's input
    logits     bytes of the model's output
    """

    eager: dict[str, int] = field(default_factory=dict)
    compiled: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    logits: int = 0


class _Count:
    """Storages seen so far, with the block and the operation that saved them."""

    def __init__(self) -> None:
        self.block, self.saved = REST, Saved()
        self._seen: dict[str, set[int]] = {"eager": set(), "compiled": set(), "points": set()}
        self._opaque: set[int] = set()
        self._alive: list[Any] = []

    def opaque(self, *tensors: Tensor) -> None:
        """Count tensors that an opaque operation saves for backward or returns."""
        self._opaque.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def point(self, *tensors: Tensor) -> None:
        """Count tensors that are created at a boundary of selective recomputation."""
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
            self._alive.append(storage)  # keeps the storage alive, because freed memory could be counted twice
            found = getattr(self.saved, kind)
            found[self.block] = found.get(self.block, 0) + storage.nbytes()


class _Keep(torch.autograd.Function):
    """`apply(count, make, *inputs)` returns the first result of `make(*inputs)` and saves the second."""

    @staticmethod
    def forward(
        ctx: Any, count: _Count, make: Callable[..., tuple[Tensor, Sequence[Tensor]]], *inputs: Tensor
    ) -> Tensor:
        y, kept = make(*inputs)
        ctx.save_for_backward(*kept)
        count.opaque(y, *kept)
        return y


class _Linear(nn.Module):
    """Stand-in for a linear that conversion would make. `shared`: tensors that siblings save of the common x."""

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
    """Stand-in for an embedding, vocab-parallel or not; of tokens, or of positions with further arguments."""

    def __init__(self, row: OtherPlan, hidden: int, dtype: torch.dtype, tp: int, count: _Count) -> None:
        super().__init__()
        self.row, self.hidden, self.dtype, self.tp, self.count = row, hidden, dtype, tp, count

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        cut = self.row.style == "vocab" and self.row.sequence_parallel
        shape = (tokens.numel() // self.tp, self.hidden) if cut else (*tokens.shape, self.hidden)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)


class _Kernels(TorchFunctionMode):
    """Count attention and norms as GPU kernels save them."""

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
    """Saved bytes of one microbatch of `batch` = (B, S) tokens.

    model          on the meta device, with the heads, features and vocabulary rows of one tp rank; the model is
                   modified
    blocks         names of modules
    rows           rows of a plan, by the model's names
    weight_dtype   dtype of the embedding
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
    # Models of transformers read meta tensors that are not fake tensors
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor), _Kernels(count), fake:
        logits = forward(model, torch.zeros(batch, dtype=torch.int64, device="meta"))
    count.saved.logits = logits.untyped_storage().nbytes()
    return count.saved


def _follow(block: nn.Module, name: str, count: _Count) -> None:
    """Count tensors saved inside of this module for the block."""

    def enter(module: nn.Module, args: Any) -> None:
        count.block, count.saved.inputs[name] = name, args[0].untyped_storage().nbytes()

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        count.block = REST

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
