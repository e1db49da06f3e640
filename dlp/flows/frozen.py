"""freeze: make layers of a converted model forward-only, with the rowwise codes of their weights as the only copy.

    weight_only   x is not quantized, and the GEMM decodes weights
    dynamic       x is cast by the recipe, with a scale computed in each forward
    static        x is cast with the scale from `calibrate`, one for the whole tensor

Scales of weights are agreed over tp, so that the codes equal the codes of the full weight, on any mesh
(`dlp.flows.codes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from dlp.parallel.linear.modules import LinearCore, ParallelLinear
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.model.boundary import check_siblings, layer_modules, match_layers
from dlp.parallel.model.session import converted_root
from dlp.parallel.weight.held import HeldWeight
from dlp.parallel.weight.local import num_axes
from dlp.parallel.weight.parameters import check_has_values, check_unshared, check_without_history, refuse_codes
from dlp.quant import recipe as recipes
from dlp.quant.fake import deployed
from dlp.quant.fp8 import Fp8Tensor, static
from dlp.quant.quantizer import KeepHighPrecision, Origin, Quantizer, QuantizerCaps, ScaleSlot, caps_of
from dlp.quant.recipe import Operand, Recipe, both
from dlp.quant.static import StaticScaling, fits, has_zero_points, reach_of
from dlp.quant.tensor import Format, QuantizedTensor, Shape

Mode = Literal["weight_only", "dynamic", "static"]
SCALE = "x_scale"  # name of the buffer for the calibrated scale of x, the multiplier of a cast to E4M3
RANGE = "x_range"  # name of the buffer for the smallest and the largest x
AMAX = "x_amax"  # name of a static range of x in saved codes


@dataclass(frozen=True)
class Nothing(Format):
    """Format of an operand that is never read: it has no parts."""

    name = "none"
    parts = ()
    block = (1, 1)
    keeps_source = False

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return ()


@dataclass(frozen=True)
class NotMade:
    """Quantizer of the columnwise operand of a frozen weight, which has no backward."""

    format: ClassVar[Format] = Nothing()
    reduces: ClassVar[tuple[int, ...]] = ()
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(native=True)

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None, flag: Tensor | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        return QuantizedTensor(self.format, ())


def check_mode(recipe: Recipe, mode: str, asked_by: str) -> None:
    """Raise ValueError for an unknown mode, and for a mode that the recipe does not support."""
    if mode not in get_args(Mode):
        raise ValueError(f"{asked_by}: mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    if recipe.w.rowwise.format.keeps_source:
        raise ValueError(
            f"{asked_by}: {recipe} keeps weights in high precision; choose a recipe that quantizes weights"
        )
    check_without_history(asked_by, recipe)
    if mode == "dynamic" and caps_of(recipe.x.rowwise).slot is not None:
        raise ValueError(
            f"{asked_by}: {recipe} uses delayed scaling for x: choose mode 'static', or a recipe without delayed scales"
        )
    if mode == "static" and not (isinstance(recipe.x.rowwise.format, Fp8Tensor) or fits(recipe.x.rowwise)):
        raise ValueError(
            f"{asked_by}: a static scale is one per tensor, as in fp8_current, fp8_rowwise and int8; {recipe} casts x "
            f"differently: choose mode 'dynamic'"
        )


def cast_of_x(recipe: Recipe, mode: str) -> Quantizer | None:
    """Quantizer of x in this mode; None: x is not cast."""
    if mode == "weight_only":
        return None
    x = recipe.x.rowwise
    if mode == "dynamic":
        return x
    return static(x.format.element) if isinstance(x.format, Fp8Tensor) else StaticScaling(x)


def scale_name(activation: Quantizer) -> str:
    """Return the name of the static scale of x in saved codes."""
    return AMAX if isinstance(activation, StaticScaling) else SCALE


def frozen_recipe(recipe: Recipe, mode: str) -> Recipe:
    """The forward of `recipe` in this mode, as a recipe."""
    keep = KeepHighPrecision()
    w, x = Operand(recipe.w.rowwise, NotMade()), both(cast_of_x(recipe, mode) or keep)
    name = f"{recipe.name}, {mode}"
    return replace(recipe, name=name, x=x, w=w, dy=both(keep), amax_scope="all", y=None, dx=None)


def freeze(model: nn.Module, pattern: str, recipe: Any, mode: Mode = "dynamic") -> list[str]:
    """Replace weights of matching layers by codes; afterwards these layers run forward only.

    The high-precision values are freed; the parameters read as NaN and get no gradient. All ranks call `freeze`.

    Args:
        model: converted model.
        pattern: pattern of module names, as in a layer group.
        recipe: name of a recipe, a dict with options, or a `Recipe`.
        mode: "weight_only": GEMMs read decoded weights; "dynamic": x is quantized in each forward; "static": x is quantized
            with the scales of `dlp.calibrate`.

    Returns:
        Names of the frozen layers.

    Raises:
        ValueError: before anything is changed, for a pattern that matches no layer, a recipe that does not support `mode`,
            static without `dlp.calibrate`, weights that FSDP shards, that another module shares or that are codes already,
            and layers of a CUDA graph.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="bf16")], dlp.build_mesh())
        >>> dlp.freeze(model, "**", "fp8_current")
        ['0']
    """
    names, modules = match_layers(model, pattern, "freeze"), layer_modules(model)
    made = recipes.as_recipe(recipe)
    chosen = {name: deployed(made.for_layer(name)) for name in names}
    for name in names:
        check_mode(chosen[name], mode, name)
        _check(model, name, modules, chosen[name], mode, names)
    cores = {modules[name].core: name for name in reversed(names)}
    specs = {core: core.with_recipe(frozen_recipe(chosen[name], mode)) for core, name in cores.items()}
    for core in cores:
        core.session.check_not_graphed([core])
    for core, name in cores.items():
        _freeze(core, specs[core])
        if mode == "static":
            set_scale(core, calibrated(modules[name], name, chosen[name]))
    return names


def calibrated(module: nn.Module, name: str, recipe: Recipe) -> Tensor:
    """Return the static scale of x of a layer, as the cast of x by `recipe` reads the scale, from the buffers of `calibrate`:
    `x_scale` fp32 [], or `reach_of` the `x_range`. Raises ValueError if there is none, or if it was rounded to another dtype.
    """
    x = recipe.x.rowwise
    buffer = RANGE if fits(x) else SCALE
    found = getattr(module, buffer, None)
    if found is None:
        raise ValueError(f"{name}: static mode has no scale of x: run the model inside dlp.calibrate first")
    if found.dtype != torch.float32:
        raise ValueError(
            f"{name}: {buffer} was converted to {found.dtype} together with the model: calibrate again after a change of dtype"
        )
    return reach_of(x, *found) if buffer == RANGE else found


def _check(
    model: nn.Module, name: str, modules: Mapping[str, ParallelLinear], recipe: Recipe, mode: str, names: list[str]
) -> None:  # fmt: skip
    core = modules[name].core
    if mode == "static":
        calibrated(modules[name], name, recipe)
        if has_zero_points(recipe.x.rowwise):
            raise ValueError(
                f"{name}: {recipe} casts x with zero points, and a frozen layer has one static number for x: call "
                f"dlp.quantize_ on the plain model, choose mode 'dynamic', or a recipe with symmetric x, such as int8"
            )
    check_siblings(core, modules, names)
    held = next((weight for weight in core.weights if isinstance(weight, HeldWeight)), None)
    if held is not None:
        refuse_codes(name, f"{held.recipe.w.rowwise.format.name} codes")
    sharded = any(num_axes(parameter) > core.spec.num_axes for parameter in core.parameters())
    if sharded or any(weight.managed or weight.gathered for weight in core.weights):
        raise ValueError(
            f"{name}: the weight is managed by FSDP; call dlp.freeze before dlp.fully_shard and pass the frozen "
            f"parameters as ignored_params, or use dlp.quantize_ on the plain model, whose codes FSDP gathers"
        )
    for member in core.members:
        check_has_values(name, getattr(member.module, member.weight))
        check_unshared(converted_root(model) or model, member.module, member.weight)


@torch.no_grad()
def _freeze(core: LinearCore, spec: LinearSpec) -> None:
    core.set_spec(spec)
    held = [HeldWeight(core.weights, i, False) for i in range(len(core.members))]
    core.weights.set(held)
    for weight in held:
        weight.parameter.requires_grad_(False)
    core.session.rebuild()


@torch.no_grad()
def set_scale(core: LinearCore, scale: Tensor) -> None:
    """Set the static scale of a layer's x."""
    name = core.spec.slot_name("x", core.spec.members[0], False)
    core.session.scaling.slot(name, True).scale.copy_(scale)


def scale_of(core: LinearCore) -> Tensor | None:
    """The static scale of a layer's x, fp32 []."""
    if caps_of(core.spec.recipe.x.rowwise).slot is None:
        return None
    name = core.spec.slot_name("x", core.spec.members[0], False)
    return core.session.scaling.slot(name, True).scale
