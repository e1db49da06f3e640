"""Scheduled recipe changes (key `swap`) and cast statistics (key `stats`) of the layer groups of a config.

The recipe changes of a layer come from the last matching group that sets `recipe` or `swap`: a group that sets only a recipe
cancels the changes of earlier groups for its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import dlp
from dlp import Plan
from dlp.parallel.model import boundary
from dlp.quant.patterns import must_match
from dlp.quant.recipe import as_recipe
from launch.config.groups import Group


@dataclass(frozen=True)
class PlannedSwap:
    """Recipe change of `layers` after `at_step` completed steps."""

    at_step: int
    recipe: Any
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"after step {self.at_step}: {as_recipe(self.recipe)} for {some(self.layers)}"


def some(layers: Sequence[str]) -> str:
    """Abbreviate a list of layer names: the first name and the number of further layers."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more layers"


def matching(group: Group, model: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the linears that match a group. Raises ValueError for a pattern that matches none."""
    names = [row.name for row in plan.layers]
    lengths = {
        name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    prefix = getattr(model, "base_model_prefix", "")
    found = {
        name for pattern in group.match for name in must_match(names, lengths, pattern, prefix, asked_by=group.title())
    }
    return [name for name in names if name in found]


def deciding_groups(groups: Sequence[Group], model: nn.Module, plan: Plan) -> dict[str, Group]:
    """Return the last group that matches each linear, by name of the linear, for linears that a group matches."""
    return {name: group for group in groups for name in matching(group, model, plan)}


def planned_swaps(groups: Sequence[Group], steps: int, model: nn.Module, plan: Plan) -> list[PlannedSwap]:
    """Return all recipe changes of a run of `steps` steps, sorted by step, then in the order of groups."""
    asked = deciding_groups([group for group in groups if group.recipe is not None or group.swap], model, plan)
    swaps = []
    for group in groups:
        layers = tuple(name for name, decides in asked.items() if decides is group)
        swaps += [PlannedSwap(step, recipe, layers) for step, recipe in group.swaps(steps) if layers]
    return sorted(swaps, key=lambda planned: planned.at_step)


def prepare(groups: Sequence[Group], steps: int, model: nn.Module, plan: Plan) -> list[PlannedSwap]:
    """Schedule the recipe changes of a converted and attached model, enable cast statistics of layers with `stats`, and return
    the recipe changes."""
    swaps = planned_swaps(groups, steps, model, plan)
    for planned in swaps:
        boundary.schedule(model, planned.layers, planned.at_step, planned.recipe)
    chosen: dict[str, bool] = {}
    for group in groups:
        if group.stats is not None:
            chosen |= dict.fromkeys(matching(group, model, plan), group.stats)
    dlp.record_stats(model, *(name for name, measured in chosen.items() if measured))
    return swaps
