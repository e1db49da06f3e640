"""qat: quantization-aware training: x and w are quantized and decoded, and all three GEMMs multiply the decoded values.

dy stays in high precision. Backward ignores the rounding of x and w (straight-through estimator), and sets the gradient of
values that are clipped to the range of integer codes to 0. By default w is int4 with one scale per group of 32 elements, and x
is int8 with one scale and zero point per token, as in torchao's Int8DynamicActivationIntxWeightConfig. On every mesh, scales
equal the scales of the unsharded tensors.
"""

import re

from dlp.quant.fake import FakeQuantized
from dlp.quant.integers import IntScaling
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Operand, Recipe, both, load, names

INTEGERS = re.compile(r"int([2-8]) (token|channel|group ([1-9][0-9]*))")


def recipe(*, weight: str = "int4 group 32", activation: str = "int8 token") -> Recipe:
    """Return the recipe with these options:

    * `weight`: "int4 group 32": symmetric codes of 2 to 8 bits, with one scale per group of this many elements; "int4 channel":
      one scale per row of w; "none": not quantized; or the name of a recipe, such as "mxfp8", whose cast of w is used
    * `activation`: "int8 token": codes of 2 to 8 bits, with one scale and one zero point per token; "none"; or the name of a
      recipe, whose cast of x is used"""
    keep = both(KeepHighPrecision())
    return Recipe("qat", x=_operand("x", activation), w=_operand("w", weight), dy=keep, amax_scope="all")


def _operand(tensor: str, asked: str) -> Operand:
    if asked == "none":
        return both(KeepHighPrecision())
    found = INTEGERS.fullmatch(asked)
    if found and (found[2] == "token") == (tensor == "x"):
        bits, group = int(found[1]), int(found[3] or 0)
        scaling = IntScaling(bits, symmetric=False) if tensor == "x" else IntScaling(bits, group)
        return both(FakeQuantized(scaling))
    others = [name for name in names() if name not in ("bf16", "qat")]
    if asked not in others:
        own = '"int8 token"' if tensor == "x" else '"int4 group 32", "int8 channel"'
        what = "activation" if tensor == "x" else "weight"
        raise ValueError(
            f"qat: {what} must be {own}, of 2 to 8 bits, none, or one of {', '.join(others)}; got {asked!r}"
        )
    operand: Operand = getattr(load(asked), tensor)
    return both(FakeQuantized(operand.rowwise))
