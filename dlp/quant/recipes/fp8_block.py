"""fp8_block: FP8 with one scale per 128 elements of the contraction for x and dy, and per 128x128 tile for w.

By default all operands are E4M3, and scales are powers of two. GEMMs add partial sums of at most 128 products in fp32.
(DeepSeek-V3, arXiv 2412.19437.)
"""

from typing import Literal

from dlp.quant.fp8 import FP8_FORMATS, Fp8Format
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.recipe import Recipe, both

Dim = Literal[1, 2]


def recipe(
    *, fp8_format: Fp8Format = "E4M3", power_of_two: bool = True, epsilon: float = 0.0, x_block_dim: Dim = 1,
    w_block_dim: Dim = 2, dy_block_dim: Dim = 1,
) -> Recipe:  # fmt: skip
    """Return the recipe with these options:

    * `fp8_format`: "E4M3", or "HYBRID": x and w E4M3, dy E5M2
    * `power_of_two`: round scales down to powers of two
    * `epsilon`: smallest amax; a smaller amax is replaced by epsilon
    * `x_block_dim`, `w_block_dim`, `dy_block_dim`: 1: one scale per 1x128 block; 2: one scale per 128x128 tile. The two
      operands of a GEMM must not both have 2"""
    forward, backward = FP8_FORMATS[fp8_format]
    x, w, dy = (
        both(BlockScaling(element, dim == 2, power_of_two, epsilon))
        for element, dim in ((forward, x_block_dim), (forward, w_block_dim), (backward, dy_block_dim))
    )
    return Recipe("fp8_block", x=x, w=w, dy=dy)
