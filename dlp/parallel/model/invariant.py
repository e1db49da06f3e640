"""`dlp.convert(..., invariant=True)`: equal bits on every mesh.

    GEMMs, biases     `dlp.parallel.linear.canonical`
    replicated norms  run once for each canonical segment of tokens or heads, so that every kernel gets tensors of equal
                      shapes on every mesh; gradients of the segments are added by the tree (`Segments`)
    microbatches      a microbatch is the unit of sums over tokens. Microbatch g of data-parallel rank d is piece g x D + d of
                      the global batch. FSDP adds D neighbours by the tree; `GradientTree` adds these sums over microbatches

The mesh therefore changes only the number of equal pieces that a rank computes. Layers that cannot be invariant are refused by
name (`check_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd

from dlp.comm.mesh import ParallelDims
from dlp.kernels import canonical
from dlp.kernels.ops import checksums
from dlp.parallel.linear.canonical import RANKS, all_reduce
from dlp.parallel.linear.step import in_backward
from dlp.parallel.model.grads import call_in_backward, local_grad, set_grad
from dlp.parallel.model.plan import Plan
from dlp.parallel.model.rows import HELD, LayerPlan, scope_notes
from dlp.parallel.model.session import Session
from dlp.parallel.style import shard_sizes
from dlp.parallel.weight.fsdp2 import Managed, managed
from dlp.quant.recipe import GEMMS, Recipe

RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8")
_ENGINE = torch.autograd.Variable._execution_engine


# What is refused


def check_mesh(dims: ParallelDims, device_type: str, amax_group: Any) -> None:
    """Raise ValueError for a mesh, device or amax group that has no invariant mode."""
    if device_type not in CHECKS:
        raise ValueError(f"invariant = true: ranks are on CPUs or CUDA; this mesh is on {device_type}: leave it out")
    if dims.cp > 1:
        raise ValueError(
            f"invariant = true: cp = {dims.cp}: attention sums gradients of keys over the ranks of cp, in an order that "
            f"depends on the mesh; use cp = 1"
        )
    for axis, size in reversed(dims.sizes.items()):
        if size not in RANKS:
            raise ValueError(
                f"invariant = true: {axis} = {size}: a sum is a tree of {canonical.SEGMENTS} segments, of which each rank owns "
                f"a subtree; use {', '.join(map(str, RANKS))}"
            )
    if dims.dp_replicate > 2:
        raise ValueError(
            f"invariant = true: dp_replicate = {dims.dp_replicate}: FSDP adds gradients of more than 2 replicas in an order of "
            f"its own; use dp_replicate 1 or 2, and dp_shard for the rest"
        )
    if amax_group != "auto":
        raise ValueError(
            f"invariant = true: amax_group = {amax_group!r} would share scales between microbatches of several ranks; use "
            f'"auto"'
        )


def check_threads() -> None:
    """Raise ValueError for several threads: torch divides gradients of norms and large sums among threads."""
    threads = torch.get_num_threads()
    if threads != 1:
        raise ValueError(
            f"invariant = true: torch runs {threads} threads on each rank, and sums of torch depend on their number; call "
            f"torch.set_num_threads(1), or set OMP_NUM_THREADS=1"
        )


def check_determinism() -> None:
    """Raise ValueError where CUDA functions of torch, such as the backward of attention, add in the order of
    arrival."""
    if not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "invariant = true: functions of torch add in the order of arrival on GPUs, such as the backward of attention; set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8, and call torch.use_deterministic_algorithms(True) before dlp.convert"
        )


# Checks of a process, by device type
CHECKS: dict[str, Callable[[], None]] = {"cpu": check_threads, "cuda": check_determinism}


def check_plan(plan: Plan, model: nn.Module, batch: tuple[int, int] | None) -> Plan:
    """Return the plan of an invariant model: ranks agree on an amax wherever tp shards a dimension that the scale
    spans, and GEMMs run with strategy "serial". Raises ValueError for a layer that cannot be invariant."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("dlp.ops"):
            raise ValueError(
                f"invariant = true: {name or 'the model'} is a {type(module).__name__} of dlp.ops, whose fusions add in an "
                f"order of their own; use plain modules ([model] fused = false)"
            )
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ValueError(
                f"invariant = true: {name} draws masks of p = {module.p} in an order that depends on the mesh; set p = 0"
            )
    layers = tuple(_checked(row, plan.tp, batch) for row in plan.layers)
    kinds = {name: module for name, module in model.named_modules()}
    for other in plan.others:
        if other.partial and (other.style != "replicated" or not holds_vectors(kinds[other.name])):
            raise ValueError(
                f"invariant = true: {other.name} ({other.kind}) computes on a part of the tokens or heads of one rank, "
                f"which is invariant only for modules whose parameters are vectors, such as norms; convert it, or take it out "
                f"of the sequence-parallel groups"
            )
    return replace(plan, layers=layers, times=None, invariant=True)


