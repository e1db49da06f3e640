"""fp8_rowwise: FP8 with one scale per row of each GEMM operand; in fprop, per token and per output feature.

Columnwise operands are quantized from the high-precision tensor a second time. By default all operands are E4M3, and scales are
powers of two. All GEMMs use "split" accumulation.
"""

from dlp.quant.fp8 import FP8_FORMATS, Fp8Format
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.recipe import Recipe, both


def recipe(*, fp8_format: Fp8Format = "E4M3", power_of_two: bool = True, epsilon: float = 0.0) -> Recipe:
    """Return the recipe with these options:

    * `fp8_format`: "E4M3", or "HYBRID": x and w E4M3, dy E5M2
    * `power_of_two`: round scales down to powers of two
    * `epsilon`: smallest amax; a smaller amax is replaced by epsilon"""
    forward, backward = (both(RowwiseScaling(element, power_of_two, epsilon)) for element in FP8_FORMATS[fp8_format])
    return Recipe("fp8_rowwise", x=forward, w=forward, dy=backward)
