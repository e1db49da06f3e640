"""int8: integers of 8 bits with one scale per row of each GEMM operand, that is, per token or output feature.

Codes are -127 to 127, so that x and -x have opposite codes. Columnwise operands are quantized from the high-precision tensor a
second time. Sums are exact in int32. The quantization step of a row is 1/127 of the largest value: int8 is finer than FP8 for
values of similar magnitude, and coarser for rows with outliers.
"""

from dlp.quant.integers import IntScaling
from dlp.quant.recipe import Recipe, both


def recipe(*, narrow: bool = True, epsilon: float = 0.0) -> Recipe:
    """narrow: do not use the code -128; else the step is 1/127.5 of the largest value, as in torchao; epsilon: smallest
    step."""
    rows = both(IntScaling(narrow=narrow, epsilon=epsilon))
    return Recipe("int8", x=rows, w=rows, dy=rows)
