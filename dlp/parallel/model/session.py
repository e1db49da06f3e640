"""Session: the state that all layers of one model share. Forward and backward read it; the step boundary changes it.

    scaling    the table of delayed scales of all layers (`dlp.quant.state`): casts read scales, and record amaxes in its
               staging row
    flags      which tensors were not finite when they were cast (`dlp.parallel.model.checks`)
    counter    microbatches so far, int64 [] on the device, on which the random bits of stochastic rounding depend
    steps      optimizer steps so far
    swaps      swaps of recipes that were made; scheduled: those to come (`dlp.parallel.model.boundary`)
    stale      which weights have changed since the boundary cast them (`dlp.parallel.model.checks`)

In forward and backward a layer uses no more of it than

    begin_forward, in_layer_backward      called when the layer runs
    slot, flag                            where a cast reads its delayed scale, records its amax, reports a value that is not
                                          finite
    seed, dp, counter                     where in the stream of random bits a cast begins
    scales                                delayed scales that replace those of the table: of an autocast region, or of the
                                          forward that is recomputed or differentiated
    kept_memory                           the tensors whose addresses captured launches hold
    waiting                               wgrads that are delayed until `backward_dw`
    note                                  a line in the log that amends the printed plan

A session knows its layers by the protocol `Layer` and imports none. A layer that is made by hand has a session of its own,
until `convert` or `attach` moves it to that of the model around it. The step boundary itself is `dlp.parallel.model.boundary`.

The table of scales is made when it is first needed, for every layer of the model, whether or not the layer runs on this rank.
So tables are equal on all ranks, and one all-reduce of the staging row agrees on all amaxes, whatever ran where. Scales change
at the step boundary. Under `autocast` without a step boundary, those of x and w change when the region ends, and those of dy at
the end of the backward of what ran in it.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dlp.comm.amax import agree
from dlp.comm.lockstep import Lockstep
from dlp.parallel.model.checks import Flags, StaleWeights, capturing, check_gathered
from dlp.quant.quantizer import ScaleSlot, SlotOptions
from dlp.quant.recipe import Recipe
from dlp.quant.state import ForwardScales, ScalingState, SlotUse
from dlp.quant.stats import StatsTable

FORWARD = ("x", "w", "y")  # tensors that forward casts
LOG = logging.getLogger("dlp")
_STEPPING: ContextVar[list[Session] | None] = ContextVar("dlp_stepping", default=None)
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Spec(Protocol):
    """What a session reads of a spec, `dlp.parallel.linear.spec.LinearSpec`."""

    @property
    def name(self) -> str: ...

    @property
    def members(self) -> tuple[str, ...]: ...

    @property
    def recipe(self) -> Recipe: ...

    @property
    def slots(self) -> Mapping[str, tuple[str, SlotOptions]]: ...

    @property
    def draws(self) -> bool: ...


class Bound(Protocol):
    """What a session reads of a bound spec, `dlp.parallel.linear.state.BoundSpec`."""

    calls: dict[Any, Any]

    @property
    def spec(self) -> Spec: ...


class Layer(Protocol):
    """What a session reads of a layer, `dlp.parallel.linear.state.LayerState`. bound: its own spec; specs(): that, and those
    that it has run under in autocast regions."""

    bound: Any
    variants: dict[Any, Any]
    ran_under: Any  # `dlp.parallel.model.autocast.LayerRuns`
    members: Any
    weights: Any  # `dlp.parallel.weight.base.LayerWeights`
    stats: StatsTable | None

    @property
    def session(self) -> Session: ...

    @property
    def spec(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    def specs(self) -> list[Any]: ...

    def with_recipe(self, recipe: Recipe) -> Any: ...

    def set_spec(self, spec: Any, session: Any = None) -> None: ...


class PartialSums(Protocol):
    """What a session reads of `dlp.parallel.model.grads.PartialGradients`, which sums partial gradients over tp."""

    group: ProcessGroup
    num_sums: int
    slots: Any

    def check_announced(self) -> None: ...

    def check_summed(self, since: int) -> int: ...

    def check_complete(self, optimizer: Optimizer) -> None: ...


class UpdateAfterBackward(NamedTuple):
    """Marks scales of a forward in an autocast region: at the end of its backward the scales of dy are updated, agreed over
    `group`, None: the model's own group."""

    group: ProcessGroup | None


@dataclass(frozen=True)
class Swap:
    """Layers, by name, that get another recipe after `step` optimizer steps. asked: the recipe's name or table, by which a
    resumed run can repeat the swap, None for a recipe made in Python; said: the recipe as it prints."""

    step: int
    layers: tuple[str, ...]
    asked: Any
    said: str


