"""nvfp4: FP4 with an E4M3 scale every 16 elements (w: every 16x16 tile) under one fp32 scale a tensor.

The operands of wgrad are Hadamard-transformed along the tokens, and dy is rounded stochastically; w has equal values
in both orientations. Meant for most layers, not all: the last blocks stay in bf16. (arXiv 2509.25149.)
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
    """disable_rht: no Hadamard transform; disable_stochastic_rounding: dy to nearest; disable_2d_quantization: w in
    blocks of 1x16. rht_signs: which of 16 tokens change sign before the transform: a fixed pattern, none, or bit i of a
    number for token i; kernels have the fixed one, others are cast by the reference. four_over_six: each block, or tile of w,
    takes the scale that makes its largest code 6 or 4, by the smaller squared error, ties 6 (arXiv 2512.02010); true: all
    operands rounded to nearest, so dy only with disable_stochastic_rounding; or a list of operands."""
    rht, stochastic = not disable_rht, not disable_stochastic_rounding
    signs = {"fixed": RHT_SIGNS, "none": 0}[rht_signs] if isinstance(rht_signs, str) else rht_signs
    if not 0 <= signs <= 0xFFFF:
        raise ValueError(
            f"nvfp4: rht_signs must be fixed, none or 0 to 0xFFFF, a bit for each of 16 tokens; got {signs:#x}"
        )
    if disable_rht and rht_signs != "fixed":
        raise ValueError(f"nvfp4: disable_rht = true leaves no transform for rht_signs = {rht_signs!r}; leave one out")
    better = _four_over_six(four_over_six, stochastic)
    scaling = {name: partial(Nvfp4Scaling, four_over_six=name in better) for name in ("x", "w", "dy")}
    return Recipe(
        "nvfp4",
        x=Operand(scaling["x"](), scaling["x"](rht=rht, signs=signs)),
        w=both(scaling["w"](tile=not disable_2d_quantization)),
        dy=Operand(scaling["dy"](stochastic=stochastic), scaling["dy"](rht=rht, stochastic=stochastic, signs=signs)),
    )


def _four_over_six(value: bool | Sequence[str], stochastic: bool) -> Sequence[str]:
    """The operands with four over six. Raises ValueError for dy if it is rounded stochastically."""
    if isinstance(value, bool):
        return ("x", "w", *(() if stochastic else ("dy",))) if value else ()
    if "dy" in value and stochastic:
        raise ValueError(
            "nvfp4: four_over_six of dy needs disable_stochastic_rounding = true, since the smaller of two random errors would "
            'bias the gradient; set it, or four_over_six = ["x", "w"]'
        )
    return value
