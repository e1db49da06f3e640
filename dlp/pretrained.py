"""Folders of transformers (config.json, *.safetensors) to models on ranks, without a copy of the weights on any rank.

    model = dlp.meta_model(folder)                    parameters without memory, buffers as the model makes them
    dlp.convert(model, dlp.groups_for(model, tp=2), mesh); dlp.fully_shard(...)
    dlp.load_pretrained(model, folder, device)        one tensor at a time; each rank keeps its shard
    model.save_pretrained(folder)                     called on all ranks

Only this file needs transformers and safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlp.parallel.weight.local import fill


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which new parameters have no memory; buffers have memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            parameter = made
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def meta_model(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the causal language model of a folder of transformers, with parameters on the meta device.

    Args:
        folder: folder with config.json.
        dtype: dtype of the parameters.

    Returns:
        The model, without memory for parameters.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
        ValueError: for a folder without config.json, and for an architecture that is not a causal language model.

    Examples:
        >>> model = dlp.meta_model("my/Qwen3-8B", dtype=torch.float32)  # doctest: +SKIP
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ModuleNotFoundError("dlp.meta_model makes a model of transformers: pip install transformers") from None
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder}: no config.json in the folder; name a folder that save_pretrained wrote")
    with _parameters_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, device: torch.device | str = "cpu") -> None:
    """Load the weights of a folder into a model, converted and sharded or not, one tensor at a time.

    Args:
        model: model of `dlp.meta_model`, after `dlp.convert` and `dlp.fully_shard` and before `dlp.attach`. Parameters may be
            on the meta device.
        folder: folder with *.safetensors, whose names are the parameter names of the model.
        device: device on which parameters of the meta device get memory.

    Raises:
        ValueError: for parameters and buffers that no file contains, tensors that the model lacks, and other shapes.

    Examples:
        >>> model = dlp.meta_model("my/Qwen3-8B")  # doctest: +SKIP
        >>> dlp.load_pretrained(model, "my/Qwen3-8B", "cuda")  # doctest: +SKIP
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.device.type != "meta"}
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        model.to_empty(device=torch.device(device))
    own: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    for name, values in buffers.items():
        own[name].copy_(values)
    own |= dict(model.named_parameters(remove_duplicate=False))
    loaded: set[int] = set()
    for name, values in _tensors(Path(folder)):
        if name not in own:
            raise ValueError(f"{folder}: {name} is in the files, and {type(model).__name__} has no such parameter")
        if own[name].shape != values.shape:
            raise ValueError(
                f"{folder}: {name} is {list(values.shape)} in the files and {list(own[name].shape)} in the model"
            )
        fill(own[name], values.to(device=own[name].device, dtype=own[name].dtype))
        loaded.add(id(own[name]))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in loaded]
    if missing:
        raise ValueError(
            f"{folder}: no file has {', '.join(missing[:4])}{f' and {len(missing) - 4} more' if len(missing) > 4 else ''} of "
            f"{type(model).__name__}; name the folder of this model"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and values of each tensor, from memory-mapped files, one at a time."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors in the folder; name a folder that save_pretrained wrote")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)
