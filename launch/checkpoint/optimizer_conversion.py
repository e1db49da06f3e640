"""Convert the averages of AdamW (exp_avg, exp_avg_sq) between fp32 and 8-bit or 4-bit codes when a checkpoint is loaded.

The form of an average is the shape and dtype of its tensors: codes and scale, or one fp32 tensor. The form in the checkpoint
differs from the form in the run after a change of `[train] optimizer`; the form of codes also differs if the mesh shards the
parameter differently. An average whose form differs is loaded unsharded, one average at a time, decoded and written into the
state of the run. Averages with equal forms are loaded directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dlp.optim.encodings import AVERAGES, Average, decoded, write

Form = dict[str, tuple[torch.Size, torch.dtype]]  # keys "codes" and "scale", or "" for an average that is not encoded
Load = Callable[[dict[str, Any]], None]


def form_of(average: Average) -> Form:
    parts = average if isinstance(average, dict) else {"": average}
    return {part: (tensor.shape, tensor.dtype) for part, tensor in parts.items()}


def saved_form(index: Metadata, name: str) -> Form:
    """Return the form of the average `name` in a checkpoint; empty if the checkpoint has no such average."""
    found: Form = {}
    for part in ("", "codes", "scale"):
        entry = index.state_dict_metadata.get(f"{name}.{part}" if part else name)
        if isinstance(entry, TensorStorageMetadata):
            found[part] = entry.size, entry.properties.dtype
    return found


def take_differing(states: dict[str, dict[str, Any]], index: Metadata) -> dict[tuple[str, str], Average]:
    """Remove from `states` the averages whose form in the checkpoint differs, and return them by (parameter, average name).

    states: states of the optimizer by parameter name.
    """
    differing = {}
    for parameter, state in states.items():
        for name in AVERAGES.keys() & state.keys():
            saved = saved_form(index, f"optimizer.{parameter}.{name}")
            if saved and saved != form_of(state[name]):
                differing[parameter, name] = state.pop(name)
    return differing


def convert(differing: dict[tuple[str, str], Average], index: Metadata, load: Load) -> None:
    """Load, decode and write the averages that `take_differing` returned. `load` fills a state dict from the checkpoint."""
    for (parameter, name), average in differing.items():
        saved = saved_form(index, f"optimizer.{parameter}.{name}")
        room = {part: torch.empty(size, dtype=dtype) for part, (size, dtype) in saved.items()}
        load({"optimizer": {parameter: {name: room.get("", room)}}})
        write(average, room[""] if "" in room else decoded(room, AVERAGES[name]), AVERAGES[name])
