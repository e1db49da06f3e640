"""`Weight`: storage of w, its operands for a layer, and the destination of its gradient; and the weights of one layer.

    rowwise     w [N, K]      operand of fprop
    columnwise  w.T [K, N]    operand of dgrad

    LocalWeight     (local.py)    this rank holds the complete parameter, which is cast at the step boundary, into operands
                                  that forward and backward only read; without a step boundary, in each pass
    ManagedWeight   (fsdp2.py)    like LocalWeight, if FSDP manages the parameter on one rank and a layer may see a copy
    HeldWeight      (held.py)     only codes and scales exist, no high-precision parameter
    ShardedWeight   (sharded.py)  FSDP shards the rows. Each rank casts its rows at the step boundary; passes gather the
                    operands

The step boundary casts all weights of a model together (`refresh`): their values are rounded to the dtype of activations
(`Values`), then observed, agreed on and cast in one `CastBatch`.

**Main gradients** (`MainGrad`): the wgrad GEMM accumulates dw into an existing gradient with beta = 1, instead of
autograd.

    off         autograd gets dw [N, K] of each backward and adds it to the parameter's `grad`
    grad        the first dw becomes the parameter's `grad`, by autograd; to a `grad` in fp32 further ones are added by the GEMM
    main_grad   dw is added to the parameter's `main_grad`, fp32 or bf16, which the user allocates, as in Megatron-LM; if
                `overwrite_main_grad` is true, dw replaces `main_grad`. `grad_added_to_main_grad` is then set to True, and
                autograd gets zeros where `zero_out_wgrad` is true, for hooks that wait for a gradient

In fp32 the result is bitwise equal to autograd's sum, except for nvfp4 on a GPU, which scales the sum of products and adds it
with one rounding, where autograd rounds twice. `torch.autograd.grad`, which leaves no gradients in parameters, always gets
gradients from autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dlp.comm.transport import agree
from dlp.parallel.casts import Cast, CastBatch
from dlp.parallel.linear.spec import LinearSpec, check_blocks
from dlp.parallel.linear.state import BoundSpec, LayerState, StepState
from dlp.quant.quantizer import Wanted
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import QuantizedTensor

_NUMBERS = itertools.count(1)
MAIN_GRADS = ("off", "grad", "main_grad")


class Member(NamedTuple):
    """One weight of a layer: the module that owns it, and the names of its weight and bias there."""

    module: nn.Module
    weight: str
    bias: str


class Use(NamedTuple):
    """A forward or backward that reads a weight.

    value [N, K]: current parameter on this rank; dtype: of x; record: gradients are enabled, so amaxes count for
    delayed scales."""

    bound: BoundSpec
    value: Tensor
    dtype: torch.dtype
    record: bool


class Weight(Protocol):
    """One w [N, K] of a layer.

    owner         weights of the layer
    name          name of the member, under which scales are kept
    stored        parameter that optimizers step on; None if a parametrization replaced it
    parts         parts of the cast operands; the first `num_rowwise` belong to the rowwise operand. Empty: each pass
                  casts the weight
    managed       FSDP manages the weight, and the layer may see a copy of `stored`
    gathered      FSDP's hooks make the operands before a pass
    held          only codes exist, and the parameter is a placeholder
    fresh         the current operands, if any, were cast at a step boundary
    why, noted    reason why operands are not gathered as the recipe requires, None if they are; and the last logged
                  reason
    """

    owner: LayerWeights
    parts: list[Tensor]
    num_rowwise: int
    managed: bool
    gathered: bool
    held: bool
    fresh: bool
    why: str | None
    noted: str | None

    @property
    def bound(self) -> BoundSpec:
        """Spec of the layer."""

    @property
    def name(self) -> str: ...

    @property
    def stored(self) -> Tensor | None: ...

    def rowwise(self, use: Use) -> QuantizedTensor:
        """w [N, K], operand of fprop."""

    def columnwise(self, use: Use) -> QuantizedTensor:
        """w.T [K, N], operand of dgrad."""

    def casts(self, values: Values) -> list[Cast]:
        """Casts that the step boundary runs for this weight; empty: none."""

    def take(self, operands: Sequence[Wanted]) -> None:
        """Take the operands that the casts made."""

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Amaxes that delayed scaling recorded in the casts, on which a group must agree now; None if `ScalingState`
        agrees on them."""

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe that the layer cannot run under."""

    def serves(self, spec: LinearSpec) -> bool:
        """Whether `parts` are also the operands under a spec other than the layer's own. Raises ValueError as in
        `check`."""

    def drop(self, *, retyped: bool = False) -> None:
        """Forget operands, since the recipe or, without a step, the values changed; `retyped`: the dtype of x changed."""

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        """Context in which the parameter holds its values; `written`: they may be overwritten."""

    def check_in_place(self, parameter: Any) -> None:
        """Raise ValueError for a parameter of the module that the layer would not compute with."""


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward accumulates into the `grad` of a parameter. Raises RuntimeError if
    `torch.autograd.grad` returns the gradient.

    The AccumulateGrad node is looked up in each backward and never kept: a node that lives on stays on the stream of its
    creation, and steps on another stream would accumulate there, unordered with code that reads or frees gradients."""
    found: bool = torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    return found


