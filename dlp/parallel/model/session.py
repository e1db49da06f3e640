"""Session: the `StepState` of the layers of one model, with the hooks of the model and of its optimizers.
Attributes of a session:

    steps       optimizer steps so far
    swaps       recipe changes that were made
    scheduled   future recipe changes (`dlp.parallel.model.boundary`)
    stale       detects weights that have changed since the boundary cast them (`dlp.parallel.model.checks`)
    lockstep    in the first step, checks that all ranks run the same forwards and optimizer steps

Layers read only the base class `dlp.parallel.linear.state.StepState`. The step boundary is in `dlp.parallel.model.boundary`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dlp.comm.lockstep import Lockstep
from dlp.kernels.launches import capturing
from dlp.parallel.linear.state import StepState
from dlp.parallel.linear.step import in_backward
from dlp.parallel.model.checks import StaleWeights, check_gathered

_STEPPING: ContextVar[list[Session] | None] = ContextVar("dlp_stepping", default=None)


class Session(StepState):
    """State of a model for which `convert` or `attach` has set up the step boundary; see also the module docstring.

    plan                the `Plan` that `convert` returned; None if `attach` created the session
    optimizers          attached optimizer -> whether it has stepped in the current step, see `count_step`
    at_first_forward    function that the first forward calls with the model; None afterwards
    sums                `PartialGradients` of the model; None: `attach` created the session, and no layer has several tp ranks
    replicas            `Replicas` of the model
    meets               handle of the forward pre-hook `meet`
    """

    def __init__(self, **state: Any) -> None:
        super().__init__(**state)
        self.plan: Any = None
        self.optimizers: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self.stale = StaleWeights()
        self.at_first_forward: Callable[[nn.Module], None] | None = None
        self.sums: Any = None
        self.replicas: Any = None
        self.lockstep = Lockstep(self.groups)
        self.meets: RemovableHandle | None = None

    # ---- called by layers and weights

    @property
    def sum_group(self) -> ProcessGroup | None:
        return None if self.sums is None else self.sums.group

    def sum_partial(self, sums: Any) -> Any:
        """Use `sums`, a `dlp.parallel.model.grads.PartialGradients`, to sum partial gradients over tp."""
        self.sums, self.check_gradients = sums, sums.check_announced if sums.sums_any else None
        return sums

    def is_moved(self, weights: Any) -> bool:
        return self.stale.moved(weights)

    def check_compiled_weights(self, values: bool) -> None:
        if not in_backward():
            self.stale.refuse_moved()
            if values:
                self.stale.check_values()

    def weights_cast(self, weights: Sequence[Any]) -> None:
        self.stale.cast(weights)

    def hook_first(self, model: nn.Module) -> None:
        """Put `meet` before all other forward pre-hooks of the model.

        The other hooks are removed and added again, because torch.compile of torch 2.11 reads hooks in the order in which
        they were added, also with `prepend=True`."""
        if self.meets is not None:
            self.meets.remove()
        hooks: dict[int, Any] = model._forward_pre_hooks
        others = list(hooks)
        self.meets = model.register_forward_pre_hook(self.meet, with_kwargs=True)
        for key in others:
            hooks[key] = hooks.pop(key)

    # ---- hooks of the model

    def meet(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """First forward pre-hook of the session's model: in the first step, check that all ranks run the same forwards."""
        if torch.compiler.is_dynamo_compiling() or self.lockstep.over or not torch.is_grad_enabled():
            return
        if self.cores and not (in_backward() or capturing()):
            self.lockstep.forward((args, kwargs), self.cores[0].device, is_sharded(model))

    def before_forward(self, model: nn.Module, args: Any) -> None:
        """Forward pre-hook of the session's model: call `at_first_forward`, count the microbatch for stochastic rounding, and
        decide whether statistics count this forward. If an optimizer is attached, also drop casts of changed weights, and check
        samples of the weights if gradients are disabled. Compiled code, which cannot drop casts, refuses changed weights."""
        if self.at_first_forward is not None and not torch.compiler.is_dynamo_compiling():
            look, self.at_first_forward = self.at_first_forward, None
            look(model)
        if self.attached and torch.compiler.is_dynamo_compiling():
            if self.cores:
                torch.ops.dlp.check_weights(self.cores[0].bound.spec_id, not torch.is_grad_enabled())
        elif self.attached:
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

    # ---- the step boundary

    @property
    def swaps_next(self) -> bool:
        """Whether the boundary of the running step will change recipes."""
        return any(swap.step <= self.steps + 1 for swap, _ in self.scheduled)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Register an optimizer. Raises ValueError for an optimizer that is attached already."""
        if optimizer in self.optimizers:
            raise ValueError(
                "dlp.attach: this optimizer is attached to this model already; call dlp.attach once per optimizer"
            )
        self.optimizers[optimizer] = False

    def count_step(self, optimizer: Optimizer) -> bool:
        """Count a step of an attached optimizer. Returns whether this optimizer is the first that steps in the current step of
        the session.

        With several optimizers, one step of each counts as one step of the session: `optimizers` maps each optimizer to
        whether it has stepped in the current step of the session."""
        found = _STEPPING.get()
        if found is not None and self not in found:
            found.append(self)
        first = self.optimizers[optimizer] or not any(self.optimizers.values())
        if first:
            self.steps += 1
            for each in list(self.optimizers):
                self.optimizers[each] = False
        self.optimizers[optimizer] = True
        return first

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Pre-hook of the steps of all optimizers: run the checks that do not require `attach`."""
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
        """Compare replicas before the next step, if a comparison is due. Replays of a CUDA graph, which run no hooks, call this
        method."""
        if self.replicas is not None:
            self.replicas.look(self.steps)

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Post-hook of the steps of all optimizers: record weights that an optimizer without `attach` has changed."""
        foreign, layers = optimizer not in self.optimizers, [core.weights for core in self.cores]
        if foreign and self.stale.count_step(optimizer, layers) and self.attached:
            self.note(
                f"an {type(optimizer).__name__} that is not attached has changed weights; until the next step of an "
                f"attached optimizer, each forward and backward casts them: call dlp.attach for this optimizer too"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Return the session of a copied model. Optimizers of the copy are watched, and replicas of its parameters are
        compared if the model was copied, not only a layer of the model."""
        new = super().__deepcopy__(memo)
        assert isinstance(new, Session)
        model = None if self.replicas is None else memo.get(id(self.replicas.model))
        new.replicas = None if model is None else self.replicas.of_copy(model)
        _watch_optimizers(new)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _watch_optimizers(self)

    def share(self, memo: dict[int, Any]) -> None:
        memo[id(self.plan)] = self.plan

    def _taken(self) -> dict[str, Any]:
        return super()._taken() | {"sums": self.sums, "check_gradients": self.check_gradients, "plan": self.plan}


