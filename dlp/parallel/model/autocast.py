"""autocast: a recipe for what runs inside a `with` block, in the place of the layers' own.

    with dlp.autocast(recipe=dlp.recipe("fp8_delayed")):
        y = model(x)
    y.sum().backward()                    # outside: backward follows the recipe that forward ran under

The region is a context variable, which a layer looks up once per forward; regions nest, the innermost decides. A forward that
is recomputed in backward (activation checkpointing) uses what the first run used, wherever backward runs.

Without an attached optimizer there is no step boundary. Delayed scales are then updated as in Transformer Engine: those of x
and w when the outermost region ends, if gradients are enabled, and those of dy at the end of the backward of what ran in it.
Those of layers that run in no region wait for `dlp.end_step`.

**Which forward a recomputation repeats.** A layer in an activation checkpoint runs again in backward, perhaps after other
forwards or a change of its recipe, and must then run under the spec and the delayed scales of its first run. `LayerRuns` keeps
both for each checkpoint that the layer ran in, in the order of its calls, as long as the checkpoint lives. This is the only
file that touches what is private in torch.utils.checkpoint. With `use_reentrant=False` a checkpoint works by hooks on saved
tensors, which are on a stack of this thread while its function runs, and which know its frame. A checkpoint with
`use_reentrant=True` cannot be recognised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import checkpoint

from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.model.checks import capturing
from dlp.parallel.model.session import Layer, Session, UpdateAfterBackward, in_backward
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, QuantizerCaps, ScaleSlot, SlotOptions, caps_of
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.state import ForwardScales
from dlp.quant.stats import measured, plain
from dlp.quant.tensor import QuantizedTensor

_FRAME, _FRAME_AGAIN = "frame", "target_frame_ref"  # what the hooks of a first run and of a recomputation refer to


@dataclass(frozen=True)
class Calibrate(KeepHighPrecision):
    """Keeps the values in high precision, and records their amax for the delayed scale of this slot."""

    slot: SlotOptions | None = None

    @property
    def caps(self) -> QuantizerCaps:  # type: ignore[override]
        return QuantizerCaps(slot=self.slot)

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        **_: Any,
    ) -> QuantizedTensor:  # fmt: skip
        if slot is not None:
            slot.record(x)
        return super().cast(x, amax, out=out)


def high_precision(recipe: Recipe, calibrating: bool) -> Recipe:
    """The recipe with all operands in high precision; `calibrating`: amaxes are still recorded for its delayed scales."""

    def keep(quantizer: Quantizer) -> Quantizer:
        options = caps_of(quantizer).slot if calibrating else None
        return KeepHighPrecision() if options is None else Calibrate(slot=options)

    def kept(result: Quantizer | None) -> Quantizer | None:
        delayed = calibrating and result is not None and caps_of(result).slot is not None
        return keep(result) if delayed and result is not None else None

    operands = (getattr(recipe, name) for name in recipes.OPERANDS)
    x, w, dy = (Operand(keep(operand.rowwise), keep(operand.columnwise)) for operand in operands)
    name = f"{recipe.name}, {'calibrating' if calibrating else 'off'}"
    return Recipe(name, x, w, dy, reduce_amax=recipe.reduce_amax, y=kept(recipe.y), dx=kept(recipe.dx))


def quantizes_nothing(recipe: Recipe) -> bool:
    """Whether all operands and results of a recipe stay in high precision."""
    operands = (getattr(recipe, name) for name in recipes.OPERANDS)
    return recipe.y is recipe.dx is None and all(operand.keeps_source for operand in operands)


@dataclass
class Region:
    """The arguments of one `with` block.

    learns      it was entered with gradients enabled
    touched     the sessions of layers that ran in it
    resolved    the bound specs that layers ran under in it
    """

    enabled: bool
    recipe: Any
    calibrating: bool
    group: ProcessGroup | None
    learns: bool
    touched: dict[Session, None] = field(default_factory=dict)
    resolved: set[BoundSpec] = field(default_factory=set)

    def spec_for(self, core: Layer) -> BoundSpec:
        """The layer's own spec, or the variant of it that this region asks for."""
        session = core.session
        session.regions = True
        core.ran_under.learned_in_region |= self.learns
        self.touched[session] = None
        key = (self.enabled, self.recipe, self.calibrating, self.group)
        if key not in core.variants and key != (True, None, self.calibrating, None):
            for each in session.cores:  # of all layers, so that ranks that run other layers have the same slots
                each.variants[key] = BoundSpec(self._variant(each), session, each.weights)
            session.rebuild()
        bound: BoundSpec = core.variants.get(key, core.bound)
        self.resolved.add(bound)
        return bound

    @property
    def quantizes_nothing(self) -> bool:
        """Whether the region is enabled without a recipe, and no layer that ran in it has a recipe that quantizes."""
        own = self.enabled and self.recipe is None and bool(self.resolved)
        return own and all(quantizes_nothing(bound.spec.recipe) for bound in self.resolved)

    def _variant(self, core: Layer) -> LinearSpec:
        own, its = core.spec, plain(core.spec.recipe)
        recipe = its if self.recipe is None else self.recipe.for_layer(own.members[0])
        suffix = "" if recipe == its else f"[{recipe}]"
        if not self.enabled:
            recipe = high_precision(recipe, self.calibrating)
            if core.stats is not None:
                recipe = measured(recipe, own.members[0], core.stats)
        return replace(own, recipe=recipe, amax_group=self.group or own.amax_group, variant=suffix)


