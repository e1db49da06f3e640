"""Hugging Face's config.json of a folder of weights, read as `[model]` and written from it.

What is read must be computed here as it is there, so a setting that would change the result is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.models.rope import SCALINGS
from launch.models.tables import FAMILIES, FIXED, KEYS
from launch.schema import ConfigError
from launch.sections import Model

CONFIG = "config.json"
NEEDED = ("layers", "hidden", "ffn", "heads", "vocab")  # [model] keys without which nothing is known


def read_config(folder: Path) -> tuple[Model, dict[str, Any]]:
    """`[model]` of a folder, and its config.json. ValueError for one that cannot be read, or is of a model that is not
    here."""
    path = folder / CONFIG
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a folder of Hugging Face's, with {CONFIG}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r}, expected one of {', '.join(FAMILIES)}")
    _refuse(path, given)
    family = FAMILIES[kind]
    settings = {**dict(family.defaults), **{key: value for key, value in given.items() if value is not None}}
    if given.get("sliding_window", "") is None or not family.window:
        settings.pop("sliding_window", None)
    settings.setdefault("num_key_value_heads", settings.get("num_attention_heads"))
    known = {ours: settings[theirs] for ours, theirs in KEYS.items() if theirs in settings}
    if lacking := [KEYS[ours] for ours in NEEDED if ours not in known]:
        raise ValueError(f"{path}: no {', '.join(lacking)} in it; fetch it again")
    known.setdefault("head_dim", _head_dim(known))
    theta, scaling = _positions(path, given)
    try:
        return Model(family=kind, rope_theta=theta, rope_scaling=scaling, **known), given
    except (ConfigError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse(path: Path, given: dict[str, Any]) -> None:
    """ValueError for what would be computed otherwise."""
    for key, expected in (*FIXED, *FAMILIES[given["model_type"]].fixed):
        if given.get(key, expected) != expected:
            raise ValueError(f"{path}: {key} is {given[key]!r}, but models here have {expected!r}")


def _head_dim(known: dict[str, Any]) -> Any:
    hidden, heads = known["hidden"], known["heads"]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _positions(path: Path, given: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling; version 5 of `transformers` writes both as rope_parameters."""
    tables = [given.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: rope_scaling and rope_parameters: expected tables, got {tables}")
    said = {**tables[0], **tables[1]}
    turned = said.pop("partial_rotary_factor", given.get("partial_rotary_factor"))
    if turned not in (None, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor is {turned}, but here heads turn whole")
    theta = said.pop("rope_theta", given.get("rope_theta") or 10000.0)
    kind = said.get("rope_type", said.pop("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        raise ValueError(
            f"{path}: its positions are scaled by rope_type {kind!r}, expected one of {', '.join(SCALINGS)}"
        )
    return theta, {"rope_type": kind, **{key: value for key, value in said.items() if value is not None}}


def config_json(model: Model, dtype: str, positions: int) -> dict[str, Any]:
    """What `transformers`, of version 4 or 5, makes the same model of. dtype: of the weights; positions: the longest context
    that is claimed."""
    family, settings = FAMILIES[model.family], asdict(model)
    written = {theirs: settings[ours] for ours, theirs in KEYS.items() if ours != "sliding_window" or family.window}
    return {
        "architectures": [family.architecture], "model_type": model.family, "dtype": dtype, "torch_dtype": dtype,
        **written, **dict(FIXED), **dict(family.fixed), "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling, "max_position_embeddings": positions, "use_cache": True,
    }  # fmt: skip
