"""Convert config.json of a Hugging Face folder into `[model]`, and `[model]` into config.json.

The imported model must compute the same function as in `transformers`. Every setting therefore comes from the file or is the
default of `transformers` (`launch.models.families`), never a default of this package. Contradicting or unsupported settings are
errors that name the setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.models.families import FAMILIES, KEYS, UNSUPPORTED, Family
from launch.models.rope_scaling import ORIGINAL, SCALINGS
from launch.models.settings import Model

CONFIG = "config.json"
NEEDED = ("layers", "hidden", "ffn", "heads", "vocab")  # [model] keys that every config.json must have
TABLES = ("rope_scaling", "rope_parameters")
LONGEST = "max_position_embeddings"
THETA = 10000.0  # default of `transformers` for rope_theta


def read_config(folder: Path) -> tuple[Model, dict[str, Any]]:
    """Read `[model]` from the config.json of a folder.

    Returns:
        The model, and the content of config.json.

    Raises:
        ValueError: The file cannot be read, lacks a key, contradicts itself, or describes an unsupported model.
    """
    path = folder / CONFIG
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a folder of Hugging Face's, with {CONFIG}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch the file again") from None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r}, expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    try:
        _refuse(given, family)
        settings = _settings(given, family)
        theta, scaling = _positions(given, family)
        return Model(family=kind, rope_theta=theta, rope_scaling=scaling, **settings), given
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse(given: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a key with an unsupported value, and for keys that contradict each other."""
    for key, expected in family.fixed:
        if given.get(key, expected) != expected:
            raise ValueError(f"{key} is {given[key]!r}, but models here have {expected!r}; choose another model")
    for key in UNSUPPORTED:
        if given.get(key) is not None:
            raise ValueError(f"{key} is {given[key]!r}, but models here have None; choose another model")
    classes = given.get("architectures")
    if classes and family.architecture not in classes:
        raise ValueError(
            f"model_type {given['model_type']} is read as {family.architecture}, but architectures is {classes}; "
            f"correct the wrong key, or give the folder of a language model"
        )
    if family.window and given.get("use_sliding_window") is False and given.get("sliding_window", 0) is not None:
        raise ValueError(
            "use_sliding_window is False, but transformers reads sliding_window alone for this model_type, which is not "
            "null; set sliding_window to null, or leave use_sliding_window out"
        )
    _refuse_layer_types(given, family)


def _refuse_layer_types(given: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError if config.json has `layer_types` and the list is not, for every layer, the kind of attention that
    `sliding_window` implies."""
    types = given.get("layer_types")
    if types is None:
        return
    windowed = family.window and given.get("sliding_window", 0) is not None
    expected = "sliding_attention" if windowed else "full_attention"
    if not isinstance(types, list) or types != [expected] * given.get("num_hidden_layers", len(types)):
        raise ValueError(
            f"layer_types is {str(types)[:80]}, but models here have {expected!r} in every layer; choose a model "
            f"without layer_types, or correct the list"
        )


def _settings(given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings of `[model]` that `KEYS` lists."""
    if lacking := [KEYS[ours] for ours in NEEDED if given.get(KEYS[ours]) is None]:
        raise ValueError(f"{', '.join(lacking)} missing; fetch the file again")
    optional = dict(family.optional)
    for key in optional:
        if key in given and given[key] is None and key not in family.nullable:
            raise ValueError(f"{key} is null, which transformers does not accept either; give a value, or leave it out")
    theirs = {**optional, **{key: value for key, value in given.items() if family.window or key != "sliding_window"}}
    if theirs["num_key_value_heads"] is None:
        theirs["num_key_value_heads"] = theirs["num_attention_heads"]
    if theirs["head_dim"] is None:
        theirs["head_dim"] = _head_dim(theirs["hidden_size"], theirs["num_attention_heads"])
    heads, kv_heads = theirs["num_attention_heads"], theirs["num_key_value_heads"]
    stated = isinstance(heads, int) and type(kv_heads) is int and "num_key_value_heads" in given
    if stated and kv_heads > 0 and heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads = {heads}; correct the wrong key"
        )
    return {ours: theirs.get(key) for ours, key in KEYS.items()}


