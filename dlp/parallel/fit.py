"""How a recipe's blocks fit a layer: what its dimensions are padded to, and which operands can travel quantized.

Pure functions of a recipe and a number of tokens, for the layers that compute and for the plan that predicts it.
"""

from __future__ import annotations

from functools import cache
from math import lcm

from dlp.parallel.style import ParallelStyle
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import OPERANDS, Operand, Recipe, both
from dlp.quant.tensor import UNSAID, Format

DIMENSIONS = {"x": ("M", "K"), "w": ("N", "K"), "dy": ("M", "N")}
Units = tuple[int, int, int]
ASKED = "its recipe asks for it"


def quantizers(recipe: Recipe, tensor: str) -> Operand | None:
    """Those of an operand x, w, dy; of a result y, dx, which both orientations share, or None if it has none."""
    if tensor in OPERANDS:
        operand: Operand = getattr(recipe, tensor)
        return operand
    quantizer = getattr(recipe, tensor)
    return None if quantizer is None else both(quantizer)


@cache
def units(recipe: Recipe) -> Units:
    """What M, N and K are padded to multiples of, so that every format holds its matrix; M where it is contracted."""
    found = {"M": 1, "N": 1, "K": 1}
    for name, (first, last) in DIMENSIONS.items():
        operand: Operand = getattr(recipe, name)
        for quantizer, rows, contraction in ((operand.rowwise, first, last), (operand.columnwise, last, first)):
            down, across = quantizer.format.multiple
            found[contraction] = lcm(found[contraction], across)
            if rows != "M":  # a format with blocks of several tokens says itself that it needs whole ones
                found[rows] = lcm(found[rows], down)
    return found["M"], found["N"], found["K"]


def derived(recipe: Recipe, name: str, tokens: int) -> bool:
    """The columnwise operand of x, w or dy is the transposed rowwise one: where its tokens need no padding."""
    operand: Operand = getattr(recipe, name)
    return operand.derived and (name == "w" or tokens % units(recipe)[0] == 0)


def obstacle(recipe: Recipe, name: str, columnwise: bool, tokens: int | None) -> str | None:
    """Why shards of x or dy cannot be gathered quantized, so that they travel in high precision; None if they can.

    `tokens`: of a shard; None where it is not known yet.
    """
    if name == "dy" and recipe.gather_dy == "high_precision":
        return ASKED
    operand: Operand = getattr(recipe, name)
    fmt: Format = (operand.columnwise if columnwise else operand.rowwise).format
    dim = int(columnwise)
    if any(part.moves_along(dim) == UNSAID for part in fmt.parts):
        return f"the parts of {fmt.name} do not say how they concatenate"
    unit = lcm(fmt.block[dim] or 1, fmt.multiple[dim], units(recipe)[0] if columnwise else 1)
    if tokens is None or (fmt.concatenates(dim, tokens) and tokens % unit == 0):
        return None
    return f"{tokens} tokens a rank are no multiple of {unit}, a block of {fmt.name}"


def check(layer: str, style: ParallelStyle, recipe: Recipe) -> None:
    """ValueError for a recipe that this layer cannot run under: shards that are gathered need equal scales."""
    delayed = any(caps_of(quantizer).slot is not None for quantizer in recipe.quantizers())
    if style.gathers is not None and delayed and not recipe.reduce_amax:
        raise ValueError(
            f"{layer}: {recipe} has reduce_amax=False, so tp ranks would scale {style.gathers} differently and then "
            f"gather it; set reduce_amax=True, or sequence_parallel=False for this layer"
        )
