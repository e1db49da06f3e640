"""What must hold of a weight that becomes codes, or a layer: one check for `convert`, `quantized_model_init`, `freeze` and
`quantize_`, so that all of them refuse the same weights with the same sentence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from dlp.parallel.weight.parameters import is_placeholder
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Recipe

LEAVE_OUT = "leave it out (convert = false in a layer group, filter_fn of dlp.quantize_)"


def check_is_parameter(name: str, linear: nn.Module) -> None:
    """ValueError for a linear whose weight, or bias, is computed in each forward."""
    if parametrize.is_parametrized(linear):
        which = ", ".join(linear.parametrizations)  # type: ignore[arg-type]
        raise ValueError(
            f"{name}: its {which} is parametrized, as by weight_norm; make it a parameter before "
            f"(torch.nn.utils.parametrize.remove_parametrizations), or {LEAVE_OUT}"
        )
    if linear._parameters.get("weight") is None:
        raise ValueError(
            f"{name}: its weight is no parameter but computed by a hook, as by torch.nn.utils.weight_norm; remove the hook "
            f"before, or {LEAVE_OUT}"
        )


def check_plain(name: str, weight: Tensor) -> None:
    """ValueError for a weight whose values are codes already, or are spread over ranks by something else."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    if isinstance(local, QuantizedParameter) or is_placeholder(weight):
        fmt = f"{local.use.format.name} codes" if isinstance(local, QuantizedParameter) else "codes"
        refuse_codes(name, fmt)
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name}: its weight is a DTensor already: dlp.convert and dlp.quantize_ come before fully_shard and other "
            f"parallelism"
        )


def refuse_codes(name: str, codes: str) -> None:
    """ValueError for a weight that is held as codes. `codes`: their format."""
    raise ValueError(
        f"{name}: its weight is held as {codes} already, and its values are gone: quantize a layer once, from values"
    )


def check_has_values(name: str, weight: Tensor) -> None:
    """ValueError for a weight on the meta device, of which no codes can be made."""
    if weight.is_meta:
        raise ValueError(
            f"{name}: codes are made of values, and its weight lies on the meta device, which has none; name a device, or give "
            f"the model memory and values first"
        )


def check_without_history(name: str, recipe: Recipe) -> None:
    """ValueError for a recipe whose scales of weights follow from earlier steps."""
    if any(caps_of(quantizer).slot for quantizer in (recipe.w.rowwise, recipe.w.columnwise)):
        raise ValueError(
            f"{name}: {recipe} scales weights by their history, and codes alone have none: choose fp8_current or another "
            f"recipe with current or block scales"
        )


def check_unshared(model: nn.Module, linear: Any, key: str = "weight") -> None:
    """ValueError for a weight that another module uses, too, and which would find no values."""
    names = [
        name
        for name, module in model.named_modules()
        if any(parameter is linear._parameters[key] for parameter in module._parameters.values())
    ]
    if len(names) > 1:
        raise ValueError(
            f"{names[0]} and {names[1]} share a parameter, of which codes would be all that is left: untie them, or leave both "
            f"in high precision"
        )
