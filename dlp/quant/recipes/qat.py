"""qat: quantization-aware training: fprop, dgrad and wgrad multiply decoded values of x and w.

dy stays in high precision. Gradients pass straight through the rounding of x and w, except at clipped integer codes, where no
gradient passes. By default weights are int4 in groups of 32, and each token is int8 with a zero point, as in torchao's
Int8DynamicActivationIntxWeightConfig. On every mesh, scales equal the scales of the unsharded tensors.
"""

import re

from dlp.quant.fake import FakeQuantized
from dlp.quant.integers import IntScaling
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Operand, Recipe, both, load, names

INTEGERS = re.compile(r"int([2-8]) (token|channel|group ([1-9][0-9]*))")


def recipe(*, weight: str = "int4 group 32", activation: str = "int8 token") -> Recipe:
    """weight: "int4 group 32" with 2 to 8 bits, symmetric, or "int8 channel" with one scale per row; activation: "int8 token",
    with a zero point; both also accept "none", or the name of a recipe with the same casts, such as "mxfp8"."""
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
