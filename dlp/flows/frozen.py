"""freeze: make layers of a converted model forward-only. Only the rowwise codes and scales of their weights remain.

The argument `mode` of `freeze` decides how x is cast:

    weight_only   x is not quantized, and the GEMM decodes weights
    dynamic       x is cast by the recipe, with scales computed in each forward
    static        x is cast with one scale for the tensor, which `calibrate` has computed

If the recipe quantizes y, y is quantized and decoded: in dynamic mode as in training, in static mode with the scale of y from
`calibrate`. Zero points of int8 rows are folded into the integer sums of the GEMM
(`dlp.kernels.reference.gemm_int8_rowwise`). If no kernel multiplies the formats of x and w, both are decoded; a note in the
plan says so.

The tp ranks agree on the scales of weights, so that codes equal the codes of the unsharded weight, on any mesh
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
from dlp.quant.gemm import kernel_name
from dlp.quant.quantizer import KeepHighPrecision, Origin, Quantizer, QuantizerCaps, ScaleSlot, caps_of
from dlp.quant.recipe import Operand, Recipe, both
from dlp.quant.static import StaticScaling, fits, reach_of
from dlp.quant.tensor import Format, QuantizedTensor, Shape

Mode = Literal["weight_only", "dynamic", "static"]
SCALE = "scale"  # x_scale, y_scale: multiplier of a static cast to E4M3, a buffer of `calibrate` and an entry of saved codes
RANGE = "range"  # x_range, y_range: smallest and largest value, a buffer of `calibrate`
AMAX = "amax"  # x_amax, y_amax: entry of saved codes, the amax or range of `StaticScaling`


@dataclass(frozen=True)
class Nothing(Format):
    """Format without parts, of an operand that is never read."""

    name = "none"
    parts = ()
    block = (1, 1)
    keeps_source = False

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return ()


@dataclass(frozen=True)
class NotMade:
    """Quantizer that returns an operand without parts: for the columnwise operand of a weight, which a frozen layer never
    reads."""

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
    """Raise ValueError for an unknown mode, and for a mode that the recipe does not support. asked_by: beginning of the
    message."""
    if mode not in get_args(Mode):
        raise ValueError(f"{asked_by}: mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    if recipe.w.rowwise.format.keeps_source:
        raise ValueError(
            f"{asked_by}: {recipe} keeps weights in high precision; choose a recipe that quantizes weights"
        )
    check_without_history(asked_by, recipe)
    for tensor, quantizer in casts(recipe).items():
        if mode == "dynamic" and caps_of(quantizer).slot is not None:
            raise ValueError(
                f"{asked_by}: {recipe} uses delayed scaling for {tensor}: choose mode 'static', or a recipe without delayed "
                f"scales"
            )
        if mode == "static" and not (isinstance(quantizer.format, Fp8Tensor) or fits(quantizer)):
            raise ValueError(
                f"{asked_by}: a static scale is one per tensor, as in fp8_current, fp8_rowwise and int8; {recipe} casts "
                f"{tensor} differently: choose mode 'dynamic'"
            )


def refuse_y(recipe: Recipe, mode: str, name: str) -> None:
    """Raise ValueError for a recipe that quantizes y in this mode: a plain nn.Linear with a quantized weight casts only x."""
    if recipe.y is not None and mode != "weight_only":
        raise ValueError(
            f"{name}: {recipe} quantizes y, which an nn.Linear with codes returns in high precision: call dlp.convert and "
            f"dlp.freeze, or remove linear_output from the recipe"
        )


def casts(recipe: Recipe) -> dict[str, Quantizer]:
    """Return the quantizers that a forward applies to "x" and, if the recipe quantizes y, to "y"."""
    found = {"x": recipe.x.rowwise, "y": recipe.y}
    return {tensor: quantizer for tensor, quantizer in found.items() if quantizer is not None}


def cast_in(quantizer: Quantizer, mode: str) -> Quantizer | None:
    """Return the quantizer of x or y in this mode, given the quantizer of the recipe; None: the tensor is not cast."""
    if mode == "weight_only":
        return None
    if mode == "dynamic":
        return quantizer
    return static(quantizer.format.element) if isinstance(quantizer.format, Fp8Tensor) else StaticScaling(quantizer)


def scale_name(tensor: str, quantizer: Quantizer) -> str:
    """Return the name of the static scale of `tensor`, "x" or "y", in saved codes."""
    return f"{tensor}_{AMAX if isinstance(quantizer, StaticScaling) else SCALE}"


def frozen_recipe(recipe: Recipe, mode: str) -> Recipe:
    """Return the recipe of a layer that is frozen by `recipe` in this mode. Gradients are not quantized."""
    keep = KeepHighPrecision()
    made = {tensor: cast_in(quantizer, mode) for tensor, quantizer in casts(recipe).items()}
    w, x = Operand(recipe.w.rowwise, NotMade()), both(made["x"] or keep)
    name = f"{recipe.name}, {mode}"
    return replace(recipe, name=name, x=x, w=w, dy=both(keep), amax_scope="all", y=made.get("y"), dx=None)


def freeze(model: nn.Module, pattern: str, recipe: Any, mode: Mode = "dynamic") -> list[str]:
    """Replace the weights of matching layers by codes and scales. Afterwards these layers run forward only.

    The high-precision values are freed: the parameters remain, with values NaN and without gradients. All ranks call `freeze`.

    Args:
        model: converted model.
        pattern: pattern of module names, as in a layer group.
        recipe: name of a recipe, a dict with options, or a `Recipe`.
        mode: "weight_only": x is not quantized, and the GEMM decodes weights; "dynamic": x is quantized with scales computed in
            each forward; "static": x is quantized with the scales of `dlp.calibrate`. If the recipe quantizes y, y is quantized
            and decoded in the same mode.

    Returns:
        Names of the frozen layers.

    Raises:
        ValueError: before anything is changed, for a pattern that matches no layer or only some of the siblings of a layer, a
            recipe that does not support `mode`, mode "static" without `dlp.calibrate`, weights that FSDP manages, that another
            module shares, that have NaN or Inf, that are on the meta device or that are quantized-only already, and layers that
            are captured in a CUDA graph.

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
    for core in cores:
        _freeze(core, specs[core])
    # Siblings share a scale of x. The order is reversed, so that the first sibling sets this scale last.
    for name in reversed(names) if mode == "static" else ():
        scales = calibrated(modules[name], name, chosen[name])
        for (_, slots), scale in zip(static_slots(modules[name]).items(), scales.values(), strict=True):
            for slot in slots:
                slot.copy_(scale)
    return names


