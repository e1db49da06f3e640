"""Whole tensors of a converted model, for code that writes plain ones: Hugging Face's `save_pretrained`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the full tensor of every DTensor, tied ones as one tensor; all ranks call it together, and each
    holds the whole model for a moment."""
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    made: dict[Any, Tensor] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        key = tied.get(name, name)
        if key not in made:
            made[key] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return {name: made[tied.get(name, name)] for name in state}


def save_whole(model: nn.Module) -> None:
    """Let the model's `save_pretrained`, if it has one, write whole tensors, by rank 0; all ranks call it."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(_save_pretrained, model)  # type: ignore[assignment]  # so that a copy saves itself


def _save_pretrained(
    model: nn.Module, folder: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **options: Any
) -> Any:
    if not args:
        options.setdefault("is_main_process", dist.get_rank() == 0)
    whole = whole_state_dict(model) if state_dict is None else state_dict
    kind: Any = type(model)
    return kind.save_pretrained(model, folder, *args, state_dict=whole, **options)
