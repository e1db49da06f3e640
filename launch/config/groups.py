"""Groups of layers in a configuration: the settings of sections.py and the switches of layers that `dlp` declares."""

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
        """Return the options of this group that are options of `dlp.LayerGroup`."""
        return {name: value for name in FIELDS if (value := getattr(self, name, None)) is not None}

    def recipes(self) -> list[str | dict[str, Any]]:
        """Return all recipes that this group names."""
        return [
            recipe for recipe in (self.recipe, *(entry["recipe"] for entry in self.swap or ())) if recipe is not None
        ]


SCHEMA: dict[str, type[Section]] = {**SECTIONS, "groups": Group}