def _head_dim(hidden: Any, heads: Any) -> Any:
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _one(given: Mapping[str, Any], name: str, *aliases: str, beside: bool = True, default: Any = None) -> Any:
    """Return the value of a rotary setting, which a file may state at the top level and in each table of `TABLES`.

    Args:
        given: Content of config.json.
        name: Key of the setting; `aliases` are other keys of the same setting inside the tables.
        beside: Whether the key is also read at the top level.
        default: Value if the file does not state the setting.

    Raises:
        ValueError: The file states different values.
    """
    places = {f"{table}.{key}": (given.get(table) or {}).get(key) for table in TABLES for key in (name, *aliases)}
    if beside:
        places[name] = given.get(name)
    stated = {place: value for place, value in places.items() if value is not None}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{name} has different values: {', '.join(f'{place} = {value!r}' for place, value in stated.items())}; leave the "
            f"wrong one out"
        )
    return values[0] if values else default


def _positions(given: Mapping[str, Any], family: Family) -> tuple[float, dict[str, Any] | None]:
    """Return (rope_theta, rope_scaling). `transformers` 5 writes both into the table rope_parameters; `transformers` 4 writes
    rope_theta at the top level, beside the table rope_scaling. Old files have the key type instead of rope_type."""
    tables = [given.get(key) or {} for key in TABLES]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{' and '.join(TABLES)}: expected tables, got {tables}")
    if any(table.get("rope_theta", THETA) is None for table in (given, *tables)):
        raise ValueError("rope_theta is null, which transformers does not accept either; give a value, or leave it out")
    turned = _one(given, "partial_rotary_factor", default=1.0)
    if turned != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {turned}, but models here rotate complete heads; choose another model"
        )
    theta = _one(given, "rope_theta", default=THETA)
    if nested := [key for table in tables for key, value in table.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{' and '.join(TABLES)}: separate RoPE parameters for {', '.join(nested)}, but models here have one set of RoPE "
            f"parameters for all layers; choose another model"
        )
    kind = _one(given, "rope_type", "type", beside=False)
    keys = sorted({*tables[0], *tables[1]} - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
    numbers = {key: value for key in keys if (value := _one(given, key, beside=key == ORIGINAL)) is not None}
    if kind in (None, "default"):
        if numbers:
            raise ValueError(
                f"rope_type is {kind!r}, which does not scale positions, but the table has {', '.join(numbers)}; set "
                f"rope_type, or remove these keys"
            )
        return theta, None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"rope_type is {kind!r}, expected one of {', '.join(SCALINGS)}")
    if ORIGINAL in SCALINGS[kind][0]:
        longest = given.get(LONGEST, dict(family.optional)[LONGEST])
        numbers[ORIGINAL] = _one(given, ORIGINAL, default=longest)
    if numbers.get("truncate") is True:  # this is the default of transformers, and the only supported value
        del numbers["truncate"]
    needed, allowed = SCALINGS[kind]
    if unread := sorted(numbers.keys() - needed - allowed):
        raise ValueError(
            f"rope_type {kind!r} has {', '.join(f'{key} = {numbers[key]!r}' for key in unread)}, which models here do "
            f"not support; choose another model"
        )
    if lacking := sorted(needed - numbers.keys()):
        raise ValueError(f"rope_type {kind!r} has no {', '.join(lacking)} in its table; fetch {CONFIG} again")
    return theta, {"rope_type": kind, **numbers}


def config_json(model: Model, dtype: str, positions: int) -> dict[str, Any]:
    """Return a config.json from which `transformers` 4 and 5 construct the same model. bos_token_id and eos_token_id are null,
    because a checkpoint does not store them; if they were missing, `transformers` would assume 1 and 2.

    Args:
        model: Settings of the model.
        dtype: Name of the dtype of the weights in torch, for example "bfloat16".
        positions: Value of max_position_embeddings.
    """
    family, settings = FAMILIES[model.family], asdict(model)
    written = {theirs: settings[ours] for ours, theirs in KEYS.items() if ours != "sliding_window" or family.window}
    return {
        "architectures": [family.architecture], "model_type": model.family, "dtype": dtype, "torch_dtype": dtype,
        **written, **dict(family.fixed), "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling, LONGEST: positions, "use_cache": True,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