class Target(NamedTuple):
    """The tensor [N, K] into which wgrad accumulates dw, or, with `overwrite`, writes dw."""

    tensor: Tensor
    overwrite: bool = False


class MainGrad:
    """Destination of the wgrads of one parameter of layer `name`, in mode "grad" or "main_grad"."""

    def __init__(self, parameter: nn.Parameter, mode: str, name: str) -> None:
        self.parameter, self.mode, self.name = parameter, mode, name

    def target(self, value: Tensor) -> Target | None:
        """Destination of wgrad in the running backward; None: autograd gets dw.

        `value`: the weight that forward read. If the memory is not the parameter's, the weight was computed from the
        parameter, and autograd continues from dw."""
        if value.data_ptr() != _local(self.parameter).data_ptr() or not self._accumulates():
            return None
        return self.buffer()

    def _accumulates(self) -> bool:
        """Whether the running backward accumulates into the parameter's `grad`."""
        try:
            return accumulates(self.parameter)
        except RuntimeError:  # raised by torch.autograd.grad, which returns the gradient
            return False

    def buffer(self) -> Target | None:
        """The gradient into which dw can be accumulated; None: there is none. Raises ValueError for an unsuitable
        `main_grad`."""
        parameter = self.parameter
        if self.mode == "grad":
            if parameter._backward_hooks:  # hooks read the gradient that autograd passes on
                return None
            grad = None if parameter.grad is None else _local(parameter.grad)
            fits = grad is not None and grad.dtype == torch.float32 and grad.is_contiguous()
            return Target(grad) if fits and grad is not None else None
        buffer: Tensor | None = getattr(parameter, "main_grad", None)
        if buffer is None:
            return None
        main, shape = _local(buffer), _local(parameter).shape
        if main.shape != shape or main.dtype not in (torch.float32, torch.bfloat16) or not main.is_contiguous():
            raise ValueError(
                f"{self.name}: main_grad must be contiguous, fp32 or bf16, and {list(shape)} on this rank; got "
                f"{str(main.dtype).removeprefix('torch.')} {list(main.shape)}"
            )
        return Target(main, bool(getattr(parameter, "overwrite_main_grad", False)))

    def written(self) -> Tensor | None:
        """The gradient for autograd after wgrad wrote dw."""
        if self.mode == "grad":
            return None
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(_local(self.parameter)) if zeros else None


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class MemberWeight:
    """Base of weights: access to the layer, of which the weight is member `index`."""

    managed = gathered = fresh = held = False

    def __init__(self, owner: LayerWeights, index: int) -> None:
        self.owner, self.index = owner, index
        self.parts: list[Tensor] = []
        self.num_rowwise = 0
        self.why: str | None = None
        self.noted: str | None = None

    @property
    def bound(self) -> BoundSpec:
        return self.owner.layer.bound

    @property
    def name(self) -> str:
        return self.bound.spec.members[self.index]

    @property
    def stored(self) -> Tensor | None:
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        """Check the blocks only: any recipe can cast values, and weights are gathered in high precision if codes cannot
        be gathered."""
        spec, stored = self.bound.spec, self.stored
        if stored is not None:
            check_blocks(spec.name, recipe, spec.style, stored.shape, spec.tp)

    def serves(self, spec: LinearSpec) -> bool:
        return False

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def check_in_place(self, parameter: Any) -> None:
        """Check nothing: layers compute with any parameter of their module."""


