"""autocast: run layers inside a `with` block under another recipe.

    with dlp.autocast(recipe=dlp.recipe("fp8_delayed")):
        y = model(x)
    y.sum().backward()                    # backward uses the recipe of the forward, also outside of the block

The region is a context variable, which a layer looks up once per forward. Regions nest; the innermost region decides. A forward
that is recomputed in backward (activation checkpointing) uses the recipe of the first run, also if backward runs outside the
region.

Without an attached optimizer there is no step boundary. Delayed scales are then updated as in Transformer Engine: the scales of
x and w when the outermost region ends, if gradients are enabled, and the scales of dy when the backward of the region's layers
ends. Scales of layers that run outside of all regions are updated by `dlp.end_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel.linear.active import REGION, Region
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, LayerState
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import KeepHighPrecision, Origin, Quantizer, QuantizerCaps, ScaleSlot, SlotOptions, caps_of
from dlp.quant.recipe import Recipe
from dlp.quant.stats import measured, plain
from dlp.quant.tensor import QuantizedTensor


@dataclass(frozen=True)
class Calibrate(KeepHighPrecision):
    """Quantizer that keeps values in high precision and records their amax, from which a delayed scale will be computed.

    `slot`: options of the delayed scale; None: no amax is recorded."""

    slot: SlotOptions | None = None

    @property
    def caps(self) -> QuantizerCaps:  # type: ignore[override]
        return QuantizerCaps(slot=self.slot)

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        if slot is not None:
            slot.record(x)
        return super().cast(x, amax, out=out)


def high_precision(recipe: Recipe, calibrating: bool) -> Recipe:
    """Return the recipe with all operands and results in high precision. If `calibrating`, tensors with delayed scales still
    record their amaxes."""

    def keep(quantizer: Quantizer) -> Quantizer:
        options = caps_of(quantizer).slot if calibrating else None
        return KeepHighPrecision() if options is None else Calibrate(slot=options)

    def kept(result: Quantizer | None) -> Quantizer | None:
        delayed = calibrating and result is not None and caps_of(result).slot is not None
        return keep(result) if delayed and result is not None else None

    x, w, dy = (getattr(recipe, name).mapped(keep) for name in recipes.OPERANDS)
    name = f"{recipe.name}, {'calibrating' if calibrating else 'off'}"
    return Recipe(name, x, w, dy, reduce_amax=recipe.reduce_amax, y=kept(recipe.y), dx=kept(recipe.dx))


def quantizes_nothing(recipe: Recipe) -> bool:
    """Whether all operands and results of a recipe stay in high precision."""
    operands = (getattr(recipe, name) for name in recipes.OPERANDS)
    return recipe.y is recipe.dx is None and all(operand.keeps_source for operand in operands)


class RecipeRegion(Region):
    """Region of one `with dlp.autocast(...)` block. Layers ask the region for the spec of each forward."""

    def spec_for(self, core: LayerState) -> BoundSpec:
        """Return the spec that the layer has outside of regions, or the variant of this spec that the region requires."""
        session = core.session
        session.regions = True
        core.ran_under.learned_in_region |= self.learns
        self.touched[session] = None
        key = (self.enabled, self.recipe, self.calibrating, self.group)
        if key not in core.variants and key != (True, None, self.calibrating, None):
            # Create the variant of every layer, not only of `core`: all ranks then have the same scale slots, even if they run
            # different layers.
            for each in session.cores:
                each.variants[key] = BoundSpec(self._variant(each), session, each.weights)
            session.rebuild()
        bound: BoundSpec = core.variants.get(key, core.bound)
        self.resolved.add(bound)
        return bound

    @property
    def quantizes_nothing(self) -> bool:
        """Whether the region is enabled without a recipe, at least one layer ran in the region, and no recipe of these layers
        quantizes."""
        own = self.enabled and self.recipe is None and bool(self.resolved)
        return own and all(quantizes_nothing(bound.spec.recipe) for bound in self.resolved)

    def _variant(self, core: LayerState) -> LinearSpec:
        own, its = core.spec, plain(core.spec.recipe)
        if self.recipe is not None:
            own.check_recipe_may_change("leave recipe out of dlp.autocast")
        recipe = its if self.recipe is None else self.recipe.for_layer(own.members[0])
        suffix = "" if recipe == its else f"[{recipe}]"
        if not self.enabled:
            recipe = high_precision(recipe, self.calibrating)
            if core.stats is not None:
                recipe = measured(recipe, own.members[0], core.stats)
        return replace(own, recipe=recipe, amax_group=self.group or own.amax_group, variant=suffix)


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: Any = None,
    calibrating: bool = False,
    amax_reduction_group: ProcessGroup | None = None,
) -> Iterator[None]:
    """Return a context manager that runs the linears inside its `with` block under another recipe.

    Args:
        enabled: False runs the linears of the block in high precision.
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
        raise ValueError("dlp.autocast has no effect on compiled code: set recipes by layer groups or dlp.set_recipe")
    if not isinstance(enabled, bool):
        raise TypeError(
            f"dlp.autocast: enabled must be True or False; got {enabled!r}: pass a recipe by the keyword recipe=..."
        )
    chosen = None if recipe is None else recipes.as_recipe(recipe)
    outer = REGION.get()
    region = RecipeRegion(enabled, chosen, calibrating, amax_reduction_group, torch.is_grad_enabled())
    token = REGION.set(region)
    try:
        yield
    finally:
        REGION.reset(token)
    if region.quantizes_nothing:
        next(iter(region.touched)).note(
            "dlp.autocast without a recipe: each layer keeps its own recipe, and no recipe of the layers in this "
            "region quantizes; pass recipe=..., or set recipes of layers"
        )
    if outer is not None:
        outer.touched.update(region.touched)
    elif torch.is_grad_enabled():
        for session in region.touched:
            session.leave_region(amax_reduction_group)
