"""`dlp.convert(..., invariant=True)`: equal bits on every mesh.

Each sum is divided into canonical segments, which are the same on every mesh. The sums of the segments are added by a binary
tree (`dlp.kernels.canonical`), called "the tree" in this file. A mesh changes only which rank computes a segment.

    GEMMs, biases     see `dlp.parallel.linear.canonical`
    replicated norms  run once for each canonical segment of tokens or heads, so that every kernel gets tensors of equal
                      shapes on every mesh; the tree adds the gradients of the segments (`Segments`)
    microbatches      D data-parallel ranks divide the global batch into microbatches: microbatch g of rank d has index
                      g x D + d. For each g, FSDP adds the gradients of the D ranks by the tree; `GradientTree` adds the
                      sums of successive g

`check_plan` raises ValueError for a module that cannot be invariant.
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


# Checks before conversion


def check_mesh(dims: ParallelDims, device_type: str, amax_group: Any) -> None:
    """Raise ValueError for a mesh, device or amax group that has no invariant mode."""
    if device_type not in CHECKS:
        raise ValueError(f"invariant = true supports CPUs and CUDA; this mesh is on {device_type}: leave invariant out")
    if dims.cp > 1:
        raise ValueError(
            f"invariant = true: cp = {dims.cp}: attention sums gradients of keys over the ranks of cp, in an order that "
            f"depends on the mesh; use cp = 1"
        )
    for axis, size in reversed(dims.sizes.items()):
        if size not in RANKS:
            raise ValueError(
                f"invariant = true: {axis} = {size}: each sum is a binary tree over {canonical.SEGMENTS} segments, and each "
                f"rank computes one subtree; use {', '.join(map(str, RANKS))}"
            )
    if dims.dp_replicate > 2:
        raise ValueError(
            f"invariant = true: dp_replicate = {dims.dp_replicate}: FSDP adds gradients of more than 2 replicas in an order "
            f"that is not fixed; use dp_replicate 1 or 2, and dp_shard for the rest"
        )
    if amax_group != "auto":
        raise ValueError(
            f"invariant = true: amax_group = {amax_group!r} would share scales between microbatches of several ranks; use "
            f'"auto"'
        )


def check_threads() -> None:
    """Raise ValueError if torch uses several threads, because torch then divides large sums and gradients of norms among
    them."""
    threads = torch.get_num_threads()
    if threads != 1:
        raise ValueError(
            f"invariant = true: torch runs {threads} threads on each rank, and sums of torch depend on their number; call "
            f"torch.set_num_threads(1), or set OMP_NUM_THREADS=1"
        )


def check_determinism() -> None:
    """Raise ValueError unless torch uses deterministic algorithms. Otherwise CUDA functions, such as the backward of attention,
    add in the order of arrival."""
    if not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "invariant = true: functions of torch add in the order of arrival on GPUs, such as the backward of attention; set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8, and call torch.use_deterministic_algorithms(True) before dlp.convert"
        )


# Checks of the settings of a process, by device type
CHECKS: dict[str, Callable[[], None]] = {"cpu": check_threads, "cuda": check_determinism}


def check_plan(plan: Plan, model: nn.Module, batch: tuple[int, int] | None) -> Plan:
    """Return the plan with the settings of an invariant model: amax_scope "all", so that ranks agree on each amax whose scale
    covers values of several ranks, and strategy "serial". Raises ValueError for a module that cannot be invariant."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("dlp.ops"):
            raise ValueError(
                f"invariant = true: {name or 'the model'} is a {type(module).__name__} of dlp.ops, whose fusions add in "
                f"another order; use plain modules ([model] fused = false)"
            )
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ValueError(
                f"invariant = true: {name} draws masks of p = {module.p} in an order that depends on the mesh; set p = 0"
            )
    layers = tuple(_checked(row, plan.tp, batch) for row in plan.layers)
    kinds = dict(model.named_modules())
    for other in plan.others:
        if other.partial and (other.style != "replicated" or not holds_vectors(kinds[other.name])):
            raise ValueError(
                f"invariant = true: {other.name} ({other.kind}) reads only the tokens or heads of one rank, "
                f"which is invariant only for modules whose parameters are vectors, such as norms; convert it, or take it out "
                f"of the sequence-parallel groups"
            )
    return replace(plan, layers=layers, times=None, invariant=True)


