"""Load models of Hugging Face transformers (config.json, *.safetensors) onto ranks. No rank holds all weights at once.

    model = dlp.meta_model(folder)                    creates parameters without memory, and buffers with their values
    dlp.convert(model, dlp.groups_for(model, tp=2), mesh); dlp.fully_shard(...)
    dlp.load_pretrained(model, folder, device)        loads one parameter at a time; each rank keeps its shard
    model.save_pretrained(folder)                     all ranks call save_pretrained

Only this file needs transformers and safetensors.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dlp.parallel.weight.local import fill


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device inside a `with` block; buffers are created as usual."""
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
        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=2)
        >>> config.save_pretrained("my-llama")
        >>> dlp.meta_model("my-llama", dtype=torch.float32).lm_head.weight.device
        device(type='meta')
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ModuleNotFoundError("dlp.meta_model needs transformers: pip install transformers") from None
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder}: no config.json in the folder; name a folder that save_pretrained wrote")
    with _parameters_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Allocate all parameters of a model from `meta_model` on `device`, uninitialised. Buffers, such as rotary frequencies,
    move to `device` and keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.device.type != "meta"}
    model.to_empty(device=torch.device(device))
    own = dict(model.named_buffers(remove_duplicate=False))
    for name, values in buffers.items():
        own[name].copy_(values)


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path, device: torch.device | str = "cpu") -> None:
    """Load the weights of a folder into a model, one parameter at a time. The model may be converted and sharded.

    Args:
        model: model from `dlp.meta_model`, before `dlp.attach`. Parameters may be on the meta device.
        folder: folder with *.safetensors, as written by save_pretrained of transformers.
        device: if a parameter is on the meta device, all parameters are allocated on this device.

    Raises:
        ValueError: for a folder without *.safetensors, a parameter that no file contains, a tensor in a file that the model
            does not have and transformers does not ignore, and a tensor with different shapes in the file and in the model.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=2)
        >>> LlamaForCausalLM(config).save_pretrained("my-llama")
        >>> model = dlp.meta_model("my-llama")
        >>> dlp.load_pretrained(model, "my-llama", device="cpu")
        >>> model.lm_head.weight.device
        device(type='cpu')
    """
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        allocate(model, device)
    own: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    own |= dict(model.named_parameters(remove_duplicate=False))
    loaded: set[int] = set()
    for name, values in _values(model, Path(folder), own):
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


def _values(model: nn.Module, folder: Path, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model, values) of the tensors in a folder, one at a time. Names and layouts are converted as by
    `from_pretrained`; for example, weights of experts are stacked. `own`: parameters and buffers of the model by name."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    tensors, prefix, conversions = _tensors(folder), getattr(model, "base_model_prefix", None), _conversions(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found: dict[str, Any] = {}
    for name, read in tensors.items():
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own and name in own:
            renamed, pattern = name, None
        if renamed not in own:
            if any(re.search(each, renamed) for each in ignored):
                continue
            raise ValueError(f"{folder}: {name} is in the files, and {type(model).__name__} has no such parameter")
        made = WeightRenaming(name, renamed) if pattern is None else copy.deepcopy(by_pattern[pattern])
        found.setdefault(renamed, made).add_tensor(renamed, name, pattern or name, read)
    for name, conversion in found.items():
        for target, values in conversion.convert(name, model=model, config=getattr(model, "config", None)).items():
            yield target, values[0] if isinstance(values, list) else values


def _conversions(model: nn.Module) -> list[Any]:
    """Return the conversions that transformers defines for the class of `model`, from tensors in files to parameters; [] for a
    class that is not from transformers."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    own: Any = next((each for each in type(model).__mro__ if not issubclass(each, FSDPModule)), nn.Module)
    if not issubclass(own, PreTrainedModel):
        return []
    with torch.device("meta"):
        return list(get_model_conversion_mapping(own(model.config)))


def _tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Map the name of each tensor in a folder to a function that reads the tensor from a memory-mapped file."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors in the folder; name a folder that save_pretrained wrote")
    found: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        found |= {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}
    return dict(sorted(found.items(), key=lambda item: _numbered(item[0])))


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which layers.10 comes after layers.2, as transformers sorts tensors before their conversion."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
