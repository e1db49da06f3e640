"""Functions that return recipes of dlp, with the names and keywords of the recipes in `transformer_engine.common.recipe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dlp.quant.recipe import Recipe, load
from dlp.te_arguments import Argument, refuse


class Format:
    """Element formats. E4M3: for all operands; HYBRID: E4M3 for x and w, E5M2 for dy; E2M1: the format of nvfp4."""

    E4M3, HYBRID, E2M1 = "E4M3", "HYBRID", "E2M1"


class QParams(NamedTuple):
    """Options of scales. `power_2_scale`: round scales to powers of two; `amax_epsilon`: a smaller amax is replaced by this
    number."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class MMParams(NamedTuple):
    """Options of a GEMM. `use_split_accumulator`: partial sums of FP8 products are added in fp32 at intervals."""

    use_split_accumulator: bool = True


_NONE = (None, False)
_OWN = "write a quantizer with dlp.CustomRecipe"
_SIX = 'pass four_over_six to dlp.recipe("nvfp4")'
_POWER = "pass QParams(power_2_scale={}) as fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad"
ARGUMENTS: dict[str, Argument] = {
    "scaling_factor_compute_algo": Argument(_OWN, _NONE),
    "override_linear_precision": Argument("pass high_precision=[...] to dlp.recipe", ((False, False, False), None)),
    "backward_override": Argument('pass high_precision=["dgrad", "wgrad"] to dlp.recipe', _NONE),
    "fp8_dpa": Argument("leave the argument out: attention runs in the dtype of its inputs", _NONE),
    "fp8_mha": Argument("leave the argument out: attention runs in the dtype of its inputs", _NONE),
    "row_scaled_activation": Argument('use dlp.recipe("fp8_rowwise")', _NONE),
    "use_power_2_scales": Argument(_POWER.format(True), _NONE),
    "use_f32_scales": Argument(_POWER.format(False), _NONE),
    "nvfp4_4over6": Argument(_SIX, (*_NONE, "none")),
    "nvfp4_4over6_e4m3_use_256": Argument(_SIX, None),  # any value: TE ignores it unless nvfp4_4over6 is set
    "nvfp4_4over6_err_mode": Argument(_SIX, None),
    "fp4_format": Argument("leave the argument out: the elements of nvfp4 are E2M1", (Format.E2M1,)),
    "fp8_format": Argument("leave the argument out: the scales of nvfp4 are E4M3", (Format.E4M3,)),
}
PARAMS = {"fp8_quant_fwd_inp": "x", "fp8_quant_fwd_weight": "w", "fp8_quant_bwd_grad": "dy"}
GEMMS = {"fp8_gemm_fprop": "fprop", "fp8_gemm_dgrad": "dgrad", "fp8_gemm_wgrad": "wgrad"}


def DelayedScaling(
    margin: int = 0, fp8_format: str = Format.HYBRID, amax_history_len: int = 1024, amax_compute_algo: Any = "max",
    reduce_amax: bool = True, **options: Any,
) -> Recipe:  # fmt: skip
    """Return the recipe fp8_delayed."""
    refuse("DelayedScaling", ARGUMENTS, options, ("margin", "fp8_format", "amax_history_len", "amax_compute_algo"))
    return load(
        "fp8_delayed", margin=margin, fp8_format=fp8_format, amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo, reduce_amax=reduce_amax,
    )  # fmt: skip


def Float8CurrentScaling(fp8_format: str = Format.HYBRID, **options: Any) -> Recipe:
    """Return the recipe fp8_current. Further keywords: fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad (three
    `QParams`, which must be equal), fp8_gemm_fprop, fp8_gemm_dgrad and fp8_gemm_wgrad (`MMParams`)."""
    return load("fp8_current", fp8_format=fp8_format, **_scaling("Float8CurrentScaling", options))


def Float8BlockScaling(
    fp8_format: str = Format.E4M3, x_block_scaling_dim: Any = 1, w_block_scaling_dim: Any = 2, grad_block_scaling_dim: Any = 1,
    **options: Any,
) -> Recipe:  # fmt: skip
    """Return the recipe fp8_block. Further keywords: see `Float8CurrentScaling`."""
    return load(
        "fp8_block", fp8_format=fp8_format, x_block_dim=x_block_scaling_dim, w_block_dim=w_block_scaling_dim,
        dy_block_dim=grad_block_scaling_dim, **_scaling("Float8BlockScaling", options),
    )  # fmt: skip


def MXFP8BlockScaling(
    fp8_format: str = Format.E4M3, margin: int = 0, enable_2d_quantization: bool = False, **options: Any
) -> Recipe:
    """Return the recipe mxfp8. Raises ValueError for a margin other than 0, since scales of blocks have no margin."""
    refuse("MXFP8BlockScaling", ARGUMENTS, options, ("fp8_format", "enable_2d_quantization"))
    if margin:
        raise ValueError(f"MXFP8BlockScaling: margin must be 0; got {margin}: use DelayedScaling(margin=...)")
    return load("mxfp8", fp8_format=fp8_format, enable_2d_quantization=enable_2d_quantization)


def NVFP4BlockScaling(
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    **options: Any,
) -> Recipe:
    """Return the recipe nvfp4."""
    refuse("NVFP4BlockScaling", ARGUMENTS, options, ("disable_rht", "disable_stochastic_rounding"))
    return load(
        "nvfp4", disable_rht=disable_rht, disable_stochastic_rounding=disable_stochastic_rounding,
        disable_2d_quantization=disable_2d_quantization,
    )  # fmt: skip


def _scaling(recipe: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `QParams` and `MMParams` to options of a recipe. Raises ValueError if `QParams` differ between
    operands, or are given for some operands only."""
    own = {*PARAMS, *GEMMS}
    refuse(recipe, ARGUMENTS, {name: value for name, value in options.items() if name not in own}, sorted(own))
    made: dict[str, Any] = {}
    params = {options[name] for name in PARAMS if name in options}
    if len(params) > 1 or (params and not options.keys() >= PARAMS.keys()):
        raise ValueError(
            f"{recipe}: {', '.join(PARAMS)} must be equal, and given together; use dlp.CustomRecipe for scales by operand"
        )
    for each in params:
        made |= {"power_of_two": each.power_2_scale, "epsilon": each.amax_epsilon}
    gemms = {GEMMS[name]: options[name] for name in GEMMS if name in options}
    if gemms:
        made["accumulation"] = {gemm: "split" if each.use_split_accumulator else "fast" for gemm, each in gemms.items()}
    return made
