"""nvfp4: FP4 with one E4M3 scale per 16 elements (w: per 16x16 tile) and one fp32 scale per tensor.

Both operands of wgrad are Hadamard-transformed along the tokens, and dy is rounded stochastically. w has equal values in both
orientations. Use this recipe for most layers, and bf16 for the last blocks of the model. (arXiv 2509.25149.)
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
    """Return the recipe with these options:

    * `disable_rht`: no Hadamard transform
    * `disable_stochastic_rounding`: round dy to nearest
    * `disable_2d_quantization`: one scale per 1x16 block of w
    * `rht_signs`: tokens, of each 16, whose sign is flipped before the transform: "fixed" (a fixed pattern), "none", or a
      number whose bit i is set for token i. Kernels support only "fixed"; other patterns are cast by the plain-torch reference
    * `four_over_six`: choose for each block or tile between two scales, which map its largest value to 6 or to 4, by the
      smaller squared error; 6 if the errors are equal (arXiv 2512.02010). true: for all operands that are rounded to nearest
      (dy only with `disable_stochastic_rounding`); or a list of operands"""
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
    """Return the operands to which four_over_six applies. Raises ValueError if dy is listed and rounded stochastically."""
    if isinstance(value, bool):
        return ("x", "w", *(() if stochastic else ("dy",))) if value else ()
    if "dy" in value and stochastic:
        raise ValueError(
            "nvfp4: four_over_six of dy needs disable_stochastic_rounding = true, because the smaller of two random errors "
            'would bias the gradient; set this option, or four_over_six = ["x", "w"]'
        )
    return value
