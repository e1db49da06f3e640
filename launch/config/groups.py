"""Layer groups of a config, [[groups]]: the settings of sections.py and the layer options that `dlp` declares."""

from dataclasses import dataclass
from typing import Any

from dlp.parallel.linear.spec import LayerOptions
from dlp.parallel.model.groups import FIELDS
from launch.config.sections import SECTIONS, Choices, Schedule
from launch.settings.schema import Section


@dataclass(frozen=True, kw_only=True)
class Group(Schedule, LayerOptions, Choices):
    """Settings of layers, chosen by name. For each layer and key the last matching group that sets the key wins."""

    def layer_fields(self) -> dict[str, Any]:
        """Return the settings of this group that are arguments of `dlp.LayerGroup`, without unset settings."""
        return {name: value for name in FIELDS if (value := getattr(self, name, None)) is not None}

    def recipes(self) -> list[str | dict[str, Any]]:
        """Return the recipe of this group and the recipes of its scheduled changes."""
        return [
            recipe for recipe in (self.recipe, *(entry["recipe"] for entry in self.swap or ())) if recipe is not None
        ]


SCHEMA: dict[str, type[Section]] = {**SECTIONS, "groups": Group}
