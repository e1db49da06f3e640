"""State of a model that passes read, and flags that report values that are not finite.

    PassState      delayed scales, flags, random counters; the step boundary changes this state
    ForwardState   scales and random counter of a forward, which the backward and a recomputation use again
    Flags          one number on the device for each tensor that a layer casts; the cast sets the number to NaN if a value is
                   not finite

A cast can turn Inf into a finite value, which would hide the Inf from the loss and the gradients. The step boundary copies the
flags of a step and zeroes them; `dlp.parallel.model.checks` reads the copies one step later. Operands in high precision have
no flag: Inf and NaN stay in the operands, and show in the loss or in gradients.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from dlp.comm.transport import agree
from dlp.kernels.launches import capturing
from dlp.parallel.linear.spec import LinearSpec
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.state import ForwardScales, ScalingState, SlotUse
from dlp.quant.stats import StatsTable

LOG = logging.getLogger("dlp")
_ENGINE: Any = torch.autograd.Variable._execution_engine
FORWARD = ("w", "x", "y")  # tensors that forward casts, in the order of a layer's flags
BACKWARD = ("dx", "dy")  # tensors that backward casts


class CastName(NamedTuple):
    """Name of a flag: the tensor ("x", "w", "y", "dx" or "dy"), and the name of a member of the layer."""

    tensor: str
    member: str

    def __str__(self) -> str:
        return f"{self.tensor} of {self.member}"


class _Piece(NamedTuple):
    """Memory for flags on one device.

    now      fp32 [size], flags of the running step
    closed   fp32 [size], flags of the previous step
    names    names of the flags in use, which are the first elements of `now` and `closed`
    """

    now: Tensor
    closed: Tensor
    names: list[CastName]

    @property
    def left(self) -> int:
        return len(self.now) - len(self.names)


class Flags:
    """The flags of one model. The flags of a layer are allocated at its first cast. The memory of a flag does not move,
    since captured launches write to this memory. `views`: the flag fp32 [] by (member, tensor, device)."""

    def __init__(self) -> None:
        self.views: dict[tuple[str, str, torch.device], Tensor] = {}
        self._pieces: list[_Piece] = []

    def reserve(self, members: Sequence[str], device: torch.device, expected: int) -> None:
        """Allocate flags for all tensors of the layer with these members. `expected`: the number of members of all layers,
        from which the size of a new `_Piece` follows."""
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
        """The flags of the previous step, on the device, which `close` overwrites."""
        return [piece.closed for piece in self._pieces]

    def bad_now(self) -> list[str]:
        """Return the names of tensors with values that were not finite in the previous or the running step. Waits for the
        device."""
        both = [flag for now, closed in zip(self.now, self.closed, strict=True) for flag in (now + closed).tolist()]
        return [str(name) for _, name in bad_casts(self.names, both)]


def bad_casts(names: Sequence[CastName | None], flags: Sequence[float]) -> list[tuple[int, CastName]]:
    """Return (index, name) of each flag that is NaN. `flags`: the value of each flag, in the order of `names`."""
    found = enumerate(zip(names, flags, strict=False))  # a layer may have added names since `flags` was copied
    return [(place, name) for place, (name, flag) in found if name is not None and math.isnan(flag)]


class UpdateAfterBackward(NamedTuple):
    """Marker on the scales of a forward in an autocast region: the scales of dy and dx are updated at the end of the backward,
    with amaxes agreed over `group` (None: the amax group of the model)."""

    group: ProcessGroup | None


class Draw:
    """Counter of stochastic rounding during a microbatch. `value`: copy of the counter, int64 []; None: the counter of the
    model still has the value of the microbatch, or no pending backward needs this value."""

    value: Tensor | None = None


class ForwardState(NamedTuple):
    """State of the model at the time of a forward, which the backward and a recomputation use again.

    scales   delayed scales; None: the scales in the table
    draw     counter of stochastic rounding
    loads    number of calls of `load_counter` before the forward, counted in models with delayed scales or stochastic rounding
    """

    scales: ForwardScales | None
    draw: Draw
    loads: int


class PassState:
    """State of a model that passes of the layers read, and the step boundary changes. `StepState` adds the layers.

    seed         seed of stochastic rounding
    dp           (rank, size): this rank has part `rank` of `size` equal parts of the tokens of a global microbatch
    amax_group   the ranks that share delayed scales; None: this rank alone
    lone         whether the state belongs to one explicitly constructed layer; each forward with gradients is then a microbatch
    groups       the process groups of this rank, by axis of the mesh

    The table of scales is created when it is first needed. The table has slots for every layer of the model, whether or not the
    layer runs on this rank, so that tables are equal on all ranks, and one all-reduce agrees on all amaxes.
    Scales change at the step boundary. Under `autocast` without a step boundary, the scales of x, w and y change when the
    region ends, and the scales of dy and dx at the end of the backward of the layers that ran in the region.
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
        # Loaded values of slots that are not in the table yet, because their autocast region has not run since the load
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.scales: ForwardScales | None = None  # delayed scales that casts read now; None: the scales in the table
        self.now = ForwardState(None, Draw(), 0)  # state of the running microbatch
        self.repeats: ForwardState | None = None  # state of the forward that a checkpoint recomputes now
        self.drawn_again: Tensor | None = None  # the counter before `resume`, which `end_layer_backward` restores
        self.flags = Flags()
        self.stats: StatsTable | None = None
        self.draws = False  # whether a layer rounds stochastically, so that microbatches are counted
        # passes
        self.attached = False  # whether the step of an optimizer runs the step boundary (`dlp.attach`)
        self.ran: set[tuple[str, ...]] = set()  # layers that ran with gradients since the last boundary, by members
        self.last: LinearSpec | None = None  # spec of the layer that ran last
        self.last_pass = "forward"  # pass in which the last layer ran
        self.regions = False  # whether a layer has run in an autocast region
        self.graphing = False  # whether the program is inside `dlp.graphing`
        self.graphed: set[tuple[str, ...]] = set()  # layers that are captured in a CUDA graph, by members
        self._task: int | None = None  # id of the backward at whose end the scales of dy and dx will be updated
        self.before_gather: Callable[..., None] | None = (
            None  # called before a gather, with the arguments of `dlp.parallel.model.checks.check_gathered`
        )
        # Raises RuntimeError in a backward of a layer whose partial gradients would not be summed.
        self.check_gradients: Callable[[], None] | None = None

    # ---- the layers: overridden by `StepState`

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
        """Begin a forward of a layer. `record`: whether gradients are enabled."""
        self.last, self.last_pass = spec, "forward"
        if self.graphing or capturing():
            self.graphed.add(spec.members)
        if record:
            self.ran.add(spec.members)
            if self.lone and self.draws:
                self.advance()

    def forward_state(self) -> ForwardState:
        """Return the state that the backward of the running forward will need."""
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
        if state.draw.value is not None and state.draw is not now.draw:
            if self.drawn_again is None:
                self.drawn_again = self.counter.clone()
            self.counter.copy_(state.draw.value)

    def end_layer_backward(self) -> None:
        """End a backward of a layer: continue with the state of the running microbatch."""
        self.scales = None
        self._restore_counter()

    def _restore_counter(self) -> None:
        """Undo the change of the counter by `resume`, if there was one."""
        if self.drawn_again is not None:
            self.counter.copy_(self.drawn_again)
            self.drawn_again = None

    def in_layer_backward(self, spec: LinearSpec) -> None:
        """Begin a backward of a layer; if the forward ran in an autocast region without a step boundary, schedule the update of
        the scales of dy and dx. Raises RuntimeError if partial gradients would not be summed."""
        self.last, self.last_pass = spec, "backward"
        if self.check_gradients is not None:
            self.check_gradients()
        if self.scales is not None and not self.attached and isinstance(self.scales.behind, UpdateAfterBackward):
            self._update_after_backward(self.scales.behind.group)

    def _update_after_backward(self, group: ProcessGroup | None) -> None:
        """Schedule one update of the scales of dy and dx of all layers, at the end of the running backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            _ENGINE.queue_callback(lambda: self.update_scales(False, group))

    def slot(self, name: str, spec: LinearSpec, record: bool) -> ScaleSlot:
        """Return the slot of the delayed scale of tensor `name` in layers of this spec. `record`: whether the amax is recorded
        for the next scale."""
        return self.scaling.slot(name, record, None if self.attached else self.scales, spec.slots[name][1])

    def flag(self, members: tuple[str, ...], tensor: str, member: str, device: torch.device) -> Tensor:
        """Return the flag fp32 [] of one tensor, which casts set to NaN if a value is not finite. `members`: all members of the
        layer."""
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
        """Return the tensors of this state that launches of a layer read and write. Their addresses do not change until
        `rebuild`."""
        kept = [*self.flags.now, *(self.scaling.memory if spec.slots else ())]
        return [*kept, self.counter] if spec.draws else kept

    def note(self, text: str) -> None:
        """Log a line about a difference from the plan, on rank 0, once for each text."""
        if text not in self.noted:
            self.noted.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOG.warning("plan: %s", text)

    # ---- microbatches

    def advance(self) -> None:
        """Begin a microbatch. In a backward do nothing, because a forward there is a recomputation."""
        if not in_backward():
            self.keep_draw()
            self.count_microbatch()

    def keep_draw(self) -> None:
        """Prepare a change of the counter: copy the counter if backwards of the last microbatch are pending. Only
        pending backwards still refer to the `Draw` of that microbatch."""
        self._restore_counter()  # in case that a backward raised an exception after `resume`
        last = weakref.ref(self.now.draw)
        self.now = self.now._replace(draw=Draw())
        if (draw := last()) is not None:
            with _disable_current_modes():  # the next forward may run under fake tensors
                draw.value = self.counter.clone()

    def count_microbatch(self) -> None:
        self.counter.add_(1)

    def load_counter(self, value: Tensor) -> None:
        """Load the counter of microbatches. If the model has delayed scales or stochastic rounding, `resume` then refuses the
        backward of a forward that ran before the load."""
        self.counter.copy_(value)
        if self.draws or self.has_slots():
            self.now = ForwardState(None, Draw(), self.now.loads + 1)

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
        """Rebuild the table of scales after recipe changes. Slots with the same name and options in both tables keep their
        state."""
        if self._scaling is None:
            return
        self._scaling = self._scaling.replaced_by(self._make_scaling())
        self.forget_captures()  # captured launches read the old table

    def update_scales(self, forward: bool | None = None, group: ProcessGroup | None = None) -> None:
        """Agree on staged amaxes and update the scales. All ranks of the amax group must call this method, whichever layers
        they ran.

        forward   True: slots of casts in forward; False: slots of casts in backward; None: all slots
        group     the amax group of an autocast region; None: the amax group of the model
        """
        shared = group or self.amax_group
        self.scales = None
        if shared is None or shared.size() == 1:
            self.scaling.update(None, forward)
        else:
            self.scaling.update(lambda staged: agree([staged], shared)[0], forward)

    def leave_region(self, group: ProcessGroup | None) -> None:
        """End the outermost autocast region: without an attached optimizer, update the scales of casts in forward, over the
        region's `group`."""
        if not self.attached and self.has_slots():
            self.update_scales(True, group)

    # ---- the step boundary

    def end_step(self) -> None:
        """Run the part of the step boundary for this state: close the statistics of the step, update delayed scales. Amaxes of
        weights were recorded at the last boundary; they are dropped for layers that have not run with gradients since and are
        not captured in a CUDA graph."""
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
