"""autocast: a recipe for what runs inside a `with` block, whatever the layers' groups say.

    with dlp.autocast(recipe=dlp.recipe("fp8_delayed")):
        y = model(x)
    y.sum().backward()                    # outside: backward follows the recipe that forward ran under

The region is a context variable, looked up once per forward of a layer; regions nest, the innermost decides. A forward
that backward runs again (activation checkpointing) uses what the first one used, wherever backward is, and whatever has
run since (`dlp.parallel.model.recompute`).

Where no optimizer is attached, there is no step boundary. Delayed scales are then updated as Transformer Engine does:
those of x and w when the outermost region ends, if gradients are enabled, and those of dy at the end of the backward of
what ran in it. What runs in no region waits for `dlp.end_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.model import recompute
from dlp.parallel.model.runtime import ForwardScales, Runtime, in_backward
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, QuantizerCaps, ScaleSlot, SlotOptions, caps_of
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.stats import plain
from dlp.quant.tensor import QuantizedTensor

if TYPE_CHECKING:
    from dlp.parallel.linear.modules import LinearCore


@dataclass(frozen=True)
class Calibrate(KeepHighPrecision):
    """Leaves the values as they are and records their amax for the scale that this slot will have."""

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
    """The recipe's layers in high precision; calibrating: amaxes are still recorded where it scales by them."""

    def keep(quantizer: Quantizer) -> Quantizer:
        options = caps_of(quantizer).slot if calibrating else None
        return KeepHighPrecision() if options is None else Calibrate(slot=options)

    operands = (getattr(recipe, name) for name in recipes.OPERANDS)
    x, w, dy = (Operand(keep(operand.rowwise), keep(operand.columnwise)) for operand in operands)
    return Recipe(f"{recipe.name}, {'calibrating' if calibrating else 'off'}", x, w, dy, reduce_amax=recipe.reduce_amax)


@dataclass
class Region:
    """What one `with` block asks for, and the runtimes of the layers that ran in it. `learns`: it was entered with
    gradients enabled."""

    enabled: bool
    recipe: Any
    calibrating: bool
    group: ProcessGroup | None
    learns: bool
    touched: dict[Runtime, None] = field(default_factory=dict)
    resolved: set[BoundSpec] = field(default_factory=set)

    def spec_for(self, core: LinearCore) -> BoundSpec:
        """The layer's own spec, or the variant of it that this region asks for."""
        runtime = core.session
        runtime.regions = True
        core.ran_in_region |= self.learns
        self.touched[runtime] = None
        key = (self.enabled, self.recipe, self.calibrating, self.group)
        if key not in core.variants and key != (True, None, self.calibrating, None):
            for each in runtime.cores:  # of all layers, so that ranks that run other layers have the same slots
                each.variants[key] = BoundSpec(self._variant(each), runtime, each.weights)
            runtime.rebuild()
        bound = core.variants.get(key, core.bound)
        self.resolved.add(bound)
        return bound

    def _variant(self, core: LinearCore) -> LinearSpec:
        own, its = core.spec, plain(core.spec.recipe)
        recipe = its if self.recipe is None else self.recipe.for_layer(own.members[0])
        suffix = "" if recipe == its else f"[{recipe}]"
        if not self.enabled:
            recipe = high_precision(recipe, self.calibrating)
        return replace(own, recipe=recipe, amax_group=self.group or own.amax_group, variant=suffix)


_REGION: ContextVar[Region | None] = ContextVar("dlp_autocast", default=None)


def active_region() -> Region | None:
    """The innermost region here and now."""
    return _REGION.get()


class Ran(NamedTuple):
    """What a forward of a layer ran under."""

    bound: BoundSpec
    scales: ForwardScales | None


def active_spec(core: LinearCore) -> BoundSpec:
    """The spec that a forward of this layer runs under, here and now; the runtime has its scales."""
    region, own, runtime = _REGION.get(), core.bound, core.session
    if region is None and not runtime.regions and (runtime.attached or not own.spec.slots):
        return own  # no forward can have run under anything else
    checkpoints = recompute.running()
    ran = _again(core, checkpoints) if in_backward() else _first(core, region)
    runtime.recomputations.keep(core, ran, checkpoints)
    runtime.scales = ran.scales
    return ran.bound


def _first(core: LinearCore, region: Region | None) -> Ran:
    """What a forward that no backward asks for runs under."""
    bound, runtime = core.bound if region is None else region.spec_for(core), core.session
    if runtime.attached or not bound.spec.slots:
        return Ran(bound, None)
    return Ran(bound, runtime.slots.hold(region is not None, None if region is None else region.group))


def _again(core: LinearCore, checkpoints: list[recompute.Checkpoint]) -> Ran:
    """What the forward ran under that is run again now."""
    ran: Ran | None = core.session.recomputations.next(core, checkpoints)
    if ran is not None:
        return ran
    if core.ran_in_region and not any(each.again for each in checkpoints):
        raise ValueError(
            f"{core.spec.name}: backward runs it again, and nothing says under which dlp.autocast region it ran: pass "
            f"use_reentrant=False to torch.utils.checkpoint, or set recipes by layer groups"
        )
    return _first(core, None)


def check_compiled(bound: BoundSpec) -> None:
    """ValueError where a region is active that compiled code could not look up."""
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
    """Run the linears inside under this recipe.

    enabled               False: in high precision
    recipe                a name, a Recipe or a CustomRecipe; None: each layer's own
    calibrating           with enabled=False: record the amaxes that delayed scaling will need
    amax_reduction_group  the ranks that share scales; it must contain the tp group of sequence-parallel layers
    """
    chosen = None if recipe is None else recipes.as_recipe(recipe)
    outer = _REGION.get()
    region = Region(enabled, chosen, calibrating, amax_reduction_group, torch.is_grad_enabled())
    token = _REGION.set(region)
    try:
        yield
    finally:
        _REGION.reset(token)
    if outer is not None:
        outer.touched.update(region.touched)
    elif torch.is_grad_enabled():
        for runtime in region.touched:
            runtime.leave_region(amax_reduction_group)