_REGION: ContextVar[Region | None] = ContextVar("dlp_autocast", default=None)


def active_region() -> Region | None:
    """The innermost region around the caller; None: there is none."""
    return _REGION.get()


class Checkpoint(NamedTuple):
    """A checkpoint whose function is running. hook: identifies this run of it; again: the run is a recomputation."""

    frame: Any
    hook: Any
    again: bool


def _checkpoints() -> list[Checkpoint]:
    """The checkpoints that are running, outermost first."""
    hooks = torch._C._autograd
    if hooks._top_saved_tensors_default_hooks(True) is None:
        return []
    pairs = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        pairs.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(pairs):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return [found for pack, _ in reversed(pairs) if (found := _checkpoint(pack)) is not None]


def _checkpoint(pack: Any) -> Checkpoint | None:
    """The checkpoint of a hook; None: the hook is none of a checkpoint."""
    inner = unwrap(pack)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None)
    if code is None or not cells or inner.__module__ != checkpoint.__name__:
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if _FRAME_AGAIN in held:
        return Checkpoint(held[_FRAME_AGAIN](), pack, True)
    return Checkpoint(held[_FRAME], pack, False) if _FRAME in held else None


class Ran(NamedTuple):
    """What a forward of a layer ran under: its bound spec, and delayed scales."""

    bound: BoundSpec
    scales: ForwardScales | None


class LayerRuns:
    """What the forwards of one layer in checkpoints ran under.

    learned_in_region  one ran in a region that was entered with gradients enabled
    recipe_changed     the recipe has changed since the last forward
    """

    def __init__(self) -> None:
        self.learned_in_region = self.recipe_changed = False
        self._ran: WeakKeyDictionary[Any, list[Ran]] = WeakKeyDictionary()  # by checkpoint, in the order of its calls
        self._calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by recomputation: how many it has repeated

    def __reduce__(self) -> Any:
        """A copied layer has no runs."""
        return LayerRuns, ()

    def keep(self, ran: Ran, checkpoints: Sequence[Checkpoint]) -> None:
        """Record a forward that runs in these checkpoints."""
        for each in checkpoints:
            if not each.again:
                self._ran.setdefault(each.frame, []).append(ran)

    def next(self, checkpoints: Sequence[Checkpoint]) -> Ran | None:
        """What the forward ran under that the innermost recomputation now repeats; None: not known."""
        again = next((each for each in reversed(checkpoints) if each.again), None)
        if again is None:
            return None
        kept, place = self._ran.get(again.frame, ()), self._calls.get(again.hook, 0)
        self._calls[again.hook] = place + 1
        return kept[place] if place < len(kept) else None


def active_spec(core: Layer) -> BoundSpec:
    """The bound spec under which a forward of this layer runs now. Sets the session's scales accordingly."""
    region, own = _REGION.get(), core.bound
    session = own.session
    in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # or in other hooks
    if core.ran_under.recipe_changed:
        _check_no_recomputation(core)
    if region is None and not session.regions and (session.attached or not own.spec.slots) and not in_checkpoint:
        return own
    checkpoints = _checkpoints()
    ran = _again(core, checkpoints) if in_backward() else _first(core, region)
    core.ran_under.keep(ran, checkpoints)
    session.scales = ran.scales
    return ran.bound