def holds_vectors(module: nn.Module) -> bool:
    """Whether a module may run in segments: it has no modules inside, and its parameters are vectors."""
    return not any(True for _ in module.children()) and all(
        p is None or p.dim() == 1 for p in module._parameters.values()
    )


def _checked(row: LayerPlan, tp: int, batch: tuple[int, int] | None) -> LayerPlan:
    asked, style = row.recipe, row.row
    recipe = replace(asked, amax_scope="all")
    why = _refused(row, asked)
    if why is None:
        local = shard_sizes(style, *row.shape, tp, row.name)
        tokens = None if batch is None else batch[0] * batch[1] // (tp if style.cut_x == 0 else 1)
        why = next(scope_notes(recipe, style, local, tokens), None) if tp > 1 else None
        cut, unit = ("in_features", recipe.units[2]) if style.shard_dim == 1 else ("out_features", recipe.units[1])
        if why is None and tp > 1 and style.shard_dim is not None and local[style.shard_dim] % unit:
            why = f"tp leaves {local[style.shard_dim]} {cut} to a rank, no multiple of {unit}, to which GEMMs of {recipe} pad"
        if why is None and tp > 1 and style.partial_weight_grad and (tokens is None or tokens % recipe.units[0]):
            why = f"its {tokens} tokens on a rank are no multiple of {recipe.units[0]}, to which GEMMs of {recipe} pad"
    if why is not None:
        raise ValueError(f"invariant = true: {row.name}: {why}; or leave invariant out")
    return replace(row, recipe=recipe, overlap="serial", choices=())


def _refused(row: LayerPlan, recipe: Recipe) -> str | None:
    """Reason why a layer cannot be invariant on any mesh; None: the layer can be invariant."""
    if recipe.name not in RECIPES or recipe.y is not None or recipe.dx is not None or recipe.x.clips or recipe.w.clips:
        return f"recipe {recipe}: the recipes are {', '.join(RECIPES)}"
    wires = [gemm for gemm in GEMMS if getattr(recipe, gemm).wire != "hp"]
    if wires:
        return f"{recipe} carries partial sums of {wires[0]} in another format than fp32; leave wire out"
    if HELD in row.notes:
        return "its weight is held as codes only; leave quantized_model_init out"
    if row.made_by_hand:
        return "it was constructed explicitly; let dlp.convert make it from an nn.Linear"
    if row.options.delay_wgrad:
        return "delay_wgrad = true adds weight gradients after backward; leave it out"
    replaced = {choice.gemm for choice in row.choices}  # "auto" chose among strategies, and chooses serial here
    asked = row.overlap if isinstance(row.overlap, dict) else dict.fromkeys(GEMMS, row.overlap)
    if any(strategy not in ("auto", "serial") for gemm, strategy in asked.items() if gemm not in replaced):
        return f"overlap = {row.overlap!r}: partial sums are added by the tree, not in chunks; use serial"
    return None


