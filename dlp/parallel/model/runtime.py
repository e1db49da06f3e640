"""Runtime: what changes between steps, one object per model; specs are frozen and refer to it.

    slots     the scales of delayed scaling, one table over all layers; casts read scales and max amaxes into `staging`
    flags     which tensors were not finite when they were cast (see `dlp.parallel.model.flags`)
    counter   microbatches so far, an int64 tensor on the device: the random bits of stochastic rounding depend on it
    steps     optimizer steps so far, and the recipe swaps made and to come (see `dlp.parallel.model.swap`)

The table is made when it is first needed, for every layer of the model, whether or not it runs on this rank: tables
are equal on all ranks, so one all-reduce of the staging row agrees on everything and waits for nobody.

Scales change at the step boundary. A model without one, used under `autocast`, updates those of x and w when the region
ends and those of dy at the end of the backward of what ran in it. Casts that backward makes of x and w, and those of a
recomputation, use the scales of their own forward (`ForwardScales`), so that both ways give the same bits.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from dlp.comm.amax import agree
from dlp.parallel.model.flags import Flags
from dlp.parallel.model.recompute import Recomputations
from dlp.parallel.model.stale import Watch, watch_optimizers
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.state import SlotTable
from dlp.quant.stats import StatsTable

if TYPE_CHECKING:
    from dlp.parallel.linear.modules import LinearCore
    from dlp.parallel.linear.spec import LinearSpec
    from dlp.parallel.linear.state import BoundSpec
    from dlp.parallel.model.grads import PartialGradients
    from dlp.parallel.model.plan import Plan
    from dlp.parallel.model.replicas import Replicas
    from dlp.parallel.model.swap import Swap
    from dlp.parallel.weight.boundary import WeightBatch
    from dlp.parallel.weight.local import LocalWeight, Weight

FORWARD = ("x", "w", "y")  # tensors that forward casts
LOG = logging.getLogger("dlp")
_ENGINE: Any = torch.autograd.Variable._execution_engine


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class ForwardScales:
    """The delayed scales that a forward casts with, for its backward and its recomputation: those in the table as long as
    that has not changed, then `values`. `by_region`: it ran in an autocast region, and dy's scales follow its backward,
    agreed over `group`, None for the model's own."""

    table: SlotTable
    by_region: bool
    group: ProcessGroup | None
    values: Tensor | None = None

    def slot(self, name: str) -> ScaleSlot:
        """What a cast reads once the table has changed; its amax has counted."""
        assert self.values is not None
        scale = self.values[self.table.index(name)]
        return ScaleSlot(scale, torch.zeros_like(scale))


@dataclass
class Slots:
    """The table, and by slot: whether forward casts it, and whether ranks agree on it (bool [slots]).

    From one step boundary to the next, staging begins with the amaxes of the weights that the first of them cast.
    """

    table: SlotTable
    forward: Tensor
    agreed: Tensor
    views: dict[str, ScaleSlot] = field(default_factory=dict)  # of the table, by name
    masks: dict[tuple[bool, ...], Tensor] = field(default_factory=dict)  # bool [slots], as they were needed
    held: dict[Any, ForwardScales] = field(default_factory=dict)  # by forwards that have run with these scales

    def hold(self, by_region: bool, group: ProcessGroup | None) -> ForwardScales:
        """Of a forward that runs now."""
        found = self.held.get((by_region, group))
        if found is None:
            found = self.held[by_region, group] = ForwardScales(self.table, by_region, group)
        return found

    def part(self) -> None:
        """The scales are about to change: forwards that ran with them keep theirs."""
        if self.held:
            values = self.table.scale.clone()
            for each in self.held.values():
                each.values = values
            self.held.clear()


def cannot_pickle(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: a model that is spread over ranks cannot be pickled, since process groups cannot; save its state_dict(), or "
        f"pickle the model before dlp.convert"
    )


