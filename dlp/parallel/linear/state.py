"""The layers of a model, with specs and weights.

    StepState      the layers of a model, with the state that their passes share (`dlp.parallel.linear.step`)
    BoundSpec      a spec of one layer, with the StepState and the decisions for calls under the spec
    LayerState     the weights of a layer, the spec of the layer, and the specs of autocast regions
    LayerWeights   the weights of a layer: one `Weight` for each member, and the operands that the step boundary cast

    LocalWeight     (weight/local.py)    this rank holds the complete parameter, which is cast at the step boundary, into
                                         operands that forward and backward only read; without a step boundary, in each pass
    ManagedWeight   (weight/fsdp2.py)    like LocalWeight, if FSDP manages the parameter on one rank and a layer may see a copy
    HeldWeight      (weight/held.py)     only codes and scales exist, no high-precision parameter
    ShardedWeight   (weight/sharded.py)  FSDP shards the rows. Each rank casts its rows at the step boundary; passes gather
                                         the operands

The step boundary casts all weights of a model together (`refresh`): their values are rounded to the dtype of activations
(`Values`), then observed, agreed on and cast in one `CastBatch`.

The opaque ops take tensors and two identifiers: `spec_id`, an int64 tensor [], identifies the `BoundSpec` that a call runs, and
`trace_id`, an integer, is `dlp.parallel.linear.spec.trace_of` the spec. torch.compile sees trace_id as a constant and spec_id
as an input, so that equal blocks share one compiled graph.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakValueDictionary

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

Result = TypeVar("Result")
Params = ParamSpec("Params")

# The `BoundSpec` of each spec_id. A session keeps its `BoundSpec`s as long as its model exists, because a backward may
# need the spec of its forward after the layer has got another spec.
_BOUND: WeakValueDictionary[int, BoundSpec] = WeakValueDictionary()
_NUMBERS = itertools.count()


def remembered(
    compute: Callable[Concatenate[BoundSpec, Params], Result],
) -> Callable[Concatenate[BoundSpec, Params], Result]:
    """Cache a method of a bound spec, or a function whose first argument is one, in `BoundSpec.cache`: by its positional
    arguments, since a spec never changes."""

    @wraps(compute)
    def cached(bound: BoundSpec, *args: Params.args, **none: Params.kwargs) -> Result:
        key = (compute, *args)
        try:
            result: Result = bound.cache[key]
        except KeyError:
            result = bound.cache[key] = compute(bound, *args, **none)
        except TypeError:  # a symbolic size has no hash: something traces
            result = compute(bound, *args, **none)
        return result

    return cached


@dataclass(frozen=True)
class Swap:
    """Layers, by name, that get another recipe after `step` optimizer steps. asked: the recipe's name or table, with which a
    resumed run can repeat the swap, None for a recipe made in Python; said: the printed recipe."""

    step: int
    layers: tuple[str, ...]
    asked: Any
    said: str


class StepState(PassState):
    """The layers that share the state which their passes read.

    cores   the layers
    bounds  all specs that layers run or ran under, bound: a backward may still need one

    A layer that is constructed explicitly has a state of its own, until `convert` or `attach` moves the layer to the state of
    the model around it, which is a `Session` (`dlp.parallel.model.session`).
    """

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False,
        groups: Mapping[str, ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed, dp=dp, amax_group=amax_group, lone=lone, groups=groups)
        self.cores: list[LayerState] = []
        self.bounds: list[BoundSpec] = []
        self.weight_batch = WeightBatch()
        self.waiting: deque[tuple[Weight, Callable[..., Tensor]]] = deque()  # delayed wgrads, see `backward_dw`
        self.steps = 0  # optimizer steps so far
        self.swaps: list[Swap] = []  # recipe changes that were made
        self.scheduled: list[tuple[Swap, Any]] = []  # (recipe change to come, its recipe)

    def check_not_graphed(self, layers: Iterable[LayerState]) -> None:
        """Raise ValueError for a swap of layers whose recipe a CUDA graph holds."""
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
        """The group over which partial gradients are summed; None: there are none."""
        return None

    def is_moved(self, weights: LayerWeights) -> bool:
        """Whether weights of a layer were changed since the last cast, other than by an attached optimizer."""
        return False

    def weights_cast(self, weights: Sequence[LayerWeights]) -> None:
        """Record that the weights of these layers have been cast."""

    def hook_first(self, model: nn.Module) -> None:
        """Move the hooks of the model that must run first to the front again, after another hook was inserted there."""

    # ---- the layers

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
        """Add objects that a copy shares with this state to `memo`."""

    def __getstate__(self) -> dict[str, Any]:
        """Raise ValueError for a model with process groups, which cannot be pickled."""
        if self.amax_group is not None:
            cannot_pickle(self.cores[0].spec.name)
        bounds = [core.bound for core in self.cores]
        return self._taken() | {"seed": self.seed, "dp": self.dp, "lone": self.lone, "bounds": bounds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(type(self)()) | state)

    def _taken(self) -> dict[str, Any]:
        """State that a copy of the model keeps: layers and their scales, without attached optimizers and caches."""
        names = ("cores", "steps", "swaps", "scheduled", "noted", "draws", "_scaling")
        return {name: getattr(self, name) for name in (*names, *(["counter"] if "counter" in vars(self) else []))}


class BoundSpec:
    """A spec of one layer of one session.

    session      state that the layers of the model share
    weights      `LayerWeights` of the layer
    changes_dx   dx is changed after dgrad: the recipe clips x, or has a quantizer of dx
    spec_id      int64 [], identifies the bound spec to the opaque ops; trace_id: see the module
    cache        results of functions that are `remembered`
    plans        the plans of calls so far, by shape of x; plans_back: by rows of dy
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
        """The bound spec of a copied layer, in a copied session. Casts of the copy are not measured (`record_stats`)."""
        spec = replace(self.spec, recipe=plain(self.spec.recipe))
        new = memo[id(self)] = BoundSpec(spec, copy.deepcopy(self.session, memo), self.weights)
        new.weights = copy.deepcopy(self.weights, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Raise ValueError for a layer with a process group, which cannot be pickled."""
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

    @remembered
    def plan(self, tokens: int) -> LinearPlan:
        """The plan for this number of rows of x on this rank."""
        return plan_for(self.spec, tokens)

    def plan_back(self, dy_tokens: int) -> LinearPlan:
        """The plan for this number of rows of dy on this rank."""
        found = self.plans_back[dy_tokens] = self.plan(x_tokens_of(self.spec.style, self.spec.tp, dy_tokens))
        return found

    def kept_memory(self) -> list[Tensor]:
        """The tensors besides operands that launches of this layer read and write. Their addresses do not change as long as
        `calls` is not cleared."""
        return [*self.session.kept_memory(self.spec), *mapped_memory()]


def plan_for(spec: LinearSpec, tokens: int) -> LinearPlan:
    """The plan of a layer with this spec, for this number of rows of x on this rank."""
    group = spec.amax_group or spec.group
    return linear_plan(
        spec.recipe, spec.style, spec.tp, tokens, kept=spec.options.keeps, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group, spec=spec,
    )  # fmt: skip


def waits(delay: bool | None, needs_dx: bool) -> bool:
    """Whether wgrads are delayed until `backward_dw`: if delay_wgrad is on and dx is wanted. Without dx a delay gains nothing,
    and torch.compile would drop an op without results."""
    return bool(delay) and needs_dx


def bound_of(spec_id: Tensor) -> BoundSpec:
    """The bound spec with this id."""
    return _BOUND[int(spec_id)]


class LayerState:
    """State of one layer: weights and specs.

    bound      the `BoundSpec` of the layer outside of autocast regions
    variants   a `BoundSpec` for each set of arguments of an autocast region
    members    module and parameter names of each weight
    weights    the `LayerWeights` of the layer
    ran_under  the specs of forwards in autocast regions and checkpoints (`dlp.parallel.linear.active.LayerRuns`)
    stats      the table for statistics of the casts; None: not measured
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
        """The layer's own spec."""
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
        """The bound spec of the layer, and the bound specs of autocast regions in which the layer has run."""
        return [self.bound, *self.variants.values()]

    def specs(self) -> list[LinearSpec]:
        return [bound.spec for bound in self.bounds()]

    def with_recipe(self, recipe: Recipe) -> LinearSpec:
        """The spec that this layer has under another recipe."""
        self.weights.check(recipe)
        stats = self.stats
        chosen = recipe if stats is None else measured(recipe, self.spec.members[0], stats)
        return replace(self.spec, recipe=chosen)

    def set_spec(self, spec: LinearSpec, session: StepState | None = None) -> None:
        """Replace the spec of the layer, at a step boundary. `session`: the session that the layer moves to; None:
        unchanged."""
        self.bound = BoundSpec(spec, session or self.session, self.weights)
        self.variants.clear()
        self.weights.drop()


# Weights of a layer


class Use(NamedTuple):
    """A forward or backward that reads a weight.

    value [N, K]: current parameter on this rank; dtype: of x; record: gradients are enabled, so amaxes count for
    delayed scales."""

    bound: BoundSpec
    value: Tensor
    dtype: torch.dtype
    record: bool


class Weight:
    """One w [N, K] of a layer; the base of all kinds of weights.

    owner, index  weights of the layer, and the place among these
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

    managed = gathered = fresh = held = False

    def __init__(self, owner: LayerWeights, index: int) -> None:
        self.owner, self.index = owner, index
        self.parts: list[Tensor] = []
        self.num_rowwise = 0
        self.why: str | None = None
        self.noted: str | None = None

    @property
    def bound(self) -> BoundSpec:
        """Spec of the layer."""
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

    def rowwise(self, use: Use) -> QuantizedTensor:
        """w [N, K], operand of fprop."""
        raise NotImplementedError

    def columnwise(self, use: Use) -> QuantizedTensor:
        """w.T [K, N], operand of dgrad."""
        raise NotImplementedError

    def casts(self, values: Values) -> list[Cast]:
        """Casts that the step boundary runs for this weight; empty: none."""
        raise NotImplementedError

    def take(self, operands: Sequence[Wanted]) -> None:
        """Take the operands that the casts made."""
        raise NotImplementedError

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Amaxes that delayed scaling recorded in the casts, on which a group must agree now; None if `ScalingState`
        agrees on them."""
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe that the layer cannot run under.

        Any recipe can cast values, and weights are gathered in high precision if codes cannot be gathered: only blocks are
        checked."""
        spec, stored = self.bound.spec, self.stored
        if stored is not None:
            check_blocks(spec.name, recipe, spec.style, stored.shape, spec.tp)

    def serves(self, spec: LinearSpec) -> bool:
        """Whether `parts` are also the operands under a spec other than the layer's own. Raises ValueError as in
        `check`."""
        return False

    def drop(self, *, retyped: bool = False) -> None:
        """Forget operands, since the recipe or, without a step, the values changed; `retyped`: the dtype of x changed."""
        raise NotImplementedError

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        """Context in which the parameter holds its values; `written`: they may be overwritten."""
        return nullcontext()

    def check_in_place(self, parameter: Any) -> None:
        """Raise ValueError for a parameter of the module that the layer would not compute with; layers compute with any
        parameter that has values."""


class LayerWeights:
    """The weights of one layer, in the order of members.

    caches       the step boundary casts weights that FSDP does not shard; False: each pass casts them
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
            self.parts = WeightParts(lambda: self.layer.spec, parts, sizes) if complete else None

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

    def written(self, index: int) -> Tensor | None:
        """The gradient for autograd after wgrad wrote dw of a member to a target."""
        main_grad = self.main_grads[index]
        assert main_grad is not None, "a target belongs to a main gradient"
        return main_grad.written()

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


# All layers of a model


def cores(model: nn.Module) -> Iterator[Any]:
    """Every core (`dlp.parallel.linear.modules`) of a model, each once."""
    seen = set()
    for module in model.modules():
        core = getattr(module, "core", None)
        if isinstance(core, LayerState) and id(core) not in seen:
            seen.add(id(core))
            yield core


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


@torch.inference_mode(False)  # later boundaries write into the operands that this boundary allocates
@torch.no_grad()
def refresh(session: StepState, weights: Sequence[Weight]) -> None:
    """Cast these weights of a model in one batch. All ranks call it together."""
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