# Replicated modules


class _Fan(torch.autograd.Function):
    """`count` views of a parameter; their gradients are added by the tree, then over the ranks of `group`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, count: int, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = all_reduce(canonical.tree([grad.float() for grad in grads]), ctx.group)
        return total.to(grads[0].dtype), None, None


class Segments:
    """Segments in which a replicated module runs. dim: the dimension of x that is cut, 0: tokens, -2: heads; group: the ranks
    that share the dimension; None: this rank has the full dimension."""

    def __init__(self, name: str, dim: int, group: ProcessGroup | None) -> None:
        self.name, self.dim, self.group = name, dim, group
        self.checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Segments:
        return self

    def run(
        self, forward: Callable[..., Tensor], parameters: dict[str, Any], held: Mapping[str, Any], inputs: tuple[Any, ...]
    ) -> Tensor:  # fmt: skip
        """The module's result for x, computed segment by segment. `parameters`: the parameters that `forward` reads;
        `held`: this rank's plain tensors of `parameters`. Raises ValueError for a module whose result on segments
        differs."""
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise ValueError(
                f"invariant = true: {self.name} must be called with one tensor; got {len(inputs)} arguments"
            )
        (x,) = inputs
        odd = next((name for name, p in held.items() if p is not None and p.numel() != x.shape[-1]), None)
        if self.dim == -2 and odd is not None:
            raise ValueError(
                f"invariant = true: {self.name} reads features that tp cuts, and {odd} has {held[odd].numel()} elements for "
                f"{x.shape[-1]} features: only norms of heads [..., heads, features] are invariant there; leave "
                f"invariant out, or compute {self.name} on all features"
            )
        matrix = x.reshape(-1, x.shape[-1]) if self.dim == 0 else x
        size, ranks = matrix.shape[self.dim], 1 if self.group is None else self.group.size()
        count = canonical.segments_on_rank(size, ranks)
        fans = {name: _Fan.apply(p, count, self.group) for name, p in held.items() if p is not None}
        ys = []
        for i, part in enumerate(matrix.chunk(count, self.dim)):
            parameters.update({name: fan[i] for name, fan in fans.items()})
            ys.append(forward(part.contiguous()))
        y = torch.cat(ys, self.dim)
        if not self.checked:
            self._check(forward, matrix, y)
        return y.view(x.shape)

    @torch.no_grad()
    def _check(self, forward: Callable[..., Tensor], matrix: Tensor, y: Tensor) -> None:
        """Raise ValueError for a module whose result on segments differs from the result on all tokens."""
        whole = forward(matrix)
        if whole.shape != y.shape or not torch.allclose(whole.float(), y.float(), rtol=0.02, atol=1e-3, equal_nan=True):
            raise ValueError(
                f"invariant = true: {self.name} does not compute each token by itself, so that it cannot run on segments of "
                f"tokens; leave its parameters out (convert = false)"
            )
        self.checked = True


# Microbatches


class InvariantSession(Session):
    """A session in which the random bits of a microbatch depend on its position in the global batch.

    The counter is the number of the microbatch in the global batch, from 1; data-parallel ranks run neighbouring
    microbatches."""

    def __init__(self, *, dp: tuple[int, int] = (0, 1), **state: Any) -> None:
        super().__init__(**state)  # rows of a microbatch are numbered as on one rank
        self.place = dp

    def count_microbatch(self) -> None:
        self._close_round()
        self.counter.add_(self.place[0] + 1)

    def end_step(self) -> None:
        super().end_step()
        if self.draws:
            self._close_round()

    def _close_round(self) -> None:
        """Count the microbatches that other ranks ran together with the last microbatch of this rank."""
        self.counter.add_(-self.counter % self.place[1])


class GradientTree:
    """Add gradients of the microbatches of a step by a binary tree.

    A backward leaves the gradient of one microbatch; `parameter.grad` is the sum so far:

        microbatch   0     1      2          3                      stack   sums of 1, 2, 4, ... microbatches, as the digits of
        grad         g0  g0+g1  (g0+g1)+g2  (g0+g1)+(g2+g3)                 a binary number
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.model, self._check_process = model, CHECKS[device_type]
        self._task: int | None = None
        # By index in `_stored`: (number of microbatches, their sum)
        self._stacks: dict[int, list[tuple[int, Tensor | None]]] = {}
        self._given: dict[int, Tensor] = {}
        self._checksums: dict[int, int] = {}
        self._stored: list[nn.Parameter] = []
        self._records: list[Managed] = []
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._watch)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientTree:
        raise ValueError("an invariant model cannot be copied: copy it before dlp.convert")

    def check_announced(self) -> None:
        """Check that the running backward began at an output of the model, else raise RuntimeError; called when a layer
        computes gradients."""
        if self._task is None:
            raise RuntimeError(
                "invariant = true: gradients of microbatches are added in a fixed order, so the loss must come from calling "
                "the converted model itself; call model(...), and compute the loss from tensors that the call returns"
            )

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._task = None
        self._check_process()
        if not self._stored:
            _check_units(model)
            self._records = [record for _, _, record in managed(model)]
            sharded = {(id(owner), name): record.stored for owner, name, record in managed(model)}
            named = [
                sharded.get((id(module), name), parameter)
                for module in model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
            self._stored = [p for p in {id(p): p for p in named}.values() if p.requires_grad]
        if self._given and all(self._stored[i].grad is None for i in self._given):  # zero_grad
            self._stacks, self._given = {}, {}

    def _watch(self, model: nn.Module, args: Any, output: Any) -> None:
        call_in_backward(output, self._begin)

    def _begin(self, grad: Tensor) -> None:
        """Take the sums back from the parameters, once per backward, when the backward reaches an output of the model."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        if not all(record.reduces for record in self._records):
            raise RuntimeError(
                "invariant = true: FSDP must reduce the gradients of each microbatch, since sums of microbatches are not added "
                "in the order of backward: leave set_requires_gradient_sync(False) out"
            )
        for i, parameter in enumerate(self._stored):
            given, grad_now = self._given.get(i), local_grad(parameter)
            if grad_now is not given or (given is not None and _checksum(given) != self._checksums[i]):
                raise RuntimeError(
                    "invariant = true: gradients were set or changed between two backwards: call "
                    "zero_grad(set_to_none=True) for all parameters, or for none"
                )
            parameter.grad = None
        _ENGINE.queue_callback(self._after_fsdp)

    def _after_fsdp(self) -> None:
        """Queue the sum behind FSDP's final callback, which is queued by now, so that sharded gradients exist."""
        _ENGINE.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        self._task, self._given = None, {}
        for i, parameter in enumerate(self._stored):
            stack = self._stacks.setdefault(i, [])
            count, total = 1, local_grad(parameter)
            while stack and stack[-1][0] == count:
                total, count = _sum(stack.pop()[1], total), 2 * count
            stack.append((count, total))
            for _, left in stack[-2::-1]:
                total = _sum(left, total)
            parameter.grad = None
            if total is not None:
                set_grad(parameter, total)
                self._given[i], self._checksums[i] = total, _checksum(total)


def _check_units(model: nn.Module) -> None:
    """Raise ValueError for units of torch's `fully_shard`, which averages gradients in another order."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and "dlp_gathering" not in vars(module):
            raise ValueError(
                f"invariant = true: {name or 'the model'} was sharded by torch's fully_shard, which adds gradients in an order "
                f"of its own; use dlp.fully_shard"
            )


def _checksum(grad: Tensor) -> int:
    """Checksum of a gradient; version counters do not see changes of DTensors."""
    return int(checksums(grad))


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right; None is a gradient that was not computed."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
