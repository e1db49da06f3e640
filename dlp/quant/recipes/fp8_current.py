"""fp8_current: per-tensor FP8, scaled by the amax of the tensor, on which the ranks with shards of one operand agree.

The amax and the cast read the high-precision tensor twice. HYBRID is E4M3 for x and w, and E5M2 for dy. fprop sums inside the
tensor core; dgrad and wgrad use split accumulation. (Micikevicius et al., arXiv 2209.05433.)
"""

from dlp.quant.fp8 import FP8_FORMATS, CurrentScaling, Fp8Format
from dlp.quant.gemm import GemmOptions
from dlp.quant.recipe import Recipe, both


def recipe(*, fp8_format: Fp8Format = "HYBRID", power_of_two: bool = False, epsilon: float = 0.0) -> Recipe:
    """fp8_format: HYBRID (x, w E4M3, dy E5M2) or E4M3; power_of_two: round scales down to powers of two; epsilon: smallest
    amax."""
    forward, backward = (both(CurrentScaling(element, power_of_two, epsilon)) for element in FP8_FORMATS[fp8_format])
    return Recipe("fp8_current", x=forward, w=forward, dy=backward, fprop=GemmOptions(fast_accumulation=True))
