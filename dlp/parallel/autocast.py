"""autocast: a recipe for what runs inside a `with` block, whatever the layers' groups say.

    with dlp.autocast(recipe=dlp.recipe("fp8_delayed")):
        y = model(x)
    y.sum().backward()                    # outside: backward follows the recipe that forward ran under

The region is a context variable, looked up once per forward of a layer; regions nest, the innermost decides. A forward
that backward runs again (activation checkpointing) uses what the first one used, wherever backward is.

Where no optimizer is attached, there is no step boundary. Delayed scales are then updated as Transformer Engine does:
those of x and w when the outermost region ends, if gradients are enabled, and those of dy at the end of each backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel.runtime import Runtime, in_backward
from dlp.parallel.spec import LinearSpec
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, ScaleSlot, SlotOptions, slot_options
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.stats import plain
from dlp.quant.tensor import QuantizedTensor

if TYPE_CHECKING:
    from dlp.parallel.linear import LinearCore


@dataclass(frozen=True)
class Calibrate(KeepHighPrecision):
    """Leaves the values as they are and records their amax for the scale that this slot will have."""

    delayed: SlotOptions | None = None

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
        options = slot_options(quantizer) if calibrating else None
        return KeepHighPrecision() if options is None else Calibrate(delayed=options)

    operands = (getattr(recipe, name) for name in recipes.OPERANDS)
    x, w, dy = (Operand(keep(operand.rowwise), keep(operand.columnwise)) for operand in operands)
    return Recipe(f"{recipe.name}, {'calibrating' if calibrating else 'off'}", x, w, dy, reduce_amax=recipe.reduce_amax)


@dataclass
class Region:
    """What one `with` block asks for, and the runtimes of the layers that ran in it."""

    enabled: bool
    recipe: Any
    calibrating: bool
    group: ProcessGroup | None
    touched: dict[Runtime, None] = field(default_factory=dict)
    resolved: set[LinearSpec] = field(default_factory=set)

    def spec_for(self, core: LinearCore) -> LinearSpec:
        """The layer's own spec, or the variant of it that this region asks for."""
        runtime = core.spec.runtime
        runtime.enter_region(self.group)
        self.touched[runtime] = None
        key = (self.enabled, self.recipe, self.calibrating, self.group)
        if key not in core.variants and key != (True, None, self.calibrating, None):
            for each in runtime.cores:  # of all layers, so that ranks that run other layers have the same slots
                each.variants[key] = self._variant(each)
            runtime.rebuild()
        spec = core.variants.get(key, core.spec)
        self.resolved.add(spec)
        return spec

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


def active_spec(core: LinearCore) -> LinearSpec:
    """The spec that a forward of this layer runs under, here and now."""
    if in_backward():
        return core.last_spec
    region = _REGION.get()
    core.last_spec = core.spec if region is None else region.spec_for(core)
    return core.last_spec


def check_compiled(spec: LinearSpec) -> None:
    """ValueError where a region is active that compiled code could not look up."""
    region = _REGION.get()
    if region is not None and spec not in region.resolved and not in_backward():
        raise ValueError(
            f"{spec.name}: dlp.autocast does not reach into torch.compile: set this layer's recipe by its layer group or "
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
    chosen = None if recipe is None else recipes.made(recipe)
    outer = _REGION.get()
    region = Region(enabled, chosen, calibrating, amax_reduction_group)
    token = _REGION.set(region)
    try:
        yield
    finally:
        _REGION.reset(token)
    if outer is not None:
        outer.touched.update(region.touched)
    elif torch.is_grad_enabled():
        for runtime in region.touched:
            runtime.leave_region()
