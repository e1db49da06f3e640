"""Choose the spec under which a forward of a layer runs: the spec of the layer, the spec of an autocast region, or, in a
recomputation by activation checkpointing, the spec of the first run.

`dlp.autocast` (`dlp.parallel.model.autocast`) sets `REGION`; layers call `LinearCore.active_spec` once for each
forward.

A *checkpoint* is a call of `torch.utils.checkpoint`. A layer in a checkpoint runs again in backward, perhaps after other
forwards or a recipe change, and must then run under the spec and the delayed scales of the first run. `LayerRuns` keeps both
for each checkpoint that the layer ran in, in the order of the calls, until torch frees the checkpoint. Only this file uses
private names of torch.utils.checkpoint. With `use_reentrant=False` a checkpoint registers hooks on saved tensors. While the
function of the checkpoint runs, these hooks are on a stack of this thread; they refer to the frame object of the checkpoint.
A checkpoint with `use_reentrant=True` has no such hooks, so it cannot be recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup
from torch.utils import checkpoint

from dlp.kernels.launches import capturing
from dlp.parallel.linear.state import BoundSpec, LayerState, StepState
from dlp.parallel.linear.step import ForwardState, UpdateAfterBackward, in_backward
from dlp.quant.state import ForwardScales

# Closure variables by which hooks refer to the frame object of a checkpoint: hooks of the first run, hooks of a recomputation
_FRAME, _FRAME_AGAIN = "frame", "target_frame_ref"


@dataclass(eq=False)
class Region:
    """A region of `dlp.autocast`, in which layers run under specs that the region chooses. `enabled`, `recipe`, `calibrating`
    and `group` are the arguments of the region.

    learns      whether the region was entered with gradients enabled
    touched     the `StepState` of each layer that ran in the region, as keys
    resolved    the bound specs under which layers ran in the region
    """

    enabled: bool
    recipe: Any
    calibrating: bool
    group: ProcessGroup | None
    learns: bool
    touched: dict[StepState, None] = field(default_factory=dict)
    resolved: set[BoundSpec] = field(default_factory=set)

    def spec_for(self, core: LayerState) -> BoundSpec:
        """Return the bound spec of the layer in this region."""
        raise NotImplementedError


REGION: ContextVar[Region | None] = ContextVar("dlp_autocast", default=None)


# Returns the innermost hooks on saved tensors (pack, unpack), registered by a checkpoint or by other code; None: no hooks
saved_tensor_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def active_region() -> Region | None:
    """Return the innermost autocast region that is active; None outside of regions."""
    return REGION.get()


class Checkpoint(NamedTuple):
    """A checkpoint whose function is running.

    frame   torch's frame object of the checkpoint, the same in the first run and in recomputations
    hook    the hook that packs saved tensors; every run of the function registers a new hook
    again   whether this run is a recomputation
    """

    frame: Any
    hook: Any
    again: bool


def _checkpoints() -> list[Checkpoint]:
    """Return the checkpoints whose functions are running, outermost first."""
    hooks, pairs = torch._C._autograd, []
    while (pair := saved_tensor_hooks()) is not None:
        pairs.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(pairs):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return [found for pack, _ in reversed(pairs) if (found := _checkpoint(pack)) is not None]


def _checkpoint(pack: Any) -> Checkpoint | None:
    """Return the checkpoint that registered the hook `pack`; None: the hook does not belong to a checkpoint."""
    inner = unwrap(pack)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None)
    if code is None or not cells or inner.__module__ != checkpoint.__name__:
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if _FRAME_AGAIN in held:
        return Checkpoint(held[_FRAME_AGAIN](), pack, True)
    return Checkpoint(held[_FRAME], pack, False) if _FRAME in held else None


class Ran(NamedTuple):
    """Record of one forward of a layer: the bound spec, the delayed scales (None: the scales in the table), and the state that
    the backward needs."""

    bound: BoundSpec
    scales: ForwardScales | None
    state: ForwardState


class LayerRuns:
    """Records of the forwards of one layer in checkpoints.

    learned_in_region  whether a forward ran in an autocast region that was entered with gradients enabled
    recipe_changed     whether the recipe has changed since the last forward outside of a backward
    """

    def __init__(self) -> None:
        self.learned_in_region = self.recipe_changed = False
        self._ran: WeakKeyDictionary[Any, list[Ran]] = WeakKeyDictionary()  # by frame, in the order of forwards
        self._calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by hook: number of repeated forwards

    def __reduce__(self) -> Any:
        """Copy and pickle without the records."""
        return LayerRuns, ()

    def keep(self, ran: Ran, checkpoints: Sequence[Checkpoint]) -> None:
        """Record a forward for each of these checkpoints that is in the first run, not in a recomputation."""
        for each in checkpoints:
            if not each.again:
                self._ran.setdefault(each.frame, []).append(ran)

    def next(self, checkpoints: Sequence[Checkpoint]) -> Ran | None:
        """Return the record of the forward that the innermost recomputation repeats now, and advance to the next forward. None:
        no recomputation is recognised, or the forward was not recorded."""
        again = next((each for each in reversed(checkpoints) if each.again), None)
        if again is None:
            return None
        kept, place = self._ran.get(again.frame, ()), self._calls.get(again.hook, 0)
        self._calls[again.hook] = place + 1
        return kept[place] if place < len(kept) else None


def spec_among_others(core: LayerState) -> BoundSpec:
    """Implement `LinearCore.active_spec` for a forward that may run under another spec than the layer's spec, or under other
    scales than the scales in the table. Such a forward is in an autocast region, runs after a layer of the model has run in a
    region, is in a checkpoint, has delayed scales that no attached optimizer updates, or is the first after a recipe change."""
    if core.ran_under.recipe_changed:
        _check_no_recomputation(core)
    session, checkpoints = core.session, _checkpoints()
    ran = _again(core, checkpoints) if in_backward() else _first(core, REGION.get())
    core.ran_under.keep(ran, checkpoints)
    session.scales = ran.scales
    session.repeats = ran.state if in_backward() else None
    return ran.bound


def _first(core: LayerState, region: Region | None) -> Ran:
    """Return a new record for a forward that repeats no recorded forward. Raises ValueError if a CUDA graph is captured in an
    autocast region without an attached optimizer."""
    bound, session = core.bound if region is None else region.spec_for(core), core.session
    if region is not None and not session.attached and capturing():
        raise ValueError(
            f"{bound.spec.name}: a CUDA graph is captured inside dlp.autocast, whose exit updates scales that replays "
            f"of the graph would not read: call dlp.attach before the capture, or set the recipe of this layer by a "
            f"layer group"
        )
    if session.attached or not bound.spec.slots:
        return Ran(bound, None, session.now)
    bound.spec.check_unattached()
    scales = session.scaling.hold(None if region is None else UpdateAfterBackward(region.group))
    return Ran(bound, scales, session.now._replace(scales=scales))


def _again(core: LayerState, checkpoints: list[Checkpoint]) -> Ran:
    """Return the record of the forward that is recomputed, or, if that forward was not recorded, a new record with the spec of
    the layer outside of regions. Raises ValueError if a forward without a record may have run in an autocast region."""
    ran = core.ran_under.next(checkpoints)
    if ran is not None:
        return ran
    if core.ran_under.learned_in_region and not any(each.again for each in checkpoints):
        raise ValueError(
            f"{core.spec.name}: backward recomputes this layer, and the dlp.autocast region of the first forward is "
            f"not known: pass use_reentrant=False to torch.utils.checkpoint, or set recipes by layer groups"
        )
    return _first(core, None)


def _check_no_recomputation(core: LayerState) -> None:
    """Raise ValueError if the first run of a layer after a recipe change is in a backward that recomputes an unknown forward
    (`use_reentrant=True`), because y and the gradients would have different recipes."""
    if not in_backward():
        core.ran_under.recipe_changed = False
    elif not any(each.again for each in _checkpoints()):
        raise ValueError(
            f"{core.spec.name}: the recipe was changed between a forward and the backward that recomputes this "
            f"forward: pass use_reentrant=False to torch.utils.checkpoint, or change recipes after the backward"
        )


def check_compiled(bound: BoundSpec) -> None:
    """Raise ValueError if a forward in an autocast region runs under a spec that the region did not choose, because compiled
    code cannot look up the region."""
    region = REGION.get()
    if region is not None and bound not in region.resolved and not in_backward():
        raise ValueError(
            f"{bound.spec.name}: dlp.autocast has no effect on compiled code: set the recipe of this layer by a layer "
            f"group or by dlp.set_recipe, or do not compile the layer"
        )
