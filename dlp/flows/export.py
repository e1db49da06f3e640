"""export: copy parameters and buffers of a converted model into a plain model.

    plain = dlp.export(model, build())              the full model with nn.Linears, on every rank
    dlp.quantize_(plain, "qat", mode="dynamic")     optional: quantize as the recipe qat simulated in training

The converted model may be on any mesh: sharded tensors are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model.convert import whole_state_dict
from dlp.parallel.weight.held import HeldWeight
from dlp.parallel.weight.local import local_values
from dlp.quant.parameter import QuantizedParameter

Plain = TypeVar("Plain", bound=nn.Module)


@torch.no_grad()
def export(model: nn.Module, into: Plain) -> Plain:
    """Copy parameters and buffers of a converted or sharded model into a plain model.

    All ranks call `export`; each rank gets the full model.

    Args:
        model: source.
        into: plain model, built by the same code as `model` before conversion, with equal names, shapes and dtypes.

    Returns:
        `into`.

    Raises:
        ValueError: before anything is written, for layers of dlp or quantized weights in `into`; for names, shapes or dtypes
            that differ; for parameters that are tied in `into` but have different values in `model`; and for quantized-only
            weights in `model` (use `dlp.quantized_state_dict`).

    Examples:
        >>> model, plain = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> type(dlp.export(model, plain)[0]).__name__
        'Linear'
    """
    for name, module in into.named_modules():
        if getattr(module, "dlp_made", None) is not None:
            raise ValueError(
                f"export: {name or 'the model'} in `into` is a layer of dlp; construct `into` again, without dlp.convert"
            )
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and any(isinstance(weight, HeldWeight) for weight in module.core.weights):
            raise ValueError(f"export: {name} holds codes and no values; save them by dlp.quantized_state_dict")
    for name, parameter in model.named_parameters():
        if isinstance(local_values(parameter), QuantizedParameter):
            raise ValueError(f"export: {name} holds codes and no values; save them by dlp.quantized_state_dict")
    for name, parameter in into.named_parameters():
        if isinstance(parameter, QuantizedParameter):
            raise ValueError(f"export: {name} in `into` holds codes; quantize `into` after the export")
    whole, wanted = whole_state_dict(model), into.state_dict()
    for name in sorted(whole.keys() ^ wanted.keys()):
        has, lacks = ("model", "into") if name in whole else ("into", "model")
        raise ValueError(
            f"export: {has} has {name}, which {lacks} lacks: construct `into` by the code that constructed the model"
        )
    for name, tensor in wanted.items():
        ours = whole[name]
        if isinstance(tensor, Tensor) and (tensor.is_meta or (ours.shape, ours.dtype) != (tensor.shape, tensor.dtype)):
            raise ValueError(
                f"export: {name} is {ours.dtype} {tuple(ours.shape)}, and in `into` {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}: construct `into` with equal shapes and dtypes, and with "
                f"memory"
            )
    _check_ties(into, whole)
    into.load_state_dict(whole)
    return into


def _check_ties(into: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a parameter that is tied in `into`, but has different values under its names in `whole`."""
    first: dict[int, str] = {}
    for name, parameter in into.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if not torch.equal(whole[name], whole[other]):
            raise ValueError(
                f"export: {other} and {name} are one parameter in `into`, and differ in the model: construct `into` "
                f"without the tie (for example tie_word_embeddings = False in the configuration)"
            )
