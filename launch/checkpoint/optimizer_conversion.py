"""Averages of an optimizer that a checkpoint holds in another form than the run that loads it: as codes where the run keeps
fp32, the other way round, or of another encoding. They are loaded whole, a parameter at a time, decoded, and written into
what the run has.

That is so behind another `[train] optimizer`, and on a mesh that leaves other rows on a rank. Codes in the form that the
run has are taken as they are, on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dlp.optim.encodings import AVERAGES, Average, decoded, write

Form = dict[str, tuple[torch.Size, torch.dtype]]  # of "codes" and "scale", or of "" for what is not encoded
Load = Callable[[dict[str, Any]], None]


def form_of(average: Average) -> Form:
    parts = average if isinstance(average, dict) else {"": average}
    return {part: (tensor.shape, tensor.dtype) for part, tensor in parts.items()}


def saved_form(index: Metadata, name: str) -> Form:
    """Of the average of this name; empty where the checkpoint has none."""
    found: Form = {}
    for part in ("", "codes", "scale"):
        entry = index.state_dict_metadata.get(f"{name}.{part}" if part else name)
        if isinstance(entry, TensorStorageMetadata):
            found[part] = entry.size, entry.properties.dtype
    return found


def take_differing(states: dict[str, dict[str, Any]], index: Metadata) -> dict[tuple[str, str], Average]:
    """Out of the states of parameters, by name, those averages that the checkpoint has in another form: by both names."""
    differing = {}
    for parameter, state in states.items():
        for name in AVERAGES.keys() & state.keys():
            saved = saved_form(index, f"optimizer.{parameter}.{name}")
            if saved and saved != form_of(state[name]):
                differing[parameter, name] = state.pop(name)
    return differing


def convert(differing: dict[tuple[str, str], Average], index: Metadata, load: Load) -> None:
    """Fill the averages that `take_differing` found. `load`: fills a state dict from the checkpoint."""
    for (parameter, name), average in differing.items():
        saved = saved_form(index, f"optimizer.{parameter}.{name}")
        room = {part: torch.empty(size, dtype=dtype) for part, (size, dtype) in saved.items()}
        load({"optimizer": {parameter: {name: room.get("", room)}}})
        write(average, room[""] if "" in room else decoded(room, AVERAGES[name]), AVERAGES[name])
