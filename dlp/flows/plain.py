"""quantize_: quantize the plain `nn.Linear` modules of any model, with a tensor subclass as weight.

dlp.quantize_(model, "fp8_current", mode="dynamic")
dlp.quantize_(model, torchao_config)                # calls quantize_ of torchao
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dlp.flows.compressed_models import SavesCodes
from dlp.flows.frozen import Mode, calibrated, cast_in, check_mode, refuse_y
from dlp.flows.grouped import GroupedExperts, are_experts
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.weight.parameters import check_finite, check_is_parameter, check_plain, check_unshared
from dlp.quant import recipe as recipes
from dlp.quant.fake import deployed
from dlp.quant.parameter import QuantizedParameter

Filter = Callable[[nn.Module, str], bool]


@torch.no_grad()
def quantize_(
    model: nn.Module, config: Any, filter_fn: Filter | None = None, *, mode: Mode = "weight_only"
) -> nn.Module:  # fmt: skip
    """Quantize the weights of `nn.Linear` modules in place, in a model that is not converted.

    Call `quantize_` before sharding, compiling and saving. `model.save_pretrained`, if the model has this method, is replaced
    by `dlp.save_compressed`. 3-D expert weights of Mixtral and Qwen3-MoE are replaced by `dlp.GroupedLinear`s, as by
    `dlp.group_experts`, if at least one of their linears is quantized. These linears have names such as
    `NAME.experts.gate_proj.0`.

    Args:
        model: plain model.
        config: a recipe (name, dict or `Recipe`); or a config of torchao, which is passed with `filter_fn` to
            `torchao.quantization.quantize_`.
        filter_fn: `filter_fn(module, name)` returns whether to quantize a module; None: all linears. lora_A and lora_B of
            `dlp.lora` are never quantized, since they are trained.
        mode: "weight_only", "dynamic" or "static", as in `dlp.freeze`; "static" requires `dlp.calibrate` before.

    Returns:
        `model`.

    Raises:
        ValueError: before anything is changed, for a weight that has NaN or Inf, that another module shares or that is a
            DTensor; for a recipe that does not support `mode`; and if there is no linear to quantize.
        TypeError: for a `filter_fn` that is not callable.

    Examples:
        >>> model = dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8_current", mode="dynamic")
        >>> model(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """
    if _is_torchaos(config):
        return _by_torchao(model, config, filter_fn, mode)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"quantize_: filter_fn must be a function of (module, name) that returns a bool; got {filter_fn!r}"
        )
    made, chosen, trained = recipes.as_recipe(config), {}, set[nn.Module]()
    grouped = {name: GroupedExperts(module) for name, module in model.named_modules() if are_experts(module)}
    for name, module in (*model.named_modules(), *_inside(grouped)):
        trained |= {getattr(module, side) for side in getattr(module, "trained_linears", ())}
        plain = isinstance(module, nn.Linear) and not isinstance(module, ParallelLinear)
        if plain and module not in trained and (filter_fn is None or filter_fn(module, name)):
            chosen[name] = module
    if not chosen:
        _check_plain(model)
        raise ValueError("quantize_ has nothing to quantize: the model has no nn.Linear that filter_fn lets through")
    casts = {name: deployed(made.for_layer(name)) for name in chosen}
    weights = {name: _quantized(model, name, module, casts[name], mode) for name, module in chosen.items()}
    for name, weight in weights.items():
        chosen[name].weight = nn.Parameter(weight, requires_grad=False)
    for name, experts in grouped.items():
        if any(each.startswith(f"{name}.") for each in chosen):
            model.set_submodule(name, experts)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = SavesCodes(model)  # type: ignore[assignment]
    return model


def _inside(modules: dict[str, GroupedExperts]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of `modules`, with the names that they will have in the model."""
    return (
        (f"{name}.{inner}", each) for name, module in modules.items() for inner, each in module.named_modules() if inner
    )


def _is_torchaos(config: Any) -> bool:
    """Whether the class of a config, or one of its base classes, is defined by torchao."""
    return any(kind.__module__.split(".")[0] == "torchao" for kind in type(config).__mro__)


def _by_torchao(model: nn.Module, config: Any, filter_fn: Filter | None, mode: str) -> nn.Module:
    """Call torchao's `quantize_`, which replaces weights or modules in place."""
    if mode != "weight_only":
        raise ValueError(f"quantize_: {type(config).__name__} defines the quantization of x; leave mode={mode!r} out")
    _check_plain(model)
    try:
        from torchao.quantization import quantize_ as torchao_quantize
    except ImportError as error:
        raise ValueError(
            f"quantize_: a {type(config).__name__} is for torchao, which is not installed: pip install 'dlp[ao]', or, to leave "
            f"torch as it is, pip install --no-deps 'torchao>=0.18,<0.19'"
        ) from error
    try:
        torchao_quantize(model, config, filter_fn)
    except ImportError as error:
        raise ValueError(
            f"quantize_: torchao's {type(config).__name__} needs a package that the extra 'ao' does not bring ({error}); "
            f"install that package, or choose another config"
        ) from error
    return model


def _check_plain(model: nn.Module) -> None:
    """Raise ValueError for a model with converted layers."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            raise ValueError(
                f"quantize_: {name} is a layer of dlp.convert, and quantize_ is for nn.Linear; call dlp.freeze"
            )


def _quantized(model: nn.Module, name: str, module: Any, recipe: recipes.Recipe, mode: str) -> QuantizedParameter:
    """Return the quantized weight of a linear. Raises ValueError if the weight, the recipe or the mode cannot be used."""
    check_mode(recipe, mode, name)
    refuse_y(recipe, mode, name)
    check_is_parameter(name, module)
    check_plain(name, module.weight)
    check_unshared(model, module)
    weight = module.weight
    if not weight.is_meta:
        check_finite(name, weight)
    scale = calibrated(module, name, recipe)["x"] if mode == "static" else None
    try:
        return QuantizedParameter.from_float(
            weight, recipe.w.rowwise, cast_in(recipe.x.rowwise, mode), x_scale=scale, options=recipe.fprop
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