@contextmanager
def stepping(found: list[Session]) -> Iterator[None]:
    """Append to `found` each session whose attached optimizer steps inside of this context."""
    token = _STEPPING.set(found)
    try:
        yield
    finally:
        _STEPPING.reset(token)


# ---- the session of a model


def session_of(model: nn.Module) -> Session:
    """Return the session of this model, or of the converted model in it. Raises ValueError before `convert` or `attach`."""
    root = converted_root(model)
    if root is None:
        raise ValueError("this model has no step boundary yet: call dlp.convert or dlp.attach on the model first")
    found: Session = root.dlp_session  # type: ignore[assignment]
    return found


def converted_root(model: nn.Module) -> nn.Module | None:
    """Return the module that `convert` or `attach` was called with: this model, or a module in it; None if there is none.

    Raises ValueError if there are several."""
    if "dlp_session" in vars(model):
        return model
    roots = {name: module for name, module in model.named_modules() if "dlp_session" in vars(module)}
    if len(roots) > 1:
        raise ValueError(f"{' and '.join(roots)} are separate converted models: call this function for each of them")
    return next(iter(roots.values()), None)


def give_session(model: nn.Module, session: Session) -> None:
    """Make this the session of `model`. Each forward of `model` is a microbatch."""
    model.dlp_session = session  # type: ignore[assignment]
    session.hook_first(model)
    model.register_forward_pre_hook(session.before_forward)
    _watch_optimizers(session)


