"""mxfp8: FP8 with one power-of-two scale per 32 elements of the contraction, in both orientations of all operands.

By default all operands are E4M3, and scales are rounded up, so that no element saturates. (Mishra et al., arXiv 2506.08027.)
"""

from typing import Literal

from dlp.quant.fp8 import FP8_FORMATS, Fp8Format
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.recipe import Recipe, both


def recipe(
    *, fp8_format: Fp8Format = "E4M3", scale_rounding: Literal["ceil", "floor"] = "ceil",
    enable_2d_quantization: bool = False,
) -> Recipe:  # fmt: skip
    """Return the recipe with these options:

    * `fp8_format`: "E4M3", or "HYBRID": x and w E4M3, dy E5M2
    * `scale_rounding`: "ceil", without saturation; or "floor", the rule of OCP MX v1.0, with which large values may saturate
    * `enable_2d_quantization`: one scale per 32x32 tile of w, so that both orientations of w have equal values"""
    forward, backward = FP8_FORMATS[fp8_format]
    return Recipe(
        "mxfp8",
        x=both(MxScaling(forward, scale_rounding)),
        w=both(MxScaling(forward, scale_rounding, tile=enable_2d_quantization)),
        dy=both(MxScaling(backward, scale_rounding)),
    )
