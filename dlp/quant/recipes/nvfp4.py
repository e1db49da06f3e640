"""nvfp4: FP4 with one E4M3 scale per 16 elements (w: per 16x16 tile) and one fp32 scale per tensor.

The operands of wgrad are Hadamard-transformed along the tokens, and dy is rounded stochastically; w has equal values in both
orientations. Use the recipe for most layers, and keep the last blocks in bf16. (arXiv 2509.25149.)
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from dlp.kernels.ops import RHT_SIGNS
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.recipe import Operand, Recipe, both


def recipe(
    *, disable_rht: bool = False, disable_stochastic_rounding: bool = False, disable_2d_quantization: bool = False,
    rht_signs: int | Literal["fixed", "none"] = "fixed",
    four_over_six: bool | Sequence[Literal["x", "w", "dy"]] = False,
) -> Recipe:  # fmt: skip
    """disable_rht: no Hadamard transform; disable_stochastic_rounding: round dy to nearest; disable_2d_quantization: w in
    blocks of 1x16. rht_signs: tokens whose sign changes before the transform: a fixed pattern, none, or a number with bit i for
    token i of 16; kernels support the fixed pattern, other patterns are cast by the reference. four_over_six: each block, or
    tile of w, takes the scale for a largest code of 6 or 4, by the smaller squared error, ties take 6 (arXiv 2512.02010); true:
    for all operands that are rounded to nearest (dy only with disable_stochastic_rounding); or a list of operands."""
    rht, stochastic = not disable_rht, not disable_stochastic_rounding
    signs = {"fixed": RHT_SIGNS, "none": 0}[rht_signs] if isinstance(rht_signs, str) else rht_signs
    if not 0 <= signs <= 0xFFFF:
        raise ValueError(
            f"nvfp4: rht_signs must be fixed, none or 0 to 0xFFFF (one bit for each of 16 tokens); got {signs:#x}"
        )
    if disable_rht and rht_signs != "fixed":
        raise ValueError(
            f"nvfp4: rht_signs = {rht_signs!r} has no effect with disable_rht = true; set only one of the two"
        )
    better = _four_over_six(four_over_six, stochastic)
    scaling = {name: partial(Nvfp4Scaling, four_over_six=name in better) for name in ("x", "w", "dy")}
    return Recipe(
        "nvfp4",
        x=Operand(scaling["x"](), scaling["x"](rht=rht, signs=signs)),
        w=both(scaling["w"](tile=not disable_2d_quantization)),
        dy=Operand(scaling["dy"](stochastic=stochastic), scaling["dy"](rht=rht, stochastic=stochastic, signs=signs)),
    )


def _four_over_six(value: bool | Sequence[str], stochastic: bool) -> Sequence[str]:
    """Return the operands with four over six. Raises ValueError for dy with stochastic rounding."""
    if isinstance(value, bool):
        return ("x", "w", *(() if stochastic else ("dy",))) if value else ()
    if "dy" in value and stochastic:
        raise ValueError(
            "nvfp4: four_over_six of dy needs disable_stochastic_rounding = true, because the smaller of two random errors "
            "would "
            'bias the gradient; set this option, or four_over_six = ["x", "w"]'
        )
    return value