def holds_vectors(module: nn.Module) -> bool:
    """Whether a module may run in segments: the module has no children, and its parameters are vectors."""
    return not any(True for _ in module.children()) and all(
        p is None or p.dim() == 1 for p in module._parameters.values()
    )


def _checked(row: LayerPlan, tp: int, batch: tuple[int, int] | None) -> LayerPlan:
    """Return the row of an invariant linear. Raises ValueError for a linear that cannot be invariant on this mesh."""
    asked, style = row.recipe, row.row
    recipe = replace(asked, amax_scope="all")
    why = _refused(row, asked)
    if why is None:
        local = shard_sizes(style, *row.shape, tp, row.name)
        tokens = None if batch is None else batch[0] * batch[1] // (tp if style.cut_x == 0 else 1)
        why = next(scope_notes(recipe, style, local, tokens), None) if tp > 1 else None
        cut, unit = ("in_features", recipe.units[2]) if style.shard_dim == 1 else ("out_features", recipe.units[1])
        if why is None and tp > 1 and style.shard_dim is not None and local[style.shard_dim] % unit:
            why = f"the {local[style.shard_dim]} {cut} of a tp rank are not a multiple of {unit}, to which {recipe} pads GEMMs"
        if why is None and tp > 1 and style.partial_weight_grad and (tokens is None or tokens % recipe.units[0]):
            why = f"the {tokens} tokens of a rank are not a multiple of {recipe.units[0]}, to which {recipe} pads GEMMs"
    if why is not None:
        raise ValueError(f"invariant = true: {row.name}: {why}; or leave invariant out")
    return replace(row, recipe=recipe, overlap="serial", choices=())


def _refused(row: LayerPlan, recipe: Recipe) -> str | None:
    """Return the reason why a layer is invariant on no mesh; None: there is no such reason."""
    if recipe.name not in RECIPES or recipe.y is not None or recipe.dx is not None or recipe.x.clips or recipe.w.clips:
        return f"recipe {recipe} is not invariant; use {', '.join(RECIPES)}, without rounded results and clipping"
    wires = [gemm for gemm in GEMMS if getattr(recipe, gemm).wire != "hp"]
    if wires:
        return f"{recipe} sends partial sums of {wires[0]} in another format than fp32; leave wire out"
    if HELD in row.notes:
        return "the weight is quantized-only; leave quantized_model_init out"
    if row.made_by_hand:
        return "the layer was constructed explicitly; let dlp.convert create it from an nn.Linear"
    if row.options.delay_wgrad:
        return "delay_wgrad = true adds weight gradients after backward; leave delay_wgrad out"
    replaced = {choice.gemm for choice in row.choices}  # "auto" chose these strategies, so serial may replace them
    asked = row.overlap if isinstance(row.overlap, dict) else dict.fromkeys(GEMMS, row.overlap)
    if any(strategy not in ("auto", "serial") for gemm, strategy in asked.items() if gemm not in replaced):
        return f"overlap = {row.overlap!r}: partial sums are added in a fixed order, not by chunks; use serial"
    return None


# Replicated modules


