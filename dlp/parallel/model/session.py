"""Session: what the layers of one model share. Forward and backward read it; the step boundary changes it.

    scaling    the scales of delayed scaling, one table over all layers (`dlp.quant.state`); casts read scales and max amaxes
               into its staging row
    flags      which tensors were not finite when they were cast (`dlp.parallel.model.checks`)
    counter    microbatches so far, int64 [] on the device: the random bits of stochastic rounding depend on it
    steps      optimizer steps so far; `swaps`, `scheduled`: the recipe swaps made and to come (`dlp.parallel.model.boundary`)
    stale      which weights are others than those that the boundary has cast (`dlp.parallel.model.checks`)

A layer is given its session and asks it, in forward and backward, for no more than

    begin_forward, in_layer_backward      it says that it runs
    slot, flag                            where a cast reads its scale, and tells its amax and that a value was not finite
    seed, dp, counter                     where in the stream of random bits a cast begins
    scales                                the delayed scales of the forward that runs, is run again or is differentiated
    kept_memory                           all of that which captured launches refer to by address
    waiting                               wgrads that are left to `backward_dw`
    note                                  a line that amends the printed plan

A session knows its layers as `Layer`, and imports none: a layer made by hand makes its own, which knows no other layer, and
gets that of the model around it from `convert` or `attach` (`dlp.parallel.model.boundary`, where the step boundary is).

The table of scales is made when it is first needed, for every layer of the model, whether or not it runs on this rank:
tables are equal on all ranks, so one all-reduce of the staging row agrees on everything and waits for nobody. Scales change
at the step boundary. A model without one, used under `autocast`, updates those of x and w when the region ends and those of
dy at the end of the backward of what ran in it.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlp.comm.amax import agree
from dlp.parallel.model.checks import Flags, StaleWeights, capturing
from dlp.quant.quantizer import ScaleSlot, SlotOptions
from dlp.quant.recipe import Recipe
from dlp.quant.state import ForwardScales, ScalingState, SlotUse
from dlp.quant.stats import StatsTable

FORWARD = ("x", "w", "y")  # tensors that forward casts
LOG = logging.getLogger("dlp")
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Spec(Protocol):
    """What a session reads of a layer's spec: `dlp.parallel.linear.spec.LinearSpec`."""

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
    """A spec as one layer runs it: `dlp.parallel.linear.state.BoundSpec`."""

    calls: dict[Any, Any]

    @property
    def spec(self) -> Spec: ...


class Layer(Protocol):
    """What a session knows of a layer. `bound`: its own spec; `specs`: with those it has run under in autocast regions."""

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
    """Gradients that are parts of a sum over tp: `dlp.parallel.model.grads.PartialGradients`."""

    group: ProcessGroup
    num_sums: int
    slots: Any

    def check_announced(self) -> None: ...

    def check_summed(self, since: int) -> int: ...


class UpdateBehind(NamedTuple):
    """A forward ran in an autocast region: at the end of its backward dy's scales follow, agreed over `group`, None for the
    model's own."""

    group: ProcessGroup | None


@dataclass(frozen=True)
class Swap:
    """Layers by name that get a recipe after so many optimizer steps. `asked`: a recipe's name or table, from which the
    swap can be repeated; None where it was made in Python. `said`: how it prints."""

    step: int
    layers: tuple[str, ...]
    asked: Any
    said: str