_WATCHING: weakref.WeakSet[Session] = weakref.WeakSet()  # sessions of models that are alive
_REGISTERED: list[RemovableHandle] = []  # handles of `_before_step` and `_after_step`


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for session in list(_WATCHING):
        session.before_any_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for session in list(_WATCHING):
        session.after_any_step(optimizer)


def _watch_optimizers(session: Session) -> None:
    """Call `before_any_step` and `after_any_step` around each step of any optimizer, as long as the session exists.

    The hooks are never removed: torch iterates over the hooks while they run, and a model that is freed during this loop must
    not change them."""
    if not _REGISTERED:
        _REGISTERED.append(register_optimizer_step_pre_hook(_before_step))
        _REGISTERED.append(register_optimizer_step_post_hook(_after_step))
    _WATCHING.add(session)


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
    """Check in each gather that scales which are not sent are equal on all ranks. A context manager for debugging.

    Each gather costs one small reduction and a wait for the device. All ranks enter the region together.

    Args:
        model: converted model.

    Yields:
        None.

    Raises:
        RuntimeError: on all ranks of the tp group, if these scales differ.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> with dlp.watch_scales(model):
        ...     y = model(torch.randn(16, 64))
    """
    session = session_of(model)
    session.before_gather = check_gathered
    try:
        yield
    finally:
        session.before_gather = None


@contextmanager
def graphing(model: nn.Module) -> Iterator[None]:
    """Let `torch.cuda.make_graphed_callables` capture layers of a model. A context manager.

    Warm-up passes inside the region do not change amaxes, non-finite flags and the microbatch counter. Replays run kernels and
    no Python: the step boundary, outside the graph, updates operands of weights and delayed scales in place, and a recipe stays
    as captured. Afterwards a recipe change of these layers raises ValueError. To change a recipe, delete the attribute
    `forward` of the captured module, set the recipe inside a new region, and capture again. Release results of earlier passes,
    such as a loss, before the capture: autograd nodes that these results keep alive belong to the default stream, for which a
    capture must not wait.

    Args:
        model: converted and attached model.

    Yields:
        None.

    Raises:
        ValueError: for delayed scales without `dlp.attach`, and before `dlp.convert` or `dlp.attach`.

    Examples:
        On a GPU:

        >>> with dlp.graphing(model):  # doctest: +SKIP
        ...     model.block = torch.cuda.make_graphed_callables(model.block, (x,))
    """
    session = session_of(model)
    delayed = session.has_slots()
    if delayed and not session.attached:
        raise ValueError(
            "dlp.graphing: delayed scales change at the optimizer step: call dlp.attach before dlp.graphing"
        )
    session.graphed, session.graphing = set(), True
    try:
        with without_effects(session):
            yield
    finally:
        session.graphing = False


@contextmanager
def without_effects(session: Session) -> Iterator[None]:
    """Context in which passes have no lasting effect: at its end, amaxes, non-finite flags and the microbatch counter get their
    earlier values back."""
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
                if flags.data_ptr() not in known:  # allocated inside the context: the earlier value is 0
                    flags.zero_()


def _written(session: Session, delayed: bool) -> list[Tensor]:
    """Return the tensors that passes write, and that a step boundary or the next pass reads."""
    staged = [session.scaling.table.staging] if delayed else []
    return [*staged, *session.flags.now, *([session.counter] if session.draws and session.cores else [])]