class WeightParts:
    """Parts of the operands from the step boundary, for all weights of a layer, as flat lists.

    number               unique among all WeightParts
    parts                for each weight, parts of the rowwise operand, then parts of the columnwise operand
    rowwise, columnwise  parts of one orientation
    operands             rowwise operands of all weights, then columnwise operands; none of a frozen layer
    calls                `BoundCall`s whose captured launches hold the addresses of these parts
    """

    def __init__(self, layer: BoundSpec | LayerState, parts: Sequence[Tensor], sizes: tuple[int, int]) -> None:
        self.number = next(_NUMBERS)
        self._layer, self.parts, self._sizes, both = layer, parts, sizes, sum(sizes)
        self.rowwise = [part for i, part in enumerate(parts) if i % both < sizes[0]]
        self._columnwise = [part for i, part in enumerate(parts) if i % both >= sizes[0]]
        self.calls: dict[Any, Any] = {}

    @cached_property
    def operands(self) -> tuple[list[QuantizedTensor], list[QuantizedTensor]]:
        spec = self._layer.spec  # a layer that is being copied has no spec yet
        columnwise = spec.weight_operands(self._columnwise, columnwise=True) if self._columnwise else []
        return spec.weight_operands(self.rowwise, columnwise=False), columnwise

    @property
    def columnwise(self) -> list[Tensor]:
        """Columnwise parts. Raises RuntimeError for a frozen layer."""
        self._check_not_frozen()
        return self._columnwise

    def _check_not_frozen(self) -> None:
        """Raise RuntimeError for a frozen layer, which has only rowwise operands."""
        if not self._sizes[1]:
            raise RuntimeError(
                "backward reached a frozen layer, which has no columnwise codes for dgrad: call the forward under "
                "torch.no_grad(), or leave the layer out of dlp.freeze"
            )

    def both_of(self, used: Sequence[int]) -> list[Tensor]:
        """Parts of some of the weights, in both orientations."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def columnwise_operands(self, used: Sequence[int]) -> list[QuantizedTensor]:
        """Columnwise operands of some of the weights. Raises RuntimeError for a frozen layer."""
        operands = self.operands[1]
        if len(used) == len(operands):
            return operands
        self._check_not_frozen()
        return [operands[i] for i in used]


class LayerWeights:
    """The weights of one layer, in the order of members.

    caches       weights without FSDP sharding are cast at the step boundary, else in each pass
    dtype        dtype of x in the last run: values are rounded to it before casts
    parts        cast operands of all weights; None if at least one weight has none
    held         at least one weight is quantized-only
    main_grads   destination of each member's wgrads, None: autograd; empty: autograd for all members
    """

    def __init__(self, layer: LayerState) -> None:
        self.layer, self.caches = layer, False
        self.main_grads: list[MainGrad | None] = []
        self.dtype: torch.dtype | None = None
        self.parts: WeightParts | None = None
        self.members: list[Weight] = []
        self.held = self._gathered = False

    def __getstate__(self) -> dict[str, Any]:
        """State of a copied layer, which casts its weights in each pass until it is attached to its own optimizer."""
        return vars(self) | {"caches": False, "dtype": None, "parts": None, "main_grads": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.collect()

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.members)

    def set(self, members: Sequence[Weight]) -> None:
        """Replace the members, whose storage has changed."""
        self.members = list(members)
        self._gathered = any(weight.gathered for weight in members)
        self.held = any(weight.held for weight in members)
        self.collect()

    def collect(self) -> None:
        """Renew `parts` after a member's operands may have changed."""
        parts = [part for weight in self.members for part in weight.parts]
        if self.parts is None or list(map(id, parts)) != list(map(id, self.parts.parts)):
            complete, rowwise = all(weight.parts for weight in self.members), self.members[0].num_rowwise
            sizes = rowwise, len(parts) // len(self.members) - rowwise
            self.parts = WeightParts(self.layer, parts, sizes) if complete else None

    def operands_for(self, bound: BoundSpec, dtype: torch.dtype) -> WeightParts | None:
        """Operands from the step boundary, if they fit a pass under this spec with x of `dtype`; None: use `read`."""
        if bound is not self.layer.bound:
            return self.parts if all([weight.serves(bound.spec) for weight in self.members]) else None
        if self.dtype != dtype:  # the next step boundary casts for the new dtype
            self.dtype = dtype
            for weight in self.members:
                weight.drop(retyped=True)
            # not via `collect`, whose tensor ids torch.compile would guard on
            if not all(weight.parts for weight in self.members):
                self.parts = None
        return self.parts

    def read(
        self, bound: BoundSpec, used: Sequence[int], values: Sequence[Tensor], dtype: torch.dtype, *, columnwise: bool,
        record: bool,
    ) -> list[QuantizedTensor]:  # fmt: skip
        """Operands of the `used` weights in one orientation, if FSDP gathers operands for the pass; empty if the pass casts
        the weights, with one agreement for all."""
        if not self._gathered:
            return []
        uses = [(self.members[i], Use(bound, value, dtype, record)) for i, value in zip(used, values, strict=True)]
        return [weight.columnwise(use) if columnwise else weight.rowwise(use) for weight, use in uses]

    def targets(self, used: Sequence[int], values: Sequence[Tensor]) -> list[Target | None]:
        """Destinations of the wgrads of the `used` members in the running backward, None for autograd; empty if all go
        to autograd.

        `values`: the weights that forward read."""
        main_grads = [self.main_grads[i] for i in used]
        targets = [None if main is None else main.target(w) for main, w in zip(main_grads, values, strict=True)]
        return targets if any(targets) else []

    def stored(self) -> list[Tensor]:
        """Parameters that optimizers step on, without parameters that a parametrization replaced."""
        return [stored for weight in self.members if (stored := weight.stored) is not None]

    def in_use(self) -> bool:
        """Whether passes compute with operands from a step boundary."""
        return self.parts is not None or all(weight.gathered and weight.fresh for weight in self.members)

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe that the layer cannot run under."""
        for weight in self.members:
            weight.check(recipe)

    def check_in_place(self, parameters: Sequence[Any]) -> None:
        """Raise ValueError if a module holds a tensor that the layer would not compute with. `parameters`: parameters of the
        modules, in the order of members."""
        for weight, parameter in zip(self.members, parameters, strict=False):
            weight.check_in_place(parameter)

    def drop(self) -> None:
        """Forget all operands, see `Weight.drop`."""
        for weight in self.members:
            weight.drop()
        self.collect()
        note_reasons(self.members)

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Context in which parameters hold their values; `written`: they may be overwritten."""
        with ExitStack() as stack:
            for weight in self.members:
                stack.enter_context(weight.shown(written=written))
            yield


