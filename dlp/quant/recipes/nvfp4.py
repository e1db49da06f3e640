"""nvfp4: FP4 with an E4M3 scale every 16 elements (w: every 16x16 tile) under one fp32 scale a tensor.

The operands of wgrad are Hadamard-transformed along the tokens, and dy is rounded stochastically; w has equal values
in both orientations. Meant for most layers, not all: the last blocks stay in bf16. (arXiv 2509.25149.)
"""

from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.recipe import Operand, Recipe, both


def recipe(
    *, disable_rht: bool = False, disable_stochastic_rounding: bool = False, disable_2d_quantization: bool = False
) -> Recipe:
    """disable_rht: no Hadamard transform; disable_stochastic_rounding: dy to nearest; disable_2d_quantization: w in
    blocks of 1x16."""
    rht, stochastic = not disable_rht, not disable_stochastic_rounding
    return Recipe(
        "nvfp4",
        x=Operand(Nvfp4Scaling(), Nvfp4Scaling(rht=rht)),
        w=both(Nvfp4Scaling(tile=not disable_2d_quantization)),
        dy=Operand(Nvfp4Scaling(stochastic=stochastic), Nvfp4Scaling(rht=rht, stochastic=stochastic)),
    )
