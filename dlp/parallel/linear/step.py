"""State of a model that passes read, and the flags of values that are not finite.

    PassState      delayed scales, flags, random counters; the step boundary changes this state
    ForwardState   scales and random counter of a forward, which the backward reads and a recomputation repeats
    Flags          a number on the device for each tensor that a layer casts, which the cast sets to NaN where a value is not
                   finite

A cast can turn Inf into a finite value, which would hide the Inf from the loss and the gradients. The step boundary copies the
flags of a step and zeroes them; `dlp.parallel.model.checks` reads the copies one step later. Operands in high precision have
no flag: Inf and NaN stay in the operands, and show in the loss or in gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.transport import agree
from dlp.kernels.launches import capturing
from dlp.parallel.linear.spec import LinearSpec
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.state import ForwardScales, ScalingState, SlotUse
from dlp.quant.stats import StatsTable

LOG = logging.getLogger("dlp")
_ENGINE: Any = torch.autograd.Variable._execution_engine
FORWARD = ("w", "x", "y")  # tensors that forward casts, in the order of a layer's flags
BACKWARD = ("dx", "dy")  # tensors that backward casts, from the last layer to the first


class CastName(NamedTuple):
    """A tensor of a layer that has a flag."""

    tensor: str
    member: str

    def __str__(self) -> str:
        return f"{self.tensor} of {self.member}"


class _Piece(NamedTuple):
    """A block of flags, fp32 [room]: flags of the running step, flags of the previous step, and the names of the flags in
    use."""

    now: Tensor
    closed: Tensor
    names: list[CastName]

    @property
    def left(self) -> int:
        return len(self.now) - len(self.names)


class Flags:
    """The flags of one model. Flags are allocated at the first cast of a layer, in the order of layers. The memory stays the
    same, since captured launches write to it."""

    def __init__(self) -> None:
        self.views: dict[tuple[str, str, torch.device], Tensor] = {}
        self._pieces: list[_Piece] = []

    def reserve(self, members: Sequence[str], device: torch.device, expected: int) -> None:
        """Allocate flags for all tensors of the layer with these members. `expected`: the number of members of all layers."""
        names = [
            CastName(tensor, member)
            for tensor in (*FORWARD, *BACKWARD)
            for member in (members[:1] if tensor in ("x", "dx") else members)
        ]
        piece = next((p for p in self._pieces if p.now.device == device and p.left >= len(names)), None)
        if piece is None:
            room = max(len(names), expected * len((*FORWARD, *BACKWARD)))
            with torch.inference_mode(False):  # flags are written outside of inference mode, too
                now, closed = torch.zeros(2, room, device=device).unbind()
            piece = _Piece(now, closed, [])
            self._pieces.append(piece)
        for name in names:
            self.views[name.member, name.tensor, device] = piece.now[len(piece.names)]
            piece.names.append(name)

    @torch.no_grad()
    def close(self) -> None:
        """End a step: copy the flags, and zero them for the next step."""
        for piece in self._pieces:
            piece.closed.copy_(piece.now)
            piece.now.zero_()

    @property
    def now(self) -> list[Tensor]:
        """The flags of the running step, which casts write to."""
        return [piece.now for piece in self._pieces]

    @property
    def names(self) -> list[CastName | None]:
        """The names of all flags, in the order of `now` and `closed`; None for a flag that is not in use."""
        return [name for piece in self._pieces for name in (*piece.names, *[None] * piece.left)]

    @property
    def closed(self) -> list[Tensor]:
        """The flags of the last step, on the device, until the next step ends."""
        return [piece.closed for piece in self._pieces]

    def bad_now(self) -> list[str]:
        """The names of tensors that were not finite in the last step or since the step boundary. Waits for the device."""
        both = [flag for now, closed in zip(self.now, self.closed, strict=True) for flag in (now + closed).tolist()]
        return [str(name) for _, name in bad_casts(self.names, both)]


def bad_casts(names: Sequence[CastName | None], flags: Sequence[float]) -> list[tuple[int, CastName]]:
    """The names of flags that are set, with their indices. `flags`: as `Flags.closed` returned them."""
    found = enumerate(zip(names, flags, strict=False))  # `names` may have grown since
    return [(place, name) for place, (name, flag) in found if name is not None and math.isnan(flag)]


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


class PassState:
    """State of a model that passes of the layers read, and the step boundary changes. `StepState` adds the layers.

    seed         of stochastic rounding
    dp           (rank, size): which tokens of a global microbatch this rank has
    amax_group   the ranks that share delayed scales; None: this rank alone
    lone         the state belongs to a single layer, without a converted model that counts microbatches
    groups       the groups of this rank, by axis of the mesh

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
        self.noted: set[str] = set()  # texts of `note`
        # casts
        self._scaling: ScalingState | None = None
        # Slots of autocast regions that have not run since the load of a state
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.scales: ForwardScales | None = None  # delayed scales that casts read now; None: the scales in the table
        self.now = ForwardState()  # state of the running microbatch
        self.repeats: ForwardState | None = None  # state of the forward that a checkpoint recomputes now
        self.drawn_again: Tensor | None = None  # the counter before `resume`, restored by `end_layer_backward`
        self.flags = Flags()
        self.stats: StatsTable | None = None
        self.draws = False  # a layer rounds stochastically, so microbatches are counted
        # passes
        self.attached = False  # an optimizer's step is the step boundary
        self.ran: set[tuple[str, ...]] = set()  # layers that ran with gradients since the last boundary, by members
        self.last: LinearSpec | None = None  # spec of the layer that ran last
        self.last_pass = "forward"  # pass in which the last layer ran
        self.regions = False  # a layer has run in an autocast region
        self.graphing = False  # inside `graphing`
        self.graphed: set[tuple[str, ...]] = set()  # layers that are captured in a CUDA graph, by members
        self._task: int | None = None  # id of the backward at whose end the scales of dy will be updated
        self.before_gather: Callable[..., None] | None = None  # called like `dlp.parallel.model.checks.check_gathered`
        # Raises RuntimeError in a backward of a layer whose partial gradients would not be summed.
        self.check_gradients: Callable[[], None] | None = None

    # ---- the layers, of which `StepState` has a list

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        raise NotImplementedError

    @property
    def num_members(self) -> int:
        """Number of weights of all layers."""
        raise NotImplementedError

    def specs(self) -> list[LinearSpec]:
        """The specs of all layers."""
        raise NotImplementedError

    def forget_captures(self) -> None:
        """Discard the captured launches of all layers."""
        raise NotImplementedError

    # ---- called by passes

    def begin_forward(self, spec: LinearSpec, record: bool) -> None:
        """Begin a forward of a layer; `record`: gradients are enabled."""
        self.last, self.last_pass = spec, "forward"
        if self.graphing or capturing():
            self.graphed.add(spec.members)
        if record:
            self.ran.add(spec.members)
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

    def in_layer_backward(self, spec: LinearSpec) -> None:
        """Begin a backward of a layer whose forward ran with `scales`, which are updated afterwards if the forward ran in an
        autocast region. RuntimeError if partial gradients would not be summed."""
        self.last, self.last_pass = spec, "backward"
        if self.check_gradients is not None:
            self.check_gradients()
        if self.scales is not None and not self.attached and isinstance(self.scales.behind, UpdateAfterBackward):
            self._update_after_backward(self.scales.behind.group)

    def _update_after_backward(self, group: ProcessGroup | None) -> None:
        """Update the scales of dy at the end of the running backward, once for all layers."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            _ENGINE.queue_callback(lambda: self.update_scales(False, group))

    def slot(self, name: str, spec: LinearSpec, record: bool) -> ScaleSlot:
        """Return the slot of the delayed scale of tensor `name` in layers of this spec. `record`: whether the amax is recorded
        for the next scale."""
        return self.scaling.slot(name, record, None if self.attached else self.scales, spec.slots[name][1])

    def flag(self, members: tuple[str, ...], tensor: str, member: str, device: torch.device) -> Tensor:
        """fp32 [], which casts of one tensor set to NaN if a value is not finite; `members`: members of the tensor's layer."""
        flag = self.flags.views.get((member, tensor, device))
        if flag is None:
            self.flags.reserve(members, device, self.num_members)
            flag = self.flags.views[member, tensor, device]
        return flag

    @cached_property
    def counter(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((), dtype=torch.int64, device=self.device)

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

    # ---- delayed scales

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
        made = ScalingState(uses, self.device)
        if self.loaded:
            self.loaded = made.table.load_known(self.loaded)
        return made

    def rebuild(self) -> None:
        """Rebuild the table of scales after recipe changes; slots that exist in both tables keep their state."""
        if self._scaling is None:
            return
        self._scaling = self._scaling.replaced_by(self._make_scaling())
        self.forget_captures()  # captured launches read the old table

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
        """The session's part of the step boundary: close the step's statistics, update delayed scales. The last
        boundary recorded amaxes of weights; amaxes of layers that have not run since are dropped."""
        if self.stats is not None:
            self.stats.close()
        if self.has_slots():
            idle = [spec for spec in self.specs() if spec.members not in self.ran | self.graphed]
            self.scaling.forget({name for spec in idle for name, (tensor, _) in spec.slots.items() if tensor == "w"})
            self.update_scales()
        self.ran.clear()


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