def _first(core: Layer, region: Region | None) -> Ran:
    """The spec and scales of a forward that is no recomputation."""
    bound, session = core.bound if region is None else region.spec_for(core), core.session
    if region is not None and not session.attached and capturing():
        raise ValueError(
            f"{bound.spec.name}: it runs in dlp.autocast while a CUDA graph is captured, and what the end of the region "
            f"changes, no replay would read: call dlp.attach before, or set its recipe by a layer group"
        )
    if session.attached or not bound.spec.slots:
        return Ran(bound, None)
    bound.spec.check_unattached()
    return Ran(bound, session.scaling.hold(None if region is None else UpdateAfterBackward(region.group)))


def _again(core: Layer, checkpoints: list[Checkpoint]) -> Ran:
    """The spec and scales of a recomputation: those of the run that it repeats."""
    ran = core.ran_under.next(checkpoints)
    if ran is not None:
        return ran
    if core.ran_under.learned_in_region and not any(each.again for each in checkpoints):
        raise ValueError(
            f"{core.spec.name}: backward runs it again, and nothing says under which dlp.autocast region it ran: pass "
            f"use_reentrant=False to torch.utils.checkpoint, or set recipes by layer groups"
        )
    return _first(core, None)


def _check_no_recomputation(core: Layer) -> None:
    """Called where a layer runs for the first time since its recipe changed. ValueError in a backward that repeats a forward
    without saying which (`use_reentrant=True`): y would be that of one recipe, and gradients of another."""
    if not in_backward():
        core.ran_under.recipe_changed = False
    elif not any(each.again for each in _checkpoints()):
        raise ValueError(
            f"{core.spec.name}: its recipe was changed between a forward and the backward that runs it again: pass "
            f"use_reentrant=False to torch.utils.checkpoint, or change recipes after the backward"
        )


def check_compiled(bound: BoundSpec) -> None:
    """ValueError for compiled code that runs inside a region, which it cannot look up."""
    region = _REGION.get()
    if region is not None and bound not in region.resolved and not in_backward():
        raise ValueError(
            f"{bound.spec.name}: dlp.autocast does not reach into torch.compile: set this layer's recipe by its layer group or "
            f"by dlp.set_recipe, or do not compile it"
        )


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: Any = None,
    calibrating: bool = False,
    amax_reduction_group: ProcessGroup | None = None,
) -> Iterator[None]:
    """Run the linears of a region under another recipe. A context manager.

    Args:
        enabled: False runs the region in high precision.
        recipe: name of a recipe, a `Recipe` or a `CustomRecipe`; None: the recipe of each layer.
        calibrating: with enabled=False, record the amaxes that delayed scaling needs.
        amax_reduction_group: ranks that share scales; the group must contain the tp group of sequence-parallel layers.

    Yields:
        None.

    Raises:
        TypeError: for an `enabled` that is not a bool.
        ValueError: inside torch.compile, and for an unknown recipe.

    Examples:
        >>> layer = dlp.Linear(64, 64)
        >>> with dlp.autocast(recipe="fp8_current"):
        ...     y = layer(torch.randn(16, 64))
    """
    if torch.compiler.is_dynamo_compiling():
        raise ValueError(
            "dlp.autocast does not reach into torch.compile: set recipes by layer groups or dlp.set_recipe"
        )
    if not isinstance(enabled, bool):
        raise TypeError(
            f"dlp.autocast: enabled must be True or False; got {enabled!r}: pass a recipe by name, recipe=..."
        )
    chosen = None if recipe is None else recipes.as_recipe(recipe)
    outer = _REGION.get()
    region = Region(enabled, chosen, calibrating, amax_reduction_group, torch.is_grad_enabled())
    token = _REGION.set(region)
    try:
        yield
    finally:
        _REGION.reset(token)
    if region.quantizes_nothing:
        next(iter(region.touched)).note(
            "dlp.autocast without a recipe: each layer keeps its own recipe, and those of the layers that ran in the region "
            "quantize nothing; pass recipe=..., or set recipes of layers"
        )
    if outer is not None:
        outer.touched.update(region.touched)
    elif torch.is_grad_enabled():
        for session in region.touched:
            session.leave_region(amax_reduction_group)
