"""fp8_rowwise: FP8 with one scale a row of each GEMM operand, i.e. a token or an output feature.

Columnwise operands are second quantizations of the high-precision tensor. E4M3 everywhere and power-of-two scales
unless asked otherwise. All GEMMs use split accumulation.
"""

from dlp.quant.fp8 import FP8_FORMATS, Fp8Format
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.recipe import Recipe, both


def recipe(*, fp8_format: Fp8Format = "E4M3", power_of_two: bool = True, epsilon: float = 0.0) -> Recipe:
    """fp8_format: E4M3 or HYBRID (dy E5M2); power_of_two: scales rounded down to one; epsilon: least amax."""
    forward, backward = (both(RowwiseScaling(element, power_of_two, epsilon)) for element in FP8_FORMATS[fp8_format])
    return Recipe("fp8_rowwise", x=forward, w=forward, dy=backward)
