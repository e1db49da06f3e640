"""Keys of the table `rope_scaling` in Hugging Face's config.json and in `[model]`. This module does not import torch."""

from __future__ import annotations

from typing import Any

from launch.settings.schema import number

POSITIVE = number("> 0")
ORIGINAL = "original_max_position_embeddings"
# rope_type -> required keys, optional keys
SCALINGS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}, set()),
    "yarn": ({"factor", ORIGINAL}, {"beta_fast", "beta_slow", "attention_factor"}),
}


def is_scaling(value: Any) -> bool:
    """Return whether a table has a known rope_type, all required and no unknown keys of this type, and only numbers > 0."""
    kind = value.get("rope_type")
    if kind not in SCALINGS:
        return False
    needed, allowed = SCALINGS[kind]
    keys = value.keys() - {"rope_type"}
    return needed <= keys <= needed | allowed and all(POSITIVE.accepts(value[key]) for key in keys)
