"""int8: Integers of 8 bits with one scale a row of each GEMM operand, i.e. a token or an output feature.

Codes are -127 to 127, symmetric, so that x and -x round alike. Columnwise operands are second quantizations of the
high-precision tensor. Sums are exact in int32. All values of a row share one step, 1/127 of the largest: finer than FP8 where
values are of one size, coarser where few are much larger than the rest.
"""

from dlp.quant.integers import IntScaling
from dlp.quant.recipe import Recipe, both


def recipe(*, narrow: bool = True, epsilon: float = 0.0) -> Recipe:
    """narrow: no code -128, else a step is 1/127.5 of the largest, as in torchao; epsilon: least step."""
    rows = both(IntScaling(narrow=narrow, epsilon=epsilon))
    return Recipe("int8", x=rows, w=rows, dy=rows)