class Session:
    """`seed`: of stochastic rounding. `dp` = (rank, size): which tokens of a global microbatch this rank has.
    `amax_group`: who shares delayed scales, None for this rank alone. `lone`: of a single layer, which has no model
    around it that would count microbatches."""

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False
    ) -> None:
        self.seed, self.dp = seed, dp
        self.amax_group, self.lone = amax_group, lone
        # its layers, and what conversion made of them
        self.cores: list[Layer] = []
        self.bounds: list[Bound] = []  # of all specs that layers run or ran under: a backward may still need one
        self.plan: Any = None  # as `convert` printed it; None: layers made by hand
        self.noted: set[str] = set()
        # what casts read and write
        self._scaling: ScalingState | None = None
        self.scales: ForwardScales | None = None  # None: those in the table
        self.flags = Flags()
        self.stats: StatsTable | None = None
        self.draws = False  # a layer rounds by chance, so microbatches are counted
        self.watches_scales = False  # gathers first compare what they do not send
        # what ran since the last step boundary
        self.ran: set[tuple[str, ...]] = set()  # layers, with gradients
        self.last: Spec | None = None  # the layer that ran last
        self.way = "forward"  # in which direction
        self.waiting: deque[tuple[Any, Callable[..., Tensor]]] = deque()  # wgrads of weights (see `backward_dw`)
        self.regions = False  # a layer has run in an autocast region
        self.graphing = False  # CUDA graphs are being made of layers (see `graphing`)
        self.graphed: set[tuple[str, ...]] = set()  # layers of which there are some
        self._task: int | None = None  # the backward whose end will update dy's scales
        # the step boundary
        self.steps = 0
        self.attached = False  # an optimizer's step is the step boundary
        self.optimizers: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # attached; whether it took its turn
        self.swaps: list[Swap] = []
        self.scheduled: list[tuple[Swap, Any]] = []  # swaps to come, with their recipes
        self.weight_batch: Any = None  # `dlp.parallel.weight.base.WeightBatch`, once weights are cast
        self.stale = StaleWeights()
        self.sums: PartialSums | None = None
        self.replicas: Any = None  # `dlp.parallel.model.grads.Replicas`, once an optimizer is attached

    # ---- asked by layers, in forward and backward

    def begin_forward(self, bound: Bound, record: bool) -> None:
        """A layer runs; `record`: with gradients."""
        self.last, self.way = bound.spec, "forward"
        if self.graphing or capturing():
            self.graphed.add(bound.spec.members)
        if record:
            self.ran.add(bound.spec.members)
            if self.lone and self.draws:
                self.advance()

    def in_layer_backward(self, bound: Bound) -> None:
        """A layer differentiates a forward that ran with `scales`. If that was in a region, the end of the backward that is
        running now updates what it staged; every layer asks for it, it is done once. RuntimeError where partial gradients
        would not be summed."""
        self.last, self.way = bound.spec, "backward"
        if self.sums is not None:
            self.sums.check_announced()
        if self.scales is None or self.attached or not isinstance(self.scales.behind, UpdateBehind):
            return
        task, group = torch._C._current_graph_task_id(), self.scales.behind.group
        if task != self._task:
            self._task = task
            _ENGINE.queue_callback(lambda: self.update_scales(False, group))

    def slot(self, name: str, record: bool) -> ScaleSlot:
        """What a cast of one tensor reads and writes. `record`: its amax counts."""
        return self.scaling.slot(name, record, None if self.attached else self.scales)

    def flag(self, members: tuple[str, ...], tensor: str, member: str, device: torch.device) -> Tensor:
        """What a cast of one tensor, of the layer of these members, tells in whether it was finite."""
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
        """What kernels of a layer read and write that is no operand. It stays where it is until `rebuild`."""
        kept = [*self.flags.now, *(self.scaling.memory if spec.slots else ())]
        return [*kept, self.counter] if spec.draws else kept

    def note(self, text: str) -> None:
        """Amend the plan: said once, on the first rank, however many layers it holds for."""
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
        """The next microbatch begins; not where backward runs a forward again."""
        if not in_backward():
            self.counter.add_(1)

    def before_forward(self, model: nn.Module, args: Any) -> None:
        """The hook of the model that this is the session of."""
        if self.attached and not torch.compiler.is_dynamo_compiling():
            if self.stale.may_have_moved() and not in_backward():
                self.stale.drop_moved()
            if not torch.is_grad_enabled() and not in_backward():
                self.stale.check_values()
        if self.stats is not None:
            self.stats.recording = torch.is_grad_enabled() or not self._learns()
        if self.draws and torch.is_grad_enabled() and self.cores:
            self.advance()

    def _learns(self) -> bool:
        """Whether any weight does."""
        members = (member for core in self.cores for member in core.members)
        return any(getattr(member.module, member.weight).requires_grad for member in members)

    # ---- delayed scales

    def specs(self) -> list[Spec]:
        return [spec for core in self.cores for spec in core.specs()]

    def weights(self) -> list[Any]:
        """Those of all layers, as `dlp.parallel.weight.local.Weight`."""
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
        return ScalingState(uses, self.cores[0].device)

    def rebuild(self) -> None:
        """Layers got another recipe: a table for them, in which slots that stay keep their state."""
        if self._scaling is None:
            return
        self._scaling = self._scaling.replaced_by(self._make_scaling())
        for bound in self.bounds:  # their captured launches read the old table
            bound.calls.clear()
        for core in self.cores:
            if core.weights.parts is not None:
                core.weights.parts.calls.clear()

    def update_scales(self, forward: bool | None = None, group: ProcessGroup | None = None) -> None:
        """Agree on what was staged and let the scales follow: of all slots, or of those that forward (or backward)
        casts. Every rank of the amax group calls it, whatever it ran. `group`: that of an autocast region."""
        shared = group or self.amax_group
        self.scales = None
        if shared is None or shared.size() == 1:
            self.scaling.update(None, forward)
        else:
            self.scaling.update(lambda staged: agree([staged], shared)[0], forward)

    def leave_region(self, group: ProcessGroup | None) -> None:
        """The outermost autocast region ends: forward is over. `group`: that of the region."""
        if not self.attached and self.has_slots():
            self.update_scales(True, group)

    # ---- the step boundary

    def end_step(self) -> None:
        """Close the step's statistics, and update delayed scales. The amax of a weight that was cast at the last boundary
        counts if its layer has run since."""
        if self.stats is not None:
            self.stats.close()
        if self.has_slots():
            idle = [spec for spec in self.specs() if spec.members not in self.ran | self.graphed]
            self.scaling.forget({name for spec in idle for name, (tensor, _) in spec.slots.items() if tensor == "w"})
            self.update_scales()
        self.ran.clear()

    @property
    def swaps_next(self) -> bool:
        """Whether the boundary of the step that runs swaps recipes."""
        return any(swap.step <= self.steps + 1 for swap, _ in self.scheduled)

    def count_step(self, optimizer: Optimizer) -> None:
        """An attached optimizer has stepped. Of several, that take turns, one counts the steps."""
        if self.optimizers[optimizer] or not any(self.optimizers.values()):
            self.steps += 1
            for each in list(self.optimizers):
                self.optimizers[each] = False
        self.optimizers[optimizer] = True

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Behind the step of any optimizer."""
        foreign, layers = optimizer not in self.optimizers, [core.weights for core in self.cores]
        if foreign and self.stale.count_step(optimizer, layers) and self.attached:
            self.note(
                f"an {type(optimizer).__name__} that is not attached steps on weights, which are cast where they are used "
                f"until an attached one steps: call dlp.attach for it too"
            )

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        new = Session(seed=self.seed, dp=self.dp, amax_group=self.amax_group, lone=self.lone)
        memo |= {id(self): new, id(self.plan): self.plan}
        vars(new).update(copy.deepcopy(self._taken(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """ValueError, where a model is pickled, for one that is spread over ranks."""
        if self.amax_group is not None:
            cannot_pickle(self.cores[0].spec.name)
        bounds = [core.bound for core in self.cores]
        return self._taken() | {"seed": self.seed, "dp": self.dp, "lone": self.lone, "bounds": bounds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Session()) | state)

    def _taken(self) -> dict[str, Any]:
        """What goes along when a model is copied: its layers and their scales; not the optimizer that it is attached to, and
        nothing that is prepared for its next calls."""
        names = ("cores", "sums", "steps", "swaps", "scheduled", "plan", "noted", "draws", "_scaling")
        return {name: getattr(self, name) for name in (*names, *(["counter"] if "counter" in vars(self) else []))}


# ---- the session of a model


def session_of(model: nn.Module) -> Session:
    """The session that `convert` or `attach` gave this model, or one inside of it. ValueError where neither has run."""
    root = converted_root(model)
    if root is None:
        raise ValueError("this model has no step boundary yet: call dlp.convert or dlp.attach on it first")
    found: Session = root.dlp_session  # type: ignore[assignment]
    return found


def converted_root(model: nn.Module) -> nn.Module | None:
    """What `convert` or `attach` was given: this model, or the one module of it that has a session; None: there is none.
    ValueError where there are several."""
    if "dlp_session" in vars(model):
        return model
    roots = {name: module for name, module in model.named_modules() if "dlp_session" in vars(module)}
    if len(roots) > 1:
        raise ValueError(f"{' and '.join(roots)} are converted models of their own: call this for each of them")
    return next(iter(roots.values()), None)


def give_session(model: nn.Module, session: Session) -> None:
    """Make this the session of `model`, whose forward begins a microbatch."""
    model.dlp_session = session  # type: ignore[assignment]
    model.register_forward_pre_hook(session.before_forward)
    _watch_optimizers(model, session.after_any_step)


def _watch_optimizers(model: nn.Module, after: Callable[[Optimizer], None]) -> None:
    """Call `after`, a method, behind the step of any optimizer, as long as there is this model. It keeps neither alive."""
    method = weakref.WeakMethod(after)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = method()
        if call is not None:
            call(optimizer)

    weakref.finalize(model, register_optimizer_step_post_hook(hook).remove)


def not_finite(model: nn.Module) -> list[str]:
    """The tensors that held a NaN or Inf when this rank cast them, in the last step or since its boundary, such as
    "x of model.layers.3.mlp.up_proj", in the order of forward. Waits for the device. What is kept in high precision is not
    cast: it hands NaN and Inf on. ValueError before `convert` or `attach`."""
    return session_of(model).flags.bad_now()


@contextmanager
def watch_scales(model: nn.Module) -> Iterator[None]:
    """Inside, each gather first compares the parts that are not sent because all ranks have them. Raises RuntimeError
    on all ranks of the tp group where they differ. For debugging: one small reduction, and a wait for the device, a gather;
    all ranks enter it together."""
    session = session_of(model)
    session.watches_scales = True
    try:
        yield
    finally:
        session.watches_scales = False


@contextmanager
def graphing(model: nn.Module) -> Iterator[None]:
    """Around calls of `torch.cuda.make_graphed_callables` for layers of `model`:

        with dlp.graphing(model):
            model.block = torch.cuda.make_graphed_callables(model.block, (x,))

    The passes inside, which warm up with gradients of whatever lies in memory, leave no amax, no flag of something not finite
    and no microbatch behind. From then on, a swap of a recipe of these layers raises ValueError. Graphs made before are
    forgotten: swap inside, in front of the capture, after `del model.block.forward`.

    A replay runs launches and no Python. What these read stays where it is, and the step boundary, outside of the graph, writes
    there: operands of weights and delayed scales. What Python decided, as a recipe, is in the graph for good.

    Let go of what earlier passes returned, a loss say, before: autograd's nodes of parameters live as long as it does and keep
    the stream they were made on, and CUDA refuses a capture for which the default stream would have to wait.

    Raises ValueError for delayed scales without `attach`, and before `convert` or `attach`.
    """
    session = session_of(model)
    delayed = session.has_slots()
    if delayed and not session.attached:
        raise ValueError("dlp.graphing: delayed scales change at an optimizer's step: call dlp.attach before")
    kept = [(memory, memory.clone()) for memory in _written(session, delayed)]
    ran, session.graphed, session.graphing = set(session.ran), set(), True
    try:
        yield
    finally:
        session.graphing, session.ran = False, ran
        known = {memory.data_ptr() for memory, _ in kept}
        with torch.no_grad():
            for memory, before in kept:
                memory.copy_(before)
            for flags in session.flags.now:
                if flags.data_ptr() not in known:  # made inside
                    flags.zero_()


def _written(session: Session, delayed: bool) -> list[Tensor]:
    """What passes write that a step boundary, or the next pass, will read."""
    staged = [session.scaling.table.staging] if delayed else []
    return [*staged, *session.flags.now, *([session.counter] if session.draws and session.cores else [])]


# ---- where this is


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def cannot_pickle(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: a model that is spread over ranks cannot be pickled, since process groups cannot; save its state_dict(), or "
        f"pickle the model before dlp.convert"
    )