def weights_in(model: nn.Module) -> Iterator[LayerWeights]:
    """Weights of all layers of a model, each once."""
    found = (getattr(getattr(module, "core", None), "weights", None) for module in model.modules())
    yield from dict.fromkeys(weights for weights in found if isinstance(weights, LayerWeights))


def note_reasons(weights: Sequence[Weight]) -> None:
    """Log, once per reason, why weights are gathered in high precision although their recipe quantizes them."""
    by_reason: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.why not in (None, weight.noted):
            by_reason.setdefault(str(weight.why), []).append(weight)
        weight.noted = weight.why
    for why, its in by_reason.items():
        some = its[0].name if len(its) == 1 else f"{its[0].name} and {len(its) - 1} more"
        its[0].bound.session.note(f"w is gathered in high precision: {why} [{some}]")


class Values:
    """Matrices that casts at the step boundary read: weights, or copies in the dtype and size that casts need.

    The copies are kept from step to step, by name of the weight, since launches hold their addresses. All copies are
    renewed together:
    copies that are only rounded in one multi-tensor call, padded copies in another.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._requested: dict[str, tuple[Tensor, Tensor]] = {}  # since the last `renew`: (copy, weight)

    def of(self, name: str, weight: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """Return the weight [N, K] in `dtype`, zero-padded to `shape`: the weight itself if it fits, else a copy, which the
        next `renew` fills."""
        if weight.dtype == dtype and weight.shape == shape:
            return weight
        copy = self._copies.get(name)
        if copy is None or (copy.dtype, copy.shape, copy.device) != (dtype, shape, weight.device):
            copy = torch.zeros(shape, dtype=dtype, device=weight.device)
        self._requested[name] = copy, weight
        return copy

    def renew(self) -> None:
        """Write the copies that were requested since the last `renew`, and forget all others."""
        pairs = list(self._requested.values())
        for padded in (False, True):
            chosen = [(copy, weight) for copy, weight in pairs if (copy.shape != weight.shape) == padded]
            if chosen:
                torch._foreach_copy_([copy[: len(w), : w.shape[1]] for copy, w in chosen], [w for _, w in chosen])
        self._copies, self._requested = {name: copy for name, (copy, _) in self._requested.items()}, {}


class WeightBatch:
    """State of one model between calls of `refresh`: copies of values, prepared launches."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


@torch.inference_mode(False)  # later boundaries write into the operands that this boundary allocates
@torch.no_grad()
def refresh(session: StepState, weights: Sequence[Weight]) -> None:
    """Cast these weights of a model in one batch. All ranks call it together."""
    session.weight_batch = batch = session.weight_batch or WeightBatch()
    wanted = [(weight, casts) for weight in weights if (casts := weight.casts(batch.values))]
    batch.values.renew()
    operands = iter(batch.casts.make([cast for _, casts in wanted for cast in casts]))
    for weight, casts in wanted:
        weight.take([next(operands) for _ in casts])
    _share([staged for weight, _ in wanted if (staged := weight.staged()) is not None])
    for weight in weights:
        weight.fresh = True
    session.weights_cast(list(dict.fromkeys(weight.owner for weight, _ in wanted)))


def _share(staged: Sequence[tuple[ProcessGroup, list[Tensor]]]) -> None:
    """Agree on staged amaxes, once for each group."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for group, its in staged:
        by_group.setdefault(group, []).extend(its)
    for group, amaxes in by_group.items():
        torch._foreach_copy_(amaxes, agree(amaxes, group))
