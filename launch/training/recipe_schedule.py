"""Scheduled recipe changes and statistics of the layer groups of a configuration, layer by layer.

The scheduled changes of a layer come from the last group that matches the layer and sets a recipe or changes: a group with
a recipe cancels the changes that earlier groups schedule for its layers.
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
    """Recipe change of layers after `at_step` steps."""

    at_step: int
    recipe: Any
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"after step {self.at_step}: {as_recipe(self.recipe)} for {some(self.layers)}"


def some(layers: Sequence[str]) -> str:
    """Abbreviate a list of layers."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more layers"


def matching(group: Group, model: nn.Module, plan: Plan) -> list[str]:
    """Return the linears that match a group. Raises ValueError for a pattern without a match."""
    names = [row.name for row in plan.layers]
    lengths = {
        name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    prefix = getattr(model, "base_model_prefix", "")
    found = {
        name for pattern in group.match for name in must_match(names, lengths, pattern, prefix, asked_by=group.title())
    }
    return [name for name in names if name in found]


def planned_swaps(groups: Sequence[Group], steps: int, model: nn.Module, plan: Plan) -> list[PlannedSwap]:
    """Return all scheduled recipe changes of a run of `steps` steps, by step and then in the order of groups."""
    asked: dict[str, Group] = {}
    for group in groups:
        if group.recipe is not None or group.swap:
            asked |= dict.fromkeys(matching(group, model, plan), group)
    swaps = []
    for group in groups:
        layers = tuple(name for name, decides in asked.items() if decides is group)
        swaps += [PlannedSwap(step, recipe, layers) for step, recipe in group.swaps(steps) if layers]
    return sorted(swaps, key=lambda planned: planned.at_step)


def prepare(groups: Sequence[Group], steps: int, model: nn.Module, plan: Plan) -> list[PlannedSwap]:
    """Schedule the recipe changes of a converted and attached model, and start to measure the layers with `stats`."""
    swaps = planned_swaps(groups, steps, model, plan)
    for planned in swaps:
        boundary.schedule(model, planned.layers, planned.at_step, planned.recipe)
    chosen: dict[str, bool] = {}
    for group in groups:
        if group.stats is not None:
            chosen |= dict.fromkeys(matching(group, model, plan), group.stats)
    dlp.record_stats(model, *(name for name, measured in chosen.items() if measured))
    return swaps