def calibrated(module: nn.Module, name: str, recipe: Recipe) -> dict[str, Tensor]:
    """Return the static scales of a layer for the casts of `recipe`, by tensor ("x", "y").

    For per-tensor FP8 the scale is the buffer `x_scale` of `calibrate`, fp32 []; otherwise `reach_of` computes it from the
    buffer `x_range`. The buffers of y are `y_scale` and `y_range`.
    Raises ValueError for a missing buffer, and for a buffer that is no longer fp32.
    """
    made = dict[str, Tensor]()
    for tensor, quantizer in casts(recipe).items():
        buffer = f"{tensor}_{RANGE if fits(quantizer) else SCALE}"
        found = getattr(module, buffer, None)
        if found is None:
            raise ValueError(
                f"{name}: static mode has no scale of {tensor}: run the model inside dlp.calibrate first"
                + (', with tensors=("x", "y")' if tensor == "y" else "")
            )
        if found.dtype != torch.float32:
            raise ValueError(
                f"{name}: {buffer} was converted to {found.dtype} together with the model: calibrate again after a change of "
                f"dtype"
            )
        made[tensor] = reach_of(quantizer, *found) if fits(quantizer) else found
    return made


def _check(
    model: nn.Module, name: str, modules: Mapping[str, ParallelLinear], recipe: Recipe, mode: str, names: list[str]
) -> None:  # fmt: skip
    """Raise ValueError for a layer that cannot be frozen. names: all layers to freeze; modules: all converted layers."""
    core = modules[name].core
    if mode == "static":
        calibrated(modules[name], name, recipe)
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
    a, b = (quantizer.format for quantizer in spec.recipe.operands("fprop"))
    kernel = kernel_name(a, b, core.device.type)
    if kernel.startswith("decode") and not a.keeps_source:
        core.session.note(f"fprop of {spec.recipe} decodes x ({a.name}) and w ({b.name}): {kernel}")


def static_slots(module: ParallelLinear) -> dict[str, list[Tensor]]:
    """Return the static scales of a frozen layer, views of the model's table of scales, by their names in saved codes. Siblings
    share one scale of x; siblings in one module have several scales of y, with equal values."""
    core, found = module.core, dict[str, list[Tensor]]()
    mine = [name for name, member in zip(core.spec.members, core.members, strict=True) if member.module is module]
    for tensor, quantizer in casts(core.spec.recipe).items():
        if caps_of(quantizer).slot is not None:
            owners = core.spec.members[:1] if tensor == "x" else mine
            slots = [core.session.scaling.slot(core.spec.slot_name(tensor, owner, False), True) for owner in owners]
            found[scale_name(tensor, quantizer)] = [slot.scale for slot in slots]
    return found
