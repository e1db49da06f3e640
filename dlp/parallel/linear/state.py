"""State of a layer and of the model that a pass reads.

    StepState    state that all layers of a model share: delayed scales, flags, random counters, which the step boundary
                 changes
    BoundSpec    a spec of one layer, with the StepState and the decisions for calls under the spec
    LayerState   the weights of a layer, the spec of the layer, and the specs of autocast regions

The opaque ops take tensors and two identifiers: `spec_id`, an int64 tensor [], identifies the `BoundSpec` that a call runs, and
`trace_id`, an integer, is `dlp.parallel.linear.spec.trace_of` the spec. torch.compile sees trace_id as a constant and spec_id
as an input, so that equal blocks share one compiled graph.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.transport import agree, mapped_memory
from dlp.kernels.launches import capturing
from dlp.parallel.linear.flags import FORWARD, Flags
from dlp.parallel.linear.plan import LinearPlan, linear_plan, x_tokens_of
from dlp.parallel.linear.spec import LinearSpec, trace_of
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.recipe import Recipe
from dlp.quant.state import ForwardScales, ScalingState, SlotUse
from dlp.quant.stats import StatsTable, measured, plain

LOG = logging.getLogger("dlp")
_ENGINE: Any = torch.autograd.Variable._execution_engine
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


class UpdateAfterBackward(NamedTuple):
    """Mark for scales of a forward in an autocast region: at the end of the backward the scales of dy are updated, agreed over
    `group` (None: the group of the model)."""

    group: ProcessGroup | None


class ForwardState(NamedTuple):
    """State of the model at the time of a forward, which the backward reads and a recomputation repeats.

    scales   delayed scales; None: those in the table
    draw     copy of the counter of stochastic rounding; None: nothing was drawn
    loads    number of calls of `dlp.load_state_dict` before the forward
    """

    scales: ForwardScales | None = None
    draw: Tensor | None = None
    loads: int = 0


@dataclass(frozen=True)
class Swap:
    """Layers, by name, that get another recipe after `step` optimizer steps. asked: the recipe's name or table, with which a
    resumed run can repeat the swap, None for a recipe made in Python; said: the printed recipe."""

    step: int
    layers: tuple[str, ...]
    asked: Any
    said: str


class StepState:
    """State of a model that passes of the layers read, and the step boundary changes.

    seed         of stochastic rounding
    dp           (rank, size): which tokens of a global microbatch this rank has
    amax_group   the ranks that share delayed scales; None: this rank alone
    lone         the state belongs to a single layer, without a converted model that counts microbatches
    groups       the groups of this rank, by axis of the mesh

    A layer that is constructed explicitly has a state of its own, until `convert` or `attach` moves the layer to the state of
    the model around it, which is a `Session` (`dlp.parallel.model.session`).

    The table of scales is made when it is first needed, for every layer of the model, whether or not the layer runs on this
    rank. So tables are equal on all ranks, and one all-reduce of the staging row agrees on all amaxes. Scales change at the
    step boundary; under `autocast` without a step boundary, those of x and w change when the region ends, and those of dy at
    the end of the backward of the layers that ran in the region.
    """

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False,
        groups: Mapping[str, ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.dp = seed, dp
        self.amax_group, self.lone, self.groups = amax_group, lone, dict(groups or {})
        # layers
        self.cores: list[LayerState] = []
        # Bounds of current and earlier specs of layers: a backward may need an earlier one
        self.bounds: list[BoundSpec] = []
        self.noted: set[str] = set()  # texts of `note`
        # casts
        self._scaling: ScalingState | None = None
        self.loaded: dict[
            str, dict[str, Tensor]
        ] = {}  # slots of autocast regions that have not run since the load of a state
        self.scales: ForwardScales | None = None  # delayed scales that casts read now; None: the scales in the table
        self.now = ForwardState()  # state of the running microbatch
        self.repeats: ForwardState | None = None  # state of the forward that a checkpoint recomputes now
        self.drawn_again: Tensor | None = None  # the counter before `resume`, restored by `end_layer_backward`
        self.flags = Flags()
        self.stats: StatsTable | None = None
        self.draws = False  # a layer rounds stochastically, so microbatches are counted
        self.weight_batch: Any = None  # `dlp.parallel.weight.base.WeightBatch`, once weights are cast
        # passes
        self.attached = False  # an optimizer's step is the step boundary
        self.ran: set[tuple[str, ...]] = set()  # layers that ran with gradients since the last boundary, by members
        self.last: LinearSpec | None = None  # spec of the layer that ran last
        self.direction = "forward"  # direction in which the last layer ran
        self.waiting: deque[tuple[Any, Callable[..., Tensor]]] = (
            deque()
        )  # (weight, its delayed wgrad), see `backward_dw`
        self.regions = False  # a layer has run in an autocast region
        self.graphing = False  # inside `graphing`
        self.graphed: set[tuple[str, ...]] = set()  # layers that are captured in a CUDA graph, by members
        self._task: int | None = None  # id of the backward at whose end the scales of dy will be updated
        self.before_gather: Callable[..., None] | None = None  # called like `dlp.parallel.model.checks.check_gathered`
        # Raises RuntimeError in a backward of a layer whose partial gradients would not be summed.
        self.check_gradients: Callable[[], None] | None = None
        # changes
        self.steps = 0  # optimizer steps so far
        self.swaps: list[Swap] = []  # recipe changes that were made
        self.scheduled: list[tuple[Swap, Any]] = []  # (recipe change to come, its recipe)

    # ---- called by passes

    def begin_forward(self, bound: BoundSpec, record: bool) -> None:
        """Begin a forward of a layer; `record`: gradients are enabled."""
        self.last, self.direction = bound.spec, "forward"
        if self.graphing or capturing():
            self.graphed.add(bound.spec.members)
        if record:
            self.ran.add(bound.spec.members)
            if self.lone and self.draws:
                self.advance()

    def forward_state(self) -> ForwardState:
        """The state for the backward of the forward that runs now."""
        if self.repeats is not None:
            repeated, self.repeats = self.repeats, None
            return repeated
        return self.now if self.scales is None else self.now._replace(scales=self.scales)

    def resume(self, spec: LinearSpec, state: ForwardState) -> None:
        """Begin a backward of a layer: restore the state of the forward. Raises RuntimeError if a state was loaded
        after the forward."""
        self.scales, now = state.scales, self.now
        if state is now:
            return
        if state.loads != now.loads:
            raise RuntimeError(
                f"{spec.name}: dlp.load_state_dict was called between a forward and its backward, which would read the "
                f"loaded scales and random counters; load after the backward, or run the forward again"
            )
        if state.draw is not None and state.draw is not now.draw:
            if self.drawn_again is None:
                self.drawn_again = self.counter.clone()
            self.counter.copy_(state.draw)

    def end_layer_backward(self) -> None:
        """End a backward of a layer: continue with the state of the running microbatch."""
        self.scales = None
        if self.drawn_again is not None:
            self.counter.copy_(self.drawn_again)
            self.drawn_again = None

    def in_layer_backward(self, bound: BoundSpec) -> None:
        """Begin a backward of a layer whose forward ran with `scales`. After a forward in an autocast region, the
        scales of dy are updated at the end of the running backward, once for all layers. Raises RuntimeError if partial
        gradients would not be summed."""
        self.last, self.direction = bound.spec, "backward"
        if self.check_gradients is not None:
            self.check_gradients()
        if self.scales is None or self.attached or not isinstance(self.scales.behind, UpdateAfterBackward):
            return
        task, group = torch._C._current_graph_task_id(), self.scales.behind.group
        if task != self._task:
            self._task = task
            _ENGINE.queue_callback(lambda: self.update_scales(False, group))

    def slot(self, name: str, spec: LinearSpec, record: bool) -> ScaleSlot:
        """The delayed scale of one tensor, for its cast by a layer of this spec. `record`: the amax of the cast counts."""
        return self.scaling.slot(name, record, None if self.attached else self.scales, spec.slots[name][1])

    def flag(self, members: tuple[str, ...], tensor: str, member: str, device: torch.device) -> Tensor:
        """fp32 [], which casts of one tensor set to NaN if a value is not finite; `members`: members of the tensor's layer."""
        flag = self.flags.views.get((member, tensor, device))
        if flag is None:
            self.flags.reserve(members, device, sum(len(core.members) for core in self.cores))
            flag = self.flags.views[member, tensor, device]
        return flag

    @cached_property
    def counter(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((), dtype=torch.int64, device=self.cores[0].device)

    def kept_memory(self, spec: LinearSpec) -> list[Tensor]:
        """The tensors besides operands that launches of a layer read and write. Their addresses stay until `rebuild`."""
        kept = [*self.flags.now, *(self.scaling.memory if spec.slots else ())]
        return [*kept, self.counter] if spec.draws else kept

    def note(self, text: str) -> None:
        """Log a line that amends the plan: once on rank 0, for any number of layers."""
        if text not in self.noted:
            self.noted.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOG.warning("plan: %s", text)

    def check_not_graphed(self, layers: Iterable[LayerState]) -> None:
        """Raise ValueError for a swap of layers whose recipe a CUDA graph holds."""
        held = next((layer.spec for layer in layers if layer.spec.members in self.graphed), None)
        if held is not None:
            raise ValueError(
                f"{held.name}: the recipe {held.recipe} of this layer is captured in a CUDA graph, and replays would "
                f"keep this recipe; set recipes inside dlp.graphing(model), which discards earlier graphs, and capture "
                f"again there"
            )

    # ---- microbatches

    def advance(self) -> None:
        """Count a microbatch; not in a backward, which recomputes a forward."""
        if not in_backward():
            self.counter.add_(1)
            self.now = self.now._replace(draw=self.counter.clone())

    def load_counter(self, value: Tensor) -> None:
        """Load the counter of microbatches. A backward of a forward before the load is refused if it would read loaded
        state."""
        self.counter.copy_(value)
        if self.draws or self.has_slots():
            self.now = ForwardState(draw=self.counter.clone(), loads=self.now.loads + 1)

    # ---- overridden by the session of a model

    @property
    def sum_group(self) -> ProcessGroup | None:
        """The group over which partial gradients are summed; None: there are none."""
        return None

    def is_moved(self, weights: Any) -> bool:
        """Whether weights of a layer were changed since the last cast, other than by an attached optimizer."""
        return False

    def weights_cast(self, weights: Sequence[Any]) -> None:
        """Record that the weights of these layers have been cast."""

    def hook_first(self, model: nn.Module) -> None:
        """Move the hooks of the model that must run first to the front again, after another hook was inserted there."""

    # ---- delayed scales

    def specs(self) -> list[LinearSpec]:
        return [spec for core in self.cores for spec in core.specs()]

    def weights(self) -> list[Any]:
        """The weights of all layers (`dlp.parallel.weight.base.Weight`)."""
        return [weight for core in self.cores for weight in core.weights]

    def has_slots(self) -> bool:
        return any(spec.slots for spec in self.specs())

    @property
    def scaling(self) -> ScalingState:
        if self._scaling is None:
            self._scaling = self._make_scaling()
        return self._scaling

    @torch.inference_mode(False)
    def _make_scaling(self) -> ScalingState:
        uses = {
            name: SlotUse(options, tensor in FORWARD, spec.recipe.reduce_amax)
            for spec in self.specs()
            for name, (tensor, options) in spec.slots.items()
        }
        made = ScalingState(uses, self.cores[0].device)
        if self.loaded:
            self.loaded = made.table.load_known(self.loaded)
        return made

    def rebuild(self) -> None:
        """Rebuild the table of scales after recipe changes; slots that exist in both tables keep their state."""
        if self._scaling is None:
            return
        self._scaling = self._scaling.replaced_by(self._make_scaling())
        for bound in self.bounds:  # their captured launches read the old table
            bound.calls.clear()
        for core in self.cores:
            if core.weights.parts is not None:
                core.weights.parts.calls.clear()

    def update_scales(self, forward: bool | None = None, group: ProcessGroup | None = None) -> None:
        """Agree on staged amaxes and update the scales. All ranks of the amax group must call this method, whichever layers
        they ran.

        forward   None: all slots; True, False: slots of casts in forward, in backward
        group     the amax group of an autocast region; None: the group of the session
        """
        shared = group or self.amax_group
        self.scales = None
        if shared is None or shared.size() == 1:
            self.scaling.update(None, forward)
        else:
            self.scaling.update(lambda staged: agree([staged], shared)[0], forward)

    def leave_region(self, group: ProcessGroup | None) -> None:
        """End the outermost autocast region: update the scales of casts in forward, over the region's `group`."""
        if not self.attached and self.has_slots():
            self.update_scales(True, group)

    # ---- the step boundary

    def end_step(self) -> None:
        """The session's part of the step boundary: close the step's statistics, update delayed scales. The amax of a weight,
        which was recorded at the last boundary, counts only if the layer has run since."""
        if self.stats is not None:
            self.stats.close()
        if self.has_slots():
            idle = [spec for spec in self.specs() if spec.members not in self.ran | self.graphed]
            self.scaling.forget({name for spec in idle for name, (tensor, _) in spec.slots.items() if tensor == "w"})
            self.update_scales()
        self.ran.clear()

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
    calls        `BoundCall`s and captured directions (`dlp.parallel.linear.autograd`)
    """

    def __init__(self, spec: LinearSpec, session: StepState, weights: Any = None) -> None:
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
        new = memo[id(self)] = BoundSpec(spec, copy.deepcopy(self.session, memo))
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

    bound      the spec of the layer, bound
    variants   specs of autocast regions, bound, by the arguments of the region
    members    module and parameter names of each weight (`dlp.parallel.weight.base.Member`)
    weights    `LayerWeights`: where the weights live
    ran_under  the specs of forwards in autocast regions and checkpoints (`dlp.parallel.linear.active.LayerRuns`)
    stats      the table for statistics of the casts; None: not measured
    """

    weights: Any
    ran_under: Any

    def __init__(self, spec: LinearSpec, session: StepState, members: Sequence[Any]) -> None:
        self.bound, self.members = BoundSpec(spec, session), list(members)
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


def cores(model: nn.Module) -> Iterator[Any]:
    """Every core (`dlp.parallel.linear.modules`) of a model, each once."""
    seen = set()
    for module in model.modules():
        core = getattr(module, "core", None)
        if isinstance(core, LayerState) and id(core) not in seen:
            seen.add(id(core))
            yield core


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def cannot_pickle(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: a model that is sharded over ranks cannot be pickled, since process groups cannot be pickled; save "
        f"model.state_dict(), or pickle the model before dlp.convert"
    )