class Runtime:
    """`seed`: of stochastic rounding. `dp` = (rank, size): which tokens of a global microbatch this rank has.
    `amax_group`: who shares delayed scales, None for this rank alone. `lone`: of a single layer, which has no model
    around it that would count microbatches. `attached`: an optimizer step is the step boundary. `draws`: a layer rounds
    by chance, so microbatches are counted. `regions`: a layer has run in an autocast region. `scales`: of the forward that is
    running, run again or differentiated; None: those in the table."""

    def __init__(
        self, *, seed: int = 0, dp: tuple[int, int] = (0, 1), amax_group: ProcessGroup | None = None, lone: bool = False
    ) -> None:
        self.seed, self.dp = seed, dp
        self.amax_group, self.lone = amax_group, lone
        self.attached = self.regions = self.draws = False
        self.scales: ForwardScales | None = None
        self.recomputations: Recomputations[Any] = Recomputations()
        self.cores: list[LinearCore] = []
        self.made: list[BoundSpec] = []  # all that refer to it
        self.steps = 0
        self.last: BoundSpec | None = None  # the layer that ran last
        self.swaps: list[Swap] = []
        self.scheduled: list[tuple[Swap, Any]] = []  # swaps to come, with their recipes
        self.noted: set[str] = set()
        self.ran: set[tuple[str, ...]] = set()  # layers that ran with gradients since the last step boundary
        self.stats: StatsTable | None = None
        self.flags = Flags()
        self.plan: Plan | None = None
        self.watches_scales = False
        self.sums: PartialGradients | None = None
        self.replicas: Replicas | None = None
        self.watch = Watch()
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # those attached
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self.weight_batch: WeightBatch | None = None
        self.waiting: deque[tuple[LocalWeight, Callable[[], Tensor]]] = (
            deque()
        )  # see `dlp.parallel.model.delayed_wgrad`
        self._slots: Slots | None = None
        self._task: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        new = Runtime(seed=self.seed, dp=self.dp, amax_group=self.amax_group, lone=self.lone)
        memo |= {id(self): new, id(self.plan): self.plan}
        vars(new).update(copy.deepcopy(self._taken(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """ValueError, where a model is pickled, for one that is spread over ranks."""
        if self.amax_group is not None:
            cannot_pickle(self.cores[0].spec.name)
        made = [core.bound for core in self.cores]
        return self._taken() | {"seed": self.seed, "dp": self.dp, "lone": self.lone, "made": made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Runtime()) | state)

    def _taken(self) -> dict[str, Any]:
        """What goes along when a model is copied: its layers and their scales; not the optimizer that it is attached to, and
        nothing that is prepared for its next calls."""
        names = ("cores", "sums", "steps", "swaps", "scheduled", "plan", "noted", "draws")
        slots = self._slots and Slots(self._slots.table, self._slots.forward, self._slots.agreed)
        counted = {"counter": self.counter} if "counter" in vars(self) else {}
        return {name: getattr(self, name) for name in names} | {"_slots": slots} | counted

    @cached_property
    def counter(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((), dtype=torch.int64, device=self.cores[0].device)

    def advance(self) -> None:
        """The next microbatch begins; not where backward runs a forward again."""
        if not in_backward():
            self.counter.add_(1)

    def begin_forward(self, bound: BoundSpec, record: bool) -> None:
        """A layer runs; `record`: with gradients."""
        self.last = bound
        if record:
            self.ran.add(bound.spec.members)
            if self.lone and self.draws:
                self.advance()

    def before_forward(self, model: nn.Module, args: Any) -> None:
        """The hook of the model that this is the runtime of."""
        if self.attached and not torch.compiler.is_dynamo_compiling() and not in_backward():
            self.watch.drop_moved()
            if not torch.is_grad_enabled():
                self.watch.check_values()
        if self.stats is not None:
            self.stats.recording = torch.is_grad_enabled()
        if self.draws and torch.is_grad_enabled() and self.cores:
            self.advance()

    def specs(self) -> list[LinearSpec]:
        return [spec for core in self.cores for spec in core.specs()]

    def weights(self) -> list[Weight]:
        return [weight for core in self.cores for weight in core.weights]

    @property
    def slots(self) -> Slots:
        if self._slots is None:
            self._slots = self._make_slots()
        return self._slots

    @torch.inference_mode(False)
    def _make_slots(self) -> Slots:
        named = [(name, spec, *found) for spec in self.specs() for name, found in spec.slots.items()]
        table = SlotTable({name: options for name, _, _, options in named}, self.cores[0].device)
        forward = {name: tensor in FORWARD for name, _, tensor, _ in named}
        agreed = {name: spec.recipe.reduce_amax for name, spec, _, _ in named}
        masks = [torch.tensor([mask[name] for name in table.names], dtype=torch.bool) for mask in (forward, agreed)]
        device = table.scale.device
        return Slots(table, masks[0].to(device), masks[1].to(device))

    def rebuild(self) -> None:
        """Layers got another recipe: a table for them, in which slots that stay keep their state."""
        if self._slots is None:
            return
        old, new = self._slots, self._make_slots()
        old.part()
        new.table.adopt(old.table)
        self._slots = new
        for bound in self.made:  # whose programs read the old one
            bound.calls.clear()
        for core in self.cores:
            if core.weights.parts is not None:
                core.weights.parts.calls.clear()

    def slot(self, bound: BoundSpec, tensor: str, member: str, columnwise: bool, record: bool) -> ScaleSlot:
        """What a cast of one tensor reads and writes. `record`: its amax counts."""
        name, slots = bound.slot_name(tensor, member, columnwise), self.slots
        own = None if self.attached else self.scales
        if own is not None and own.values is not None and tensor in FORWARD:
            return own.slot(name)
        slot = slots.views.get(name)
        if slot is None:
            slot = slots.views[name] = slots.table.slot(name)
        return slot if record else ScaleSlot(slot.scale, torch.zeros_like(slot.staging))

    def flag(self, bound: BoundSpec, tensor: str, member: str, device: torch.device) -> Tensor:
        """What a cast of one tensor tells in whether it was finite."""
        flag = self.flags.views.get((member, tensor, device))
        if flag is None:
            self.flags.reserve(bound.spec.members, device, sum(len(core.members) for core in self.cores))
            flag = self.flags.views[member, tensor, device]
        return flag

    def end_step(self) -> None:
        """The step boundary of delayed scales. The amax of a weight that was cast at the last one counts if its layer
        has run since."""
        if self.stats is not None:
            self.stats.close()
        if self.has_slots():
            self._forget_idle_weights()
            self.update()
        self.ran.clear()

    def _forget_idle_weights(self) -> None:
        """Unstage those of layers that have not run since the last step boundary."""
        specs = [spec for spec in self.specs() if spec.members not in self.ran]
        names = {name for spec in specs for name, (tensor, _) in spec.slots.items() if tensor == "w"}
        if not names:
            return
        masks, table = self.slots.masks, self.slots.table
        idle = tuple(name in names for name in table.names)
        if idle not in masks:  # kept, so that a step like others copies nothing to the device and can be captured
            masks[idle] = torch.tensor(idle).to(table.staging.device)
        table.staging.masked_fill_(masks[idle], 0.0)

    def count_step(self, optimizer: Optimizer) -> None:
        """An attached optimizer has stepped. Of several, that take turns, one counts the steps."""
        if optimizer in self._stepped or not self._stepped:
            self.steps += 1
            self._stepped.clear()
        self._stepped.add(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Behind the step of any optimizer."""
        foreign, layers = optimizer not in self.optimizers, [core.weights for core in self.cores]
        if foreign and self.watch.count_step(optimizer, layers) and self.attached:
            self.note(
                f"an {type(optimizer).__name__} that is not attached steps on weights, which are cast where they are used "
                f"until an attached one steps: call dlp.attach for it too"
            )

    def has_slots(self) -> bool:
        return any(spec.slots for spec in self.specs())

    @torch.no_grad()
    def update(self, forward: bool | None = None, group: ProcessGroup | None = None) -> None:
        """Agree on what was staged and let the scales follow: of all slots, or of those that forward (or backward)
        casts. Every rank of the amax group calls it, whatever it ran."""
        slots, staging, self.scales = self.slots, self.slots.table.staging, None
        if forward is not False:
            slots.part()
        if forward is None:
            slots.table.update(self._reduced(staging, group))
            return
        chosen = slots.forward == forward
        kept, mine = torch.where(chosen, 0.0, staging), torch.where(chosen, staging, 0.0)
        slots.table.update(self._reduced(mine, group))
        staging.copy_(kept)

    def _reduced(self, staged: Tensor, group: ProcessGroup | None) -> Tensor:
        """The amaxes of all slots, of the group's ranks where they agree on them."""
        group = group or self.amax_group
        if group is None or group.size() == 1:
            return staged
        if not any(spec.slots and spec.recipe.reduce_amax for spec in self.specs()):
            return staged
        return torch.where(self.slots.agreed, agree([staged], group)[0], staged)

    def leave_region(self, group: ProcessGroup | None) -> None:
        """The outermost region ends: forward is over. `group`: that of the region."""
        if not self.attached and self.has_slots():
            self.update(True, group)

    def in_layer_backward(self, bound: BoundSpec) -> None:
        """A layer differentiates a forward that ran with `scales`. If that was in a region, the end of the backward that is
        running now updates what it staged; every layer asks for it, it is done once. RuntimeError where partial gradients
        would not be summed."""
        self.last = bound
        if self.sums is not None:
            self.sums.check_announced()
        scales = self.scales
        task = torch._C._current_graph_task_id()
        if scales is None or not scales.by_region or self.attached or task == self._task:
            return
        self._task, group = task, scales.group
        _ENGINE.queue_callback(lambda: self.update(False, group))

    def note(self, text: str) -> None:
        """Amend the plan: said once, on the first rank, however many layers it holds for."""
        if text not in self.noted:
            self.noted.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOG.warning("plan: %s", text)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime that `convert` or `attach` gave this model, or one inside of it. ValueError where neither has run."""
    root = converted_root(model)
    if root is None:
        raise ValueError("this model has no step boundary yet: call dlp.convert or dlp.attach on it first")
    found: Runtime = root.dlp_runtime  # type: ignore[assignment]
    return found


def converted_root(model: nn.Module) -> nn.Module | None:
    """What `convert` or `attach` was given: this model, or the one module of it that has a runtime; None: there is none.
    ValueError where there are several."""
    if "dlp_runtime" in vars(model):
        return model
    roots = {name: module for name, module in model.named_modules() if "dlp_runtime" in vars(module)}
    if len(roots) > 1:
        raise ValueError(f"{' and '.join(roots)} are converted models of their own: call this for each of them")
    return next(iter(roots.values()), None)


def give_runtime(model: nn.Module, runtime: Runtime) -> None:
    """Make this the runtime of `model`, whose forward begins a microbatch."""
    model.dlp_runtime = runtime  # type: ignore[assignment]
    model.register_forward_pre_hook(runtime.before_forward)
    watch_optimizers(model, runtime.after_step)