class _Fan(torch.autograd.Function):
    """Return `count` views of a parameter. Backward adds the gradients of the views by the tree, and the result over the ranks
    of `group`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, count: int, group: ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = all_reduce(canonical.tree([grad.float() for grad in grads]), ctx.group)
        return total.to(grads[0].dtype), None, None


class Segments:
    """Division of the input of a replicated module into canonical segments.

    name   name of the module, for messages
    dim    dimension of x that is divided: 0 (tokens) or -2 (heads)
    group  the ranks over which this dimension is sharded; None: this rank has the full dimension
    """

    def __init__(self, name: str, dim: int, group: ProcessGroup | None) -> None:
        self.name, self.dim, self.group = name, dim, group
        self.checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Segments:
        return self

    def run(
        self, forward: Callable[..., Tensor], parameters: dict[str, Any], held: Mapping[str, Any], inputs: tuple[Any, ...]
    ) -> Tensor:  # fmt: skip
        """Run `forward` on each segment of x, the only element of `inputs`, and return the concatenated results.

        parameters  dict from which `forward` reads parameters; filled anew for each segment
        held        this rank's local tensors of these parameters

        Raises ValueError unless `inputs` is one tensor, for parameters that do not have one value per feature if heads are
        divided, and in the first call if `_check` fails."""
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise ValueError(
                f"invariant = true: {self.name} must be called with one tensor; got {len(inputs)} arguments"
            )
        (x,) = inputs
        odd = next((name for name, p in held.items() if p is not None and p.numel() != x.shape[-1]), None)
        if self.dim == -2 and odd is not None:
            raise ValueError(
                f"invariant = true: {self.name} reads features that tp shards, and {odd} has {held[odd].numel()} elements for "
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
        """Raise ValueError for a module whose result `y` on segments differs by more than a tolerance from the result on all
        tokens."""
        whole = forward(matrix)
        if whole.shape != y.shape or not torch.allclose(whole.float(), y.float(), rtol=0.02, atol=1e-3, equal_nan=True):
            raise ValueError(
                f"invariant = true: {self.name} does not compute tokens independently, so it cannot run on segments of "
                f"tokens; leave the module out (convert = false)"
            )
        self.checked = True


# Microbatches


class InvariantSession(Session):
    """Session in which the random bits of a microbatch depend on the index of the microbatch in the global batch.

    The counter of stochastic rounding is this index plus 1. At any time, the data-parallel ranks run consecutive microbatches.
    `dp`: index of this data-parallel rank, and number of data-parallel ranks."""

    def __init__(self, *, dp: tuple[int, int] = (0, 1), **state: Any) -> None:
        super().__init__(**state)  # without dp: rows of a microbatch are numbered as on one rank
        self.place = dp

    def count_microbatch(self) -> None:
        self._close_round()
        self.counter.add_(self.place[0] + 1)

    def end_step(self) -> None:
        super().end_step()
        if self.draws:
            self.keep_draw()
            self._close_round()

    def _close_round(self) -> None:
        """Count the microbatches that other ranks ran together with the last microbatch of this rank."""
        self.counter.add_(-self.counter % self.place[1])


class GradientTree:
    """Add gradients of the microbatches of a step by a binary tree.

    Each backward computes the gradient g of one microbatch. After the backward, `parameter.grad` is the sum so far:

        microbatch   0     1      2           3
        grad         g0    g0+g1  (g0+g1)+g2  (g0+g1)+(g2+g3)

    A stack holds sums of 1, 2, 4, ... microbatches, like the digits of a binary number.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.model, self._check_process = model, CHECKS[device_type]
        self._task: int | None = None  # id of the running backward
        # Index in `_stored` -> stack of (number of microbatches, sum of their gradients)
        self._stacks: dict[int, list[tuple[int, Tensor | None]]] = {}
        self._given: dict[int, Tensor] = {}  # index in `_stored` -> gradient that the last backward left in `grad`
        self._checksums: dict[int, int] = {}  # index in `_stored` -> checksum of this gradient
        self._stored: list[nn.Parameter] = []  # parameters that optimizers hold
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
        if self._given and all(self._stored[i].grad is None for i in self._given):  # after zero_grad
            self._stacks, self._given = {}, {}

    def _watch(self, model: nn.Module, args: Any, output: Any) -> None:
        call_in_backward(output, self._begin)

    def _begin(self, grad: Tensor) -> None:
        """Check that FSDP reduces gradients in this backward, and that `grad` of each parameter still holds the sums of the
        last backward; then clear `grad` and queue `_end`. Runs once per backward, when the backward reaches an output of the
        model."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        if not all(record.reduces for record in self._records):
            raise RuntimeError(
                "invariant = true: FSDP must reduce the gradients of each microbatch, before gradients of microbatches "
                "are added: leave set_requires_gradient_sync(False) out"
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
        """Queue `_end` behind FSDP's final callback, which is already queued and writes the sharded gradients."""
        _ENGINE.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        """Add the gradients of this backward to the stacks, and write the sums so far into `grad`."""
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
                f"invariant = true: {name or 'the model'} was sharded by torch's fully_shard, which adds gradients in another "
                f"order; use dlp.fully_shard"
            )


def _checksum(grad: Tensor) -> int:
    """Return a checksum that detects changes of a gradient. A version counter does not suffice: for a DTensor it does not count
    all changes."""
    return int(checksums(grad))


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return left + right, where None stands for a gradient that was not computed."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
