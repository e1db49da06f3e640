"""int8: integers of 8 bits with one scale per row of each GEMM operand; in fprop, per token and per output feature.

Codes are -127 to 127, so that x and -x have opposite codes. Columnwise operands are quantized from the high-precision tensor a
second time. GEMMs sum exactly, in int32. The distance between two codes of a row is 1/127 of the largest magnitude: int8 is
finer than FP8 for values of similar magnitude, and coarser for rows with outliers.
"""

from dlp.quant.integers import IntScaling
from dlp.quant.recipe import Recipe, both


def recipe(*, narrow: bool = True, epsilon: float = 0.0) -> Recipe:
    """Return the recipe with these options:

    * `narrow`: true: do not use the code -128; false: codes are -128 to 127, and the distance between two codes is 1/127.5 of
      the largest magnitude, as in torchao
    * `epsilon`: smallest distance between two codes (`scale_inv`)"""
    rows = both(IntScaling(narrow=narrow, epsilon=epsilon))
    return Recipe("int8", x=rows, w=rows, dy=rows)
