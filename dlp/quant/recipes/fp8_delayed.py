"""fp8_delayed: per-tensor FP8 with a scale from the amaxes of earlier steps, so that a cast reads the tensor once.

All scales are updated at the step boundary, after one all-reduce of the amaxes. Scales start at 1, and most
gradients underflow to 0. Therefore run forward, backward and `dlp.end_step` a few times before the first update of the weights,
as `launch` does. fprop sums in the tensor core ("fast"); dgrad and wgrad use "split" accumulation. (Micikevicius et al., arXiv
2209.05433.)
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from dlp.quant.fp8 import FP8_FORMATS, DelayedScaling, Fp8Format
from dlp.quant.gemm import GemmOptions
from dlp.quant.recipe import Recipe, both


def recipe(
    *, fp8_format: Fp8Format = "HYBRID", margin: int = 0, amax_history_len: int = 1024,
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max", reduce_amax: bool = True,
) -> Recipe:  # fmt: skip
    """Return the recipe with these options:

    * `fp8_format`: "HYBRID": x and w E4M3, dy E5M2; or "E4M3" for all operands
    * `margin`: scales are smaller than the largest possible scale by the factor 2^margin
    * `amax_history_len`: number of steps in the history
    * `amax_compute_algo`: amax for the scale: "max" or "most_recent" of the history, or a function from amaxes [steps, slots],
      oldest first, to [slots]
    * `reduce_amax`: whether ranks agree on amaxes at the step boundary"""
    forward, backward = (
        both(DelayedScaling(element, margin, amax_history_len, amax_compute_algo))
        for element in FP8_FORMATS[fp8_format]
    )
    fast = GemmOptions(fast_accumulation=True)
    return Recipe("fp8_delayed", x=forward, w=forward, dy=backward, fprop=fast, reduce_amax=reduce_amax)
