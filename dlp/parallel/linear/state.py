"""The layers of a model, with specs and weights.

    StepState      the layers of a model, with the state that their passes share (`dlp.parallel.linear.step`)
    BoundSpec      a spec of one layer, with the StepState and the decisions for calls under the spec
    LayerState     the weights of a layer, the spec of the layer, and the specs of the layer in autocast regions
    LayerWeights   the weights of a layer: a `Weight` for each member, and the operands that the step boundary cast

A `Weight` is one of:

    LocalWeight     (weight/local.py)    FSDP does not manage the parameter. The step boundary casts it, and forward and
                                         backward read the operands; without a step boundary, each pass casts it
    ManagedWeight   (weight/fsdp2.py)    a LocalWeight whose parameter FSDP manages but does not shard, because dp_shard has one
                                         rank; the layer may see a copy of the parameter
    HeldWeight      (weight/held.py)     only codes and scales exist, no high-precision parameter
    ShardedWeight   (weight/sharded.py)  FSDP shards the rows. Each rank casts its rows at the step boundary; passes gather
                                         the operands

The step boundary casts all weights of a model together (`refresh`): the values are rounded to the dtype that casts read
(`Values`); then one `CastBatch` observes the amaxes, lets ranks agree on them, and casts.

The opaque ops take tensors and two identifiers. `spec_id`, an int64 tensor [], identifies the `BoundSpec` that a call runs.
`trace_id`, an integer from `dlp.parallel.linear.spec.trace_of`, identifies all specs with results of equal shapes. For
torch.compile trace_id is a constant and spec_id an input, so that equal transformer blocks share one compiled graph.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.transport import mapped_memory
from dlp.parallel.casts import Cast
from dlp.parallel.linear.plan import LinearPlan, linear_plan, x_tokens_of
from dlp.parallel.linear.spec import LinearSpec, check_blocks, trace_of
from dlp.parallel.linear.step import PassState
from dlp.parallel.weight.base import MainGrad, Member, Target, Values, WeightBatch, WeightParts, share_amaxes
from dlp.quant.quantizer import Wanted
from dlp.quant.recipe import Recipe
from dlp.quant.stats import StatsTable, measured, plain
from dlp.quant.tensor import QuantizedTensor
from dlp.runtime.capture import CapturedPasses

Result = TypeVar("Result")
Params = ParamSpec("Params")

_ENGINE: Any = torch.autograd.Variable._execution_engine
# The `BoundSpec` of each spec_id. A session keeps all of its `BoundSpec`s alive, because a backward needs the spec of its
# forward, even if the layer has another spec by then.
_BOUND: WeakValueDictionary[int, BoundSpec] = WeakValueDictionary()
_NUMBERS = itertools.count()
KEPT = 256  # maximum number of entries in `BoundSpec.cache`: each new number of tokens adds entries of about 12 kB


def remembered(
    compute: Callable[Concatenate[BoundSpec, Params], Result],
) -> Callable[Concatenate[BoundSpec, Params], Result]:
    """Decorator for a function or method whose first argument is a `BoundSpec`: store results in `BoundSpec.cache`, by function
    and further positional arguments. The results stay valid, since a spec never changes. All results are dropped when there
    are KEPT results, because the number of tokens may be another one in each step."""

    @wraps(compute)
    def cached(bound: BoundSpec, *args: Params.args, **none: Params.kwargs) -> Result:
        key = (compute, *args)
        try:
            result: Result = bound.cache[key]
        except KeyError:
            if len(bound.cache) >= KEPT:
                bound.forget_plans()
            result = bound.cache[key] = compute(bound, *args, **none)
        except TypeError:  # while torch traces, an argument may be a symbolic size, which has no hash
            result = compute(bound, *args, **none)
        return result

    return cached


@dataclass(frozen=True)
class Swap:
    """A recipe change.

    step     number of optimizer steps after which the recipe changes
    layers   names of the layers
    asked    name or dict of the new recipe, from which a resumed run repeats the change; None: a recipe object from Python
    said     the new recipe, as printed
    """

    step: int
    layers: tuple[str, ...]
    asked: Any
    said: str


DelayedWgrad = tuple["Weight", Callable[..., Tensor]]  # a weight, and the function that computes its wgrad


class WgradsOfBackward(list[DelayedWgrad]):
    """Delayed wgrads of one backward: a list to which weak references are possible."""


class StepState(PassState):
    """The layers of a model, and the state that their passes share.

    cores   the layers
    bounds  all bound specs that layers run or ran under, since a backward may still need an earlier spec
    passes  the `CapturedPasses` of the layers, also those that only a pending backward refers to

    An explicitly constructed layer has a separate StepState, until `convert` or `attach` moves the layer to the state of its
    model, which is a `Session` (`dlp.parallel.model.session`).
    """

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False,
        groups: Mapping[str, ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed, dp=dp, amax_group=amax_group, lone=lone, groups=groups)
        self.cores: list[LayerState] = []
        self.bounds: list[BoundSpec] = []
        self.passes: WeakSet[CapturedPasses] = WeakSet()
        self.weight_batch = WeightBatch()
        self.waiting: deque[DelayedWgrad] = deque()  # delayed wgrads of completed backwards, see `backward_dw`
        # delayed wgrads of the running backwards, by the id of the backward
        self._leaving: WeakValueDictionary[int, WgradsOfBackward] = WeakValueDictionary()
        self.steps = 0  # optimizer steps so far
        self.swaps: list[Swap] = []  # recipe changes that were made
        self.scheduled: list[tuple[Swap, Any]] = []  # (recipe change to come, its recipe)

    def check_not_graphed(self, layers: Iterable[LayerState]) -> None:
        """Raise ValueError for a recipe change of a layer that is captured in a CUDA graph."""
        held = next((layer.spec for layer in layers if layer.spec.members in self.graphed), None)
        if held is not None:
            raise ValueError(
                f"{held.name}: the recipe {held.recipe} of this layer is captured in a CUDA graph, and replays would "
                f"keep this recipe; set recipes inside dlp.graphing(model), which discards earlier graphs, and capture "
                f"again there"
            )

    # ---- overridden by the session of a model

    @property
    def sum_group(self) -> ProcessGroup | None:
        """The group over which partial gradients are summed; None: the model has no partial gradients."""
        return None

    def is_moved(self, weights: LayerWeights) -> bool:
        """Whether weights of a layer were changed since the last cast, other than by an attached optimizer."""
        return False

    def check_compiled_weights(self, values: bool) -> None:
        """Raise RuntimeError if weights were changed since the last cast, other than by an attached optimizer. `values`: also
        compare samples of the values. Compiled code calls this method before the layers of the model."""

    def weights_cast(self, weights: Sequence[LayerWeights]) -> None:
        """Called after the weights of these layers have been cast."""

    def hook_first(self, model: nn.Module) -> None:
        """Move the model's hooks that must run first to the front again, after FSDP has inserted another hook there."""

    # ---- the layers

    def delay_wgrad(self, weight: Weight, wgrad: Callable[..., Tensor]) -> None:
        """Append a delayed wgrad to `waiting` at the end of the running backward. If the backward raises an exception, autograd
        frees the callback, and with the callback the wgrads."""
        task = torch._C._current_graph_task_id()
        left = self._leaving.get(task)
        if left is None:
            left = self._leaving[task] = WgradsOfBackward()
            _ENGINE.queue_callback(partial(self.waiting.extend, left))
        left.append((weight, wgrad))

    @property
    def device(self) -> torch.device:
        return self.cores[0].device

    @property
    def num_members(self) -> int:
        return sum(len(core.members) for core in self.cores)

    def specs(self) -> list[LinearSpec]:
        return [spec for core in self.cores for spec in core.specs()]

    def weights(self) -> list[Weight]:
        """The weights of all layers."""
        return [weight for core in self.cores for weight in core.weights]

    def forget_captures(self) -> None:
        for passes in self.passes:
            passes.found.clear()
        for bound in self.bounds:
            bound.calls.clear()
        for core in self.cores:
            if core.weights.parts is not None:
                core.weights.parts.calls.clear()

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> StepState:
        new = type(self)(seed=self.seed, dp=self.dp, amax_group=self.amax_group, lone=self.lone, groups=self.groups)
        memo[id(self)] = new
        self.share(memo)
        vars(new).update(copy.deepcopy(self._taken(), memo))
        return new

    def share(self, memo: dict[int, Any]) -> None:
        """Add the objects that a copy shares with this state to `memo`, the memo of `copy.deepcopy`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. Raises ValueError for a model with an amax group, since groups cannot be pickled."""
        if self.amax_group is not None:
            cannot_pickle(self.cores[0].spec.name)
        bounds = [core.bound for core in self.cores]
        return self._taken() | {"seed": self.seed, "dp": self.dp, "lone": self.lone, "bounds": bounds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(type(self)()) | state)

    def _taken(self) -> dict[str, Any]:
        """Return the attributes that a copy of the model gets: layers and their scales, without attached optimizers and
        caches."""
        names = ("cores", "steps", "swaps", "scheduled", "noted", "draws", "_scaling")
        return {name: getattr(self, name) for name in (*names, *(["counter"] if "counter" in vars(self) else []))}


