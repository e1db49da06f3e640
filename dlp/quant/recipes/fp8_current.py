"""fp8_current: per-tensor FP8 with a scale from the amax of the tensor.

Ranks with shards of one operand agree on the amax. The high-precision tensor is read twice, for the amax and for the cast.
fprop sums in the tensor core ("fast"); dgrad and wgrad use "split" accumulation. (Micikevicius et al., arXiv 2209.05433.)
"""

from dlp.quant.fp8 import FP8_FORMATS, CurrentScaling, Fp8Format
from dlp.quant.gemm import GemmOptions
from dlp.quant.recipe import Recipe, both


def recipe(*, fp8_format: Fp8Format = "HYBRID", power_of_two: bool = False, epsilon: float = 0.0) -> Recipe:
    """Return the recipe with these options:

    * `fp8_format`: "HYBRID": x and w E4M3, dy E5M2; or "E4M3" for all operands
    * `power_of_two`: round scales down to powers of two
    * `epsilon`: smallest amax; a smaller amax is replaced by epsilon"""
    forward, backward = (both(CurrentScaling(element, power_of_two, epsilon)) for element in FP8_FORMATS[fp8_format])
    return Recipe("fp8_current", x=forward, w=forward, dy=backward, fprop=GemmOptions(fast_accumulation=True))