class Session:
    """The state that the layers of one model share; see the module.

    seed         of stochastic rounding
    dp           (rank, size): which tokens of a global microbatch this rank has
    amax_group   the ranks that share delayed scales; None: this rank alone
    lone         it is of a single layer, with no model around it that counts microbatches
    groups       this rank's group on each axis of the mesh
    """

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False,
        groups: Mapping[str, ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.dp = seed, dp
        self.amax_group, self.lone, self.groups = amax_group, lone, dict(groups or {})
        # layers
        self.cores: list[Layer] = []
        self.bounds: list[Bound] = []  # of all specs that layers run or ran under: a backward may still need one
        self.plan: Any = None  # the `Plan` that `convert` returned; None: layers made by hand
        self.noted: set[str] = set()  # texts of `note`
        # casts
        self._scaling: ScalingState | None = None
        self.loaded: dict[
            str, dict[str, Tensor]
        ] = {}  # slots of autocast regions that have not run since they were loaded
        self.scales: ForwardScales | None = None  # that casts read now; None: those in the table
        self.flags = Flags()
        self.stats: StatsTable | None = None
        self.draws = False  # a layer rounds stochastically, so microbatches are counted
        self.watches_scales: Callable[..., None] | None = None  # called before each gather, as `check_gathered`
        # passes
        self.ran: set[tuple[str, ...]] = set()  # layers that ran with gradients since the last boundary, by members
        self.last: Spec | None = None  # of the layer that ran last
        self.direction = "forward"  # in which it ran
        self.waiting: deque[tuple[Any, Callable[..., Tensor]]] = (
            deque()
        )  # (weight, its delayed wgrad), see `backward_dw`
        self.regions = False  # a layer has run in an autocast region
        self.graphing = False  # inside `graphing`
        self.graphed: set[tuple[str, ...]] = set()  # layers that a CUDA graph holds, by members
        self._task: int | None = None  # the id of the backward at whose end scales of dy will be updated
        # the step boundary
        self.steps = 0
        self.attached = False  # an optimizer's step is the step boundary
        self.optimizers: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # attached; see `count_step`
        self.swaps: list[Swap] = []
        self.scheduled: list[tuple[Swap, Any]] = []  # (swap, its recipe)
        self.weight_batch: Any = None  # `dlp.parallel.weight.base.WeightBatch`, once weights are cast
        self.stale = StaleWeights()
        self.at_first_forward: Callable[[nn.Module], None] | None = None  # called once, with the model
        self.sums: PartialSums | None = None
        self.replicas: Any = (
            None  # `dlp.parallel.model.replicas.Replicas`, of the model that `convert` or `attach` was given
        )
        self.lockstep = Lockstep(self.groups)
        self.meets: RemovableHandle | None = None  # of the hook `meet`

    # ---- called by layers, in forward and backward

    def begin_forward(self, bound: Bound, record: bool) -> None:
        """A forward of a layer begins; `record`: with gradients enabled."""
        self.last, self.direction = bound.spec, "forward"
        if self.graphing or capturing():
            self.graphed.add(bound.spec.members)
        if record:
            self.ran.add(bound.spec.members)
            if self.lone and self.draws:
                self.advance()

    def in_layer_backward(self, bound: Bound) -> None:
        """A backward of a layer begins, of a forward that ran with `scales`. If that was in an autocast region, the scales of
        dy are updated at the end of the running backward, once for all layers. RuntimeError where partial gradients would not
        be summed."""
        self.last, self.direction = bound.spec, "backward"
        if self.sums is not None:
            self.sums.check_announced()
        if self.scales is None or self.attached or not isinstance(self.scales.behind, UpdateAfterBackward):
            return
        task, group = torch._C._current_graph_task_id(), self.scales.behind.group
        if task != self._task:
            self._task = task
            _ENGINE.queue_callback(lambda: self.update_scales(False, group))

    def slot(self, name: str, spec: Spec, record: bool) -> ScaleSlot:
        """The delayed scale of one tensor, for its cast by a layer of this spec. `record`: the amax of the cast counts."""
        return self.scaling.slot(name, record, None if self.attached else self.scales, spec.slots[name][1])

    def flag(self, members: tuple[str, ...], tensor: str, member: str, device: torch.device) -> Tensor:
        """fp32 [], which casts of one tensor set to NaN where a value is not finite; `members`: of the tensor's layer."""
        flag = self.flags.views.get((member, tensor, device))
        if flag is None:
            self.flags.reserve(members, device, sum(len(core.members) for core in self.cores))
            flag = self.flags.views[member, tensor, device]
        return flag

    @cached_property
    def counter(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((), dtype=torch.int64, device=self.cores[0].device)

    def kept_memory(self, spec: Spec) -> list[Tensor]:
        """The tensors besides operands that launches of a layer read and write. Their addresses stay until `rebuild`."""
        kept = [*self.flags.now, *(self.scaling.memory if spec.slots else ())]
        return [*kept, self.counter] if spec.draws else kept

    def note(self, text: str) -> None:
        """Log a line that amends the plan: once, on rank 0, however many layers it holds for."""
        if text not in self.noted:
            self.noted.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOG.warning("plan: %s", text)

    def check_not_graphed(self, layers: Iterable[Layer]) -> None:
        """ValueError for a swap of layers whose recipe a CUDA graph holds."""
        held = next((layer.spec for layer in layers if layer.spec.members in self.graphed), None)
        if held is not None:
            raise ValueError(
                f"{held.name}: a CUDA graph holds its recipe {held.recipe}, which replays would go on with; set recipes inside "
                f"of dlp.graphing(model), which forgets the graphs before it, and make them anew there"
            )

    # ---- microbatches

    def advance(self) -> None:
        """Count a microbatch; not in a backward, which recomputes a forward."""
        if not in_backward():
            self.counter.add_(1)

    def meet(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The first forward pre-hook of the session's model: compare what ranks do in the first step."""
        if torch.compiler.is_dynamo_compiling() or self.lockstep.over or not torch.is_grad_enabled():
            return
        if self.cores and not (in_backward() or capturing()):
            self.lockstep.forward((args, kwargs), self.cores[0].device, is_sharded(model))

    def before_forward(self, model: nn.Module, args: Any) -> None:
        """The forward pre-hook of the session's model."""
        if self.at_first_forward is not None and not torch.compiler.is_dynamo_compiling():
            look, self.at_first_forward = self.at_first_forward, None
            look(model)
        if self.attached and not torch.compiler.is_dynamo_compiling():
            if self.stale.may_have_moved() and not in_backward():
                self.stale.drop_moved()
            if not torch.is_grad_enabled() and not in_backward():
                self.stale.check_values()
        if self.stats is not None:
            self.stats.recording = torch.is_grad_enabled() or not self._trains()
        if self.draws and torch.is_grad_enabled() and self.cores:
            if torch.compiler.is_dynamo_compiling():
                torch.ops.dlp.count_microbatch(self.cores[0].bound.spec_id)
            else:
                self.advance()

    def _trains(self) -> bool:
        """Whether any weight requires a gradient."""
        members = (member for core in self.cores for member in core.members)
        return any(getattr(member.module, member.weight).requires_grad for member in members)

    # ---- delayed scales

    def specs(self) -> list[Spec]:
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
        """Make the table of scales anew after layers got other recipes; slots that are in both tables keep their state."""
        if self._scaling is None:
            return
        self._scaling = self._scaling.replaced_by(self._make_scaling())
        for bound in self.bounds:  # their captured launches read the old table
            bound.calls.clear()
        for core in self.cores:
            if core.weights.parts is not None:
                core.weights.parts.calls.clear()

    def update_scales(self, forward: bool | None = None, group: ProcessGroup | None = None) -> None:
        """Agree on staged amaxes and update the scales. Every rank of the amax group calls it, whatever it ran.

        forward   None: all slots; True or False: those that forward or backward casts
        group     the amax group of an autocast region; None: the session's own
        """
        shared = group or self.amax_group
        self.scales = None
        if shared is None or shared.size() == 1:
            self.scaling.update(None, forward)
        else:
            self.scaling.update(lambda staged: agree([staged], shared)[0], forward)

    def leave_region(self, group: ProcessGroup | None) -> None:
        """The outermost autocast region ends: update the scales of what forward casts, over the region's `group`."""
        if not self.attached and self.has_slots():
            self.update_scales(True, group)

    # ---- the step boundary

    def end_step(self) -> None:
        """The session's part of the step boundary: close the step's statistics, update delayed scales. The amax of a weight,
        which was recorded at the last boundary, counts only if its layer has run since."""
        if self.stats is not None:
            self.stats.close()
        if self.has_slots():
            idle = [spec for spec in self.specs() if spec.members not in self.ran | self.graphed]
            self.scaling.forget({name for spec in idle for name, (tensor, _) in spec.slots.items() if tensor == "w"})
            self.update_scales()
        self.ran.clear()

    @property
    def swaps_next(self) -> bool:
        """Whether the boundary of the running step will swap recipes."""
        return any(swap.step <= self.steps + 1 for swap, _ in self.scheduled)

    def count_step(self, optimizer: Optimizer) -> None:
        """An attached optimizer has stepped. Several optimizers take turns, and a round of turns is one step: `optimizers`
        holds who has had its turn."""
        found = _STEPPING.get()
        if found is not None and self not in found:
            found.append(self)
        if self.optimizers[optimizer] or not any(self.optimizers.values()):
            self.steps += 1
            for each in list(self.optimizers):
                self.optimizers[each] = False
        self.optimizers[optimizer] = True

    def before_any_step(self, optimizer: Optimizer) -> None:
        """The pre-hook of all optimizers' steps, attached or not: what holds without `attach`, too."""
        if self.replicas is None or not self.replicas.groups or (self.attached and self.lockstep.over):
            return
        if torch.compiler.is_dynamo_compiling() or not self.replicas.holds_some(optimizer):
            return
        if not in_backward():
            if not self.lockstep.over and self.cores and not capturing():
                self.lockstep.step(self.cores[0].device, is_sharded(self.replicas.model))
            if not self.attached:
                self.replicas.look_unattached()
        elif self.sums is not None and not self.attached:
            self.sums.check_complete(optimizer)

    def look(self) -> None:
        """Compare replicas before the next step, where `replicas` does so; for steps that a CUDA graph replays, which call no
        hooks."""
        if self.replicas is not None:
            self.replicas.look(self.steps)

    def after_any_step(self, optimizer: Optimizer) -> None:
        """The post-hook of all optimizers' steps, attached or not."""
        foreign, layers = optimizer not in self.optimizers, [core.weights for core in self.cores]
        if foreign and self.stale.count_step(optimizer, layers) and self.attached:
            self.note(
                f"an {type(optimizer).__name__} that is not attached steps on weights, which are cast where they are used "
                f"until an attached one steps: call dlp.attach for it too"
            )

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        new = Session(seed=self.seed, dp=self.dp, amax_group=self.amax_group, lone=self.lone, groups=self.groups)
        memo |= {id(self): new, id(self.plan): self.plan}
        vars(new).update(copy.deepcopy(self._taken(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """ValueError for a model with process groups, which cannot be pickled."""
        if self.amax_group is not None:
            cannot_pickle(self.cores[0].spec.name)
        bounds = [core.bound for core in self.cores]
        return self._taken() | {"seed": self.seed, "dp": self.dp, "lone": self.lone, "bounds": bounds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Session()) | state)

    def _taken(self) -> dict[str, Any]:
        """What a copy of the model takes along: layers and their scales; neither attached optimizers, nor what is cached for
        the next calls."""
        names = ("cores", "sums", "steps", "swaps", "scheduled", "plan", "noted", "draws", "_scaling")
        return {name: getattr(self, name) for name in (*names, *(["counter"] if "counter" in vars(self) else []))}


@contextmanager
def stepping(found: list[Session]) -> Iterator[None]:
    """Append the sessions whose attached optimizers step inside to `found`."""
    token = _STEPPING.set(found)
    try:
        yield
    finally:
        _STEPPING.reset(token)


# ---- the session of a model


def session_of(model: nn.Module) -> Session:
    """The session of this model, or of the converted model inside it. ValueError before `convert` or `attach`."""
    root = converted_root(model)
    if root is None:
        raise ValueError("this model has no step boundary yet: call dlp.convert or dlp.attach on it first")
    found: Session = root.dlp_session  # type: ignore[assignment]
    return found


def converted_root(model: nn.Module) -> nn.Module | None:
    """The module that `convert` or `attach` was called with: this model, or a module in it; None: there is none. ValueError for
    several."""
    if "dlp_session" in vars(model):
        return model
    roots = {name: module for name, module in model.named_modules() if "dlp_session" in vars(module)}
    if len(roots) > 1:
        raise ValueError(f"{' and '.join(roots)} are converted models of their own: call this for each of them")
    return next(iter(roots.values()), None)


def give_session(model: nn.Module, session: Session) -> None:
    """Make this the session of `model`, each of whose forwards is a microbatch."""
    model.dlp_session = session  # type: ignore[assignment]
    meet_first(model)
    model.register_forward_pre_hook(session.before_forward)
    _watch_optimizers(session)


_WATCHING: weakref.WeakSet[Session] = weakref.WeakSet()  # sessions of models
_REGISTERED: list[RemovableHandle] = []  # the two hooks


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for session in list(_WATCHING):
        session.before_any_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for session in list(_WATCHING):
        session.after_any_step(optimizer)


def _watch_optimizers(session: Session) -> None:
    """Call `before_any_step` and `after_any_step` around each step of any optimizer, as long as the session lives. The hooks
    stay: torch iterates over the hooks while they run, and a model that dies meanwhile must not remove one."""
    if not _REGISTERED:
        _REGISTERED.append(register_optimizer_step_pre_hook(_before_step))
        _REGISTERED.append(register_optimizer_step_post_hook(_after_step))
    _WATCHING.add(session)


def meet_first(model: nn.Module) -> None:
    """Let ranks compare what they do before any other hook of the session's model, FSDP's among them, waits for a rank."""
    session: Session = model.dlp_session  # type: ignore[assignment]
    if session.meets is not None:
        session.meets.remove()
    session.meets = model.register_forward_pre_hook(session.meet, prepend=True, with_kwargs=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP shards the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def not_finite(model: nn.Module) -> list[str]:
    """Return names of tensors that contained a NaN or Inf when this rank cast them in the last step or since.

    Waits for the device. Tensors in high precision are not checked, since NaN and Inf stay in them.

    Args:
        model: converted and attached model.

    Returns:
        Names such as "x of model.layers.3.mlp.up_proj", in the order of forward.

    Raises:
        ValueError: before `dlp.convert` or `dlp.attach`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> dlp.not_finite(model)
        []
    """
    return session_of(model).flags.bad_now()


@contextmanager
def watch_scales(model: nn.Module) -> Iterator[None]:
    """Check in each gather that parts which are not sent are equal on all ranks. A context manager for debugging.

    Each gather costs one small reduction and a wait for the device. All ranks enter the region together.

    Args:
        model: converted model.

    Yields:
        None.

    Raises:
        RuntimeError: on all ranks of the tp group, where these parts differ.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> with dlp.watch_scales(model):
        ...     y = model(torch.randn(16, 64))
    """
    session = session_of(model)
    session.watches_scales = check_gathered
    try:
        yield
    finally:
        session.watches_scales = None


@contextmanager
def graphing(model: nn.Module) -> Iterator[None]:
    """Prepare layers of a model for `torch.cuda.make_graphed_callables`. A context manager.

    Warm-up passes inside the region leave no amaxes, no non-finite flags and no microbatches behind. Replays run kernels and no
    Python: the step boundary, outside the graph, updates operands of weights and delayed scales in place, and a recipe stays as
    captured. Afterwards a recipe change of these layers raises ValueError. To change a recipe, delete `model.block.forward`,
    set the recipe inside a new region, and capture again. Release results of earlier passes, such as a loss, before the
    capture: autograd nodes that they keep alive belong to the default stream, for which a capture must not wait.

    Args:
        model: converted and attached model.

    Yields:
        None.

    Raises:
        ValueError: for delayed scales without `dlp.attach`, and before `dlp.convert` or `dlp.attach`.

    Examples:
        >>> with dlp.graphing(model):  # doctest: +SKIP
        ...     model.block = torch.cuda.make_graphed_callables(model.block, (x,))
    """
    session = session_of(model)
    delayed = session.has_slots()
    if delayed and not session.attached:
        raise ValueError("dlp.graphing: delayed scales change at an optimizer's step: call dlp.attach before")
    session.graphed, session.graphing = set(), True
    try:
        with without_effects(session):
            yield
    finally:
        session.graphing = False


@contextmanager
def without_effects(session: Session) -> Iterator[None]:
    """Passes inside leave no amax, no flag of something not finite and no microbatch behind."""
    kept = [(memory, memory.clone()) for memory in _written(session, session.has_slots())]
    ran = set(session.ran)
    try:
        yield
    finally:
        session.ran = ran
        known = {memory.data_ptr() for memory, _ in kept}
        with torch.no_grad():
            for memory, before in kept:
                memory.copy_(before)
            for flags in session.flags.now:
                if flags.data_ptr() not in known:  # made inside
                    flags.zero_()


def _written(session: Session, delayed: bool) -> list[Tensor]:
    """The tensors that passes write and that a step boundary, or the next pass, reads."""
    staged = [session.scaling.table.staging] if delayed else []
    return [*staged, *session.flags.now, *([session.counter] if session.draws and session.cores else [])]


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def cannot_pickle(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: a model that is spread over ranks cannot be pickled, since process groups cannot; save its state_dict(), or "
        f"pickle the model before dlp.convert"
    )