class BoundSpec:
    """A spec of one layer, with the session of the layer and caches for calls under the spec.

    session      state that the layers of the model share
    weights      `LayerWeights` of the layer
    changes_dx   whether dx is changed after dgrad: the recipe clips x, or has a quantizer of dx
    spec_id      int64 [], identifies the bound spec to the opaque ops
    trace_id     identifies all specs with results of equal shapes (`dlp.parallel.linear.spec.trace_of`)
    cache        results of functions with the decorator `remembered`
    plans        plans of the calls so far, by shape of x
    plans_back   the same plans, by number of rows of dy
    calls        `BoundCall`s and captured passes (`dlp.parallel.linear.autograd`)
    """

    def __init__(self, spec: LinearSpec, session: StepState, weights: LayerWeights) -> None:
        self.spec, self.session, self.weights = spec, session, weights
        if spec.slots:
            spec.check_group(session.amax_group)
        session.bounds.append(self)
        session.draws |= spec.draws
        self._register()

    def _register(self) -> None:
        """Register a spec_id, which is valid in this process, and start with empty caches."""
        number, spec = next(_NUMBERS), self.spec
        _BOUND[number] = self
        self.spec_id = torch.tensor(number, device="cpu")  # on the CPU, whatever the default device is
        self.trace_id = trace_of(spec)
        self.changes_dx = spec.recipe.x.clips or spec.recipe.dx is not None
        self.cache: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}
        self.plans: dict[torch.Size, LinearPlan] = {}
        self.plans_back: dict[int, LinearPlan] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSpec:
        """Return the bound spec of a copied layer, in a copied session. The copy records no cast statistics
        (`record_stats`)."""
        spec = replace(self.spec, recipe=plain(self.spec.recipe))
        new = memo[id(self)] = BoundSpec(spec, copy.deepcopy(self.session, memo), self.weights)
        new.weights = copy.deepcopy(self.weights, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. Raises ValueError for a layer with a process group, which cannot be pickled."""
        if self.spec.group is not None or self.spec.amax_group is not None:
            cannot_pickle(self.spec.name)
        return {
            "spec": replace(self.spec, recipe=plain(self.spec.recipe)),
            "session": self.session,
            "weights": self.weights,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()

    def forget_plans(self) -> None:
        """Drop all plans and other results of `remembered`, which are computed again when they are needed."""
        self.cache.clear()
        self.plans.clear()
        self.plans_back.clear()

    @remembered
    def plan(self, tokens: int) -> LinearPlan:
        """Return the plan for this number of rows of x on this rank."""
        return plan_for(self.spec, tokens)

    def plan_back(self, dy_tokens: int) -> LinearPlan:
        """Return the plan for this number of rows of dy on this rank, and store the plan in `plans_back`."""
        found = self.plans_back[dy_tokens] = self.plan(x_tokens_of(self.spec.style, self.spec.tp, dy_tokens))
        return found

    def kept_memory(self) -> list[Tensor]:
        """Return the tensors, besides inputs and results, that launches of this layer read and write. Their addresses do not
        change until `calls` is cleared."""
        return [*self.session.kept_memory(self.spec), *mapped_memory()]


def plan_for(spec: LinearSpec, tokens: int) -> LinearPlan:
    """Return the plan of a layer with this spec, for this number of rows of x on this rank."""
    group = spec.amax_group or spec.group
    return linear_plan(
        spec.recipe, spec.style, spec.tp, tokens, kept=spec.options.keeps, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group, spec=spec,
    )  # fmt: skip


def waits(delay: bool | None, needs_dx: bool) -> bool:
    """Whether wgrads are delayed until `backward_dw`: the option delay_wgrad is on, and dx is wanted. Without dx
    `dlp::linear_bwd` could have no results, so that torch.compile would remove this op, and a delay would gain nothing."""
    return bool(delay) and needs_dx


def bound_of(spec_id: Tensor) -> BoundSpec:
    """Return the bound spec with this spec_id."""
    return _BOUND[int(spec_id)]


class LayerState:
    """State of one layer: weights and specs.

    bound      the `BoundSpec` of the layer outside of autocast regions
    variants   the `BoundSpec` of the layer in autocast regions in which a layer of the model ran, by arguments of the region
    members    a `Member` for each weight: its module and parameter names
    weights    the `LayerWeights` of the layer
    ran_under  record of forwards in autocast regions and checkpoints (`dlp.parallel.linear.active.LayerRuns`)
    stats      the table to which casts write statistics; None: no statistics are recorded
    """

    ran_under: Any

    def __init__(self, spec: LinearSpec, session: StepState, members: Sequence[Member]) -> None:
        self.weights, self.members = LayerWeights(self), list(members)
        self.bound = BoundSpec(spec, session, self.weights)
        self.variants: dict[Any, BoundSpec] = {}
        self.stats: StatsTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        anew: dict[str, Any] = {"variants": {}, "stats": None}
        return vars(self) | anew

    @property
    def spec(self) -> LinearSpec:
        """The spec of the layer outside of autocast regions."""
        return self.bound.spec

    @property
    def session(self) -> StepState:
        return self.bound.session

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = getattr(self.members[0].module, self.members[0].weight).device
        return device

    def bounds(self) -> list[BoundSpec]:
        """Return the bound spec of the layer, and its bound specs for autocast regions (`variants`)."""
        return [self.bound, *self.variants.values()]

    def specs(self) -> list[LinearSpec]:
        return [bound.spec for bound in self.bounds()]

    def with_recipe(self, recipe: Recipe) -> LinearSpec:
        """Return the spec that this layer would have under another recipe. Raises ValueError if the weights do not support
        it."""
        self.weights.check(recipe)
        stats = self.stats
        chosen = recipe if stats is None else measured(recipe, self.spec.members[0], stats)
        return replace(self.spec, recipe=chosen)

    def set_spec(self, spec: LinearSpec, session: StepState | None = None) -> None:
        """Replace the spec of the layer, between two steps. `session`: the session to which the layer moves; None: the session
        stays the same. The old bound specs stay alive for pending backwards, without their caches."""
        for bound in self.bounds():
            bound.forget_plans()
            bound.calls.clear()
        self.bound = BoundSpec(spec, session or self.session, self.weights)
        self.variants.clear()
        self.weights.drop()


# Weights of a layer


class Use(NamedTuple):
    """A forward or backward that reads a weight.

    bound    bound spec of the pass
    value    [N, K], the parameter as this rank sees it in the pass
    dtype    dtype of x
    record   whether gradients are enabled, so that amaxes are recorded for delayed scales
    """

    bound: BoundSpec
    value: Tensor
    dtype: torch.dtype
    record: bool


class Weight:
    """One weight w [N, K] of a layer; the base class of all kinds of weights.

    owner, index  the weights of the layer, and the index of this weight among them
    name          name of the member, which identifies its delayed scales
    stored        parameter that optimizers step on; None if a parametrization replaced it
    parts         parts of the cast operands; the first `num_rowwise` belong to the rowwise operand. Empty: the step boundary
                  has not cast the weight, or FSDP gathers the operands
    managed       whether FSDP manages the weight, so that the layer may see a copy of `stored`
    gathered      whether FSDP shards the weight, so that its operands are gathered for each pass
    held          whether only codes exist, and the parameter is a placeholder
    fresh         whether the step boundary has cast the current values
    why           reason for a gather in high precision although the recipe quantizes w; None: there is no such gather
    noted         the reason `why` that was logged last; None: nothing was logged
    """

    managed = gathered = fresh = held = False

    def __init__(self, owner: LayerWeights, index: int) -> None:
        self.owner, self.index = owner, index
        self.parts: list[Tensor] = []
        self.num_rowwise = 0
        self.why: str | None = None
        self.noted: str | None = None

    @property
    def bound(self) -> BoundSpec:
        """The bound spec of the layer outside of autocast regions."""
        return self.owner.layer.bound

    @property
    def name(self) -> str:
        return self.bound.spec.members[self.index]

    @property
    def member(self) -> Member:
        return self.owner.layer.members[self.index]

    @property
    def stored(self) -> Tensor | None:
        raise NotImplementedError

    def read(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        """Return w [N, K], the operand of fprop, or with `columnwise` w.T [K, N], the operand of dgrad."""
        raise NotImplementedError

    def casts(self, values: Values) -> list[Cast]:
        """Return the casts that the step boundary runs for this weight. `values`: copies of weights that casts read."""
        raise NotImplementedError

    def take(self, operands: Sequence[Wanted]) -> None:
        """Store the operands that the casts of `casts` returned."""
        raise NotImplementedError

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Return the amaxes that the casts recorded for delayed scaling, and the group that must agree on them now. None:
        `ScalingState` agrees on them later."""
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe under which the layer cannot run.

        This base class checks only quantization blocks (`check_blocks`): any recipe can cast values, and weights whose codes
        cannot be gathered are gathered in high precision."""
        spec, stored = self.bound.spec, self.stored
        if stored is not None:
            check_blocks(spec.name, recipe, spec.style, stored.shape, spec.tp)

    def serves(self, spec: LinearSpec) -> bool:
        """Whether passes under `spec`, the spec of an autocast region, can also read `parts`. Raises ValueError for a recipe
        that `check` rejects, if only codes exist."""
        return False

    def drop(self, *, retyped: bool = False) -> None:
        """Discard the operands, because the recipe changed or the values changed outside of an optimizer step, or, if `retyped`
        is true, because the dtype of x changed."""
        raise NotImplementedError

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        """Return a context in which the parameter contains its values; `written`: the caller may overwrite the values."""
        return nullcontext()

    def check_in_place(self, parameter: Any) -> None:
        """Raise ValueError if the layer would ignore the values of the module's `parameter`. This base class accepts any
        parameter, since the layer reads its values."""


class LayerWeights:
    """The weights of one layer, in the order of members.

    caches       whether the step boundary casts weights that FSDP does not shard; False: each pass casts them
    dtype        dtype of x in the last run, to which values are rounded before casts; None: the layer has not run
    parts        cast operands of all weights; None if at least one weight has no operands
    held         whether at least one weight is quantized-only
    main_grads   for each member the destination of its wgrads; None: autograd. Empty: autograd for all members
    """

    def __init__(self, layer: LayerState) -> None:
        self.layer, self.caches = layer, False
        self.main_grads: list[MainGrad | None] = []
        self.dtype: torch.dtype | None = None
        self.parts: WeightParts | None = None
        self.members: list[Weight] = []
        self.held = self._gathered = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copied layer, which casts its weights in each pass until `attach` is called for the copy."""
        return vars(self) | {"caches": False, "dtype": None, "parts": None, "main_grads": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.collect()

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.members)

    def set(self, members: Sequence[Weight]) -> None:
        """Set the `Weight` of each member, and update the attributes that depend on the weights."""
        self.members = list(members)
        self._gathered = any(weight.gathered for weight in members)
        self.held = any(weight.held for weight in members)
        self.collect()

    def collect(self) -> None:
        """Update `parts`, after operands of a member may have been replaced."""
        parts = [part for weight in self.members for part in weight.parts]
        if self.parts is None or list(map(id, parts)) != list(map(id, self.parts.parts)):
            complete, rowwise = all(weight.parts for weight in self.members), self.members[0].num_rowwise
            sizes = rowwise, len(parts) // len(self.members) - rowwise
            self.parts = WeightParts(lambda: self.layer.spec, parts, sizes) if complete else None

    def operands_for(self, bound: BoundSpec, dtype: torch.dtype) -> WeightParts | None:
        """Return the operands from the step boundary, if a pass under this spec with x of `dtype` can read them; None: call
        `read`. If `dtype` differs from the dtype of the last run under the layer's spec, discard the operands of that run."""
        if bound is not self.layer.bound:
            return self.parts if all([weight.serves(bound.spec) for weight in self.members]) else None
        if self.dtype != dtype:  # the next step boundary casts for the new dtype
            self.dtype = dtype
            for weight in self.members:
                weight.drop(retyped=True)
            # without `collect`, since torch.compile would guard on the tensor ids that `collect` compares
            if not all(weight.parts for weight in self.members):
                self.parts = None
        return self.parts

    def read(
        self, bound: BoundSpec, used: Sequence[int], values: Sequence[Tensor], dtype: torch.dtype, *, columnwise: bool,
        record: bool,
    ) -> list[QuantizedTensor]:  # fmt: skip
        """Return the operands of the `used` weights in one orientation, if FSDP gathers a weight of the layer. The list is
        empty if the pass must cast the weights, with one amax agreement for all.

        values   the parameters of the used weights, as this rank sees them
        dtype    dtype of x
        record   whether amaxes are recorded for delayed scales
        """
        if not self._gathered:
            return []
        uses = [(self.members[i], Use(bound, value, dtype, record)) for i, value in zip(used, values, strict=True)]
        return [weight.read(use, columnwise=columnwise) for weight, use in uses]

    def targets(self, used: Sequence[int], values: Sequence[Tensor]) -> list[Target | None]:
        """Return the destination of the wgrad of each `used` member in the running backward; None: autograd. The list is empty
        if autograd gets all wgrads.

        `values`: the weights that forward read."""
        main_grads = [self.main_grads[i] for i in used]
        targets = [None if main is None else main.target(w) for main, w in zip(main_grads, values, strict=True)]
        return targets if any(targets) else []

    def written(self, index: int) -> Tensor | None:
        """Return the gradient that autograd gets for a member whose dw was written to a target; None: no gradient."""
        main_grad = self.main_grads[index]
        assert main_grad is not None, "a target belongs to a main gradient"
        return main_grad.written()

    def stored(self) -> list[Tensor]:
        """Return the parameters that optimizers step on, without parameters that a parametrization replaced."""
        return [stored for weight in self.members if (stored := weight.stored) is not None]

    def in_use(self) -> bool:
        """Whether passes read operands that a step boundary cast."""
        return self.parts is not None or all(weight.gathered and weight.fresh for weight in self.members)

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe under which the layer cannot run."""
        for weight in self.members:
            weight.check(recipe)

    def check_in_place(self, parameters: Sequence[Any]) -> None:
        """Raise ValueError if the layer would ignore the values of a module's parameter. `parameters`: the current parameters
        of the modules, in the order of members."""
        for weight, parameter in zip(self.members, parameters, strict=False):
            weight.check_in_place(parameter)

    def drop(self) -> None:
        """Discard all operands, see `Weight.drop`."""
        for weight in self.members:
            weight.drop()
        self.collect()
        note_reasons(self.members)

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Return a context in which parameters contain their values; `written`: the caller may overwrite the values."""
        with ExitStack() as stack:
            for weight in self.members:
                stack.enter_context(weight.shown(written=written))
            yield


# All layers of a model


def cores(model: nn.Module) -> Iterator[Any]:
    """Yield each core (`dlp.parallel.linear.modules.LinearCore`) of a model once."""
    seen = set()
    for module in model.modules():
        core = getattr(module, "core", None)
        if isinstance(core, LayerState) and id(core) not in seen:
            seen.add(id(core))
            yield core


def weights_in(model: nn.Module) -> Iterator[LayerWeights]:
    """Yield the `LayerWeights` of each layer of a model once."""
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


@torch.inference_mode(False)  # since later step boundaries write into the operands that this call allocates
@torch.no_grad()
def refresh(session: StepState, weights: Sequence[Weight]) -> None:
    """Cast these weights of a model in one batch, and store the operands in the weights. All ranks call this function
    together."""
    batch = session.weight_batch
    wanted = [(weight, casts) for weight in weights if (casts := weight.casts(batch.values))]
    batch.values.renew()
    operands = iter(batch.casts.make([cast for _, casts in wanted for cast in casts]))
    for weight, casts in wanted:
        weight.take([next(operands) for _ in casts])
    share_amaxes([staged for weight, _ in wanted if (staged := weight.staged()) is not None])
    for weight in weights:
        weight.fresh = True
    session.weights_cast(list(dict.fromkeys(weight.owner for weight, _ in wanted)))


def cannot_pickle(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: a model that is sharded over ranks cannot be pickled, since process groups cannot be pickled; save "
        f"model.state_dict(), or pickle the model before dlp.convert"
    )
