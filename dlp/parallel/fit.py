"""How a recipe's blocks fit a layer: what its dimensions are padded to, and which operands can travel quantized.

Pure functions of a recipe and of a number of tokens, or of a shape and a number of ranks, for the layers that compute and for
the plan that predicts it. x and dy travel over tp (`obstacle`), weights whose rows are spread over dp_shard by FSDP
(`weight_layouts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import lcm

from dlp.quant.quantizer import KeepHighPrecision, Quantizer, caps_of, one_read
from dlp.quant.recipe import OPERANDS, Operand, Recipe, both
from dlp.quant.tensor import SHARED, UNSAID, Format

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


@dataclass(frozen=True)
class ShardLayout:
    """How one orientation of a weight travels whose rows are spread over ranks.

    quantizer    casts the shard [n, K] of a rank
    transposed   it casts the transposed shard; else a columnwise operand is the gathered one, transposed
    columnwise   the orientation; equal layouts of both are one cast and one transfer
    """

    quantizer: Quantizer
    transposed: bool = False
    columnwise: bool = field(default=False, compare=False)

    @property
    def format(self) -> Format:
        return self.quantizer.format

    @property
    def dims(self) -> list[int | None]:
        """Along which dimension each part of the shards concatenates."""
        return self.format.moves_along(int(self.transposed))

    @property
    def spans_rows(self) -> bool:
        """What the quantizer observes covers rows of other ranks too."""
        return int(self.transposed) in self.quantizer.reduces

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the matrix that is cast, from that of w."""
        return (shape[1], shape[0]) if self.transposed else shape


VALUES = ShardLayout(KeepHighPrecision())
ShardLayouts = tuple[ShardLayout, ShardLayout]  # rowwise, columnwise
ShardRead = tuple[ShardLayout | None, ShardLayout | None]  # of the rows of a shard, of its columns


def shard_layouts(w: Operand) -> ShardLayouts:
    """Those of the rowwise and the columnwise operand."""
    columnwise = w.columnwise
    return ShardLayout(w.rowwise), ShardLayout(columnwise, not columnwise.format.transposable, True)


def shard_reads(layouts: Iterable[ShardLayout]) -> list[ShardRead]:
    """The casts of a shard that make these: of its rows, of its columns, or of both in one read."""
    chosen = [each for each in dict.fromkeys(layouts) if not each.format.keeps_source]
    if len(chosen) == 2 and not chosen[0].transposed and chosen[1].transposed:
        if one_read(chosen[0].quantizer, chosen[1].quantizer) is not None:
            return [(chosen[0], chosen[1])]
    return [(None, each) if each.transposed else (each, None) for each in chosen]


def weight_obstacle(recipe: Recipe, shape: tuple[int, int], ranks: int, own_group: bool = False) -> str | None:
    """Why the rows of a weight [N, K] (of one tp rank) over `ranks` cannot be cast apart; None if they can.

    own_group: the user's own group agrees on what was observed.
    """
    rows, uneven = -(-shape[0] // ranks), shape[0] % ranks > 0
    _, *multiples = units(recipe)
    if any(size % unit for size, unit in zip(shape, multiples, strict=True)):
        return f"its {shape[0]} x {shape[1]} are padded to multiples of {multiples[0]} x {multiples[1]}"
    for layout in shard_layouts(recipe.w):
        fmt = layout.format
        if UNSAID in layout.dims:
            return f"the parts of {fmt.name} do not say how they concatenate"
        if caps_of(layout.quantizer).origin:
            return f"{fmt.name} is rounded stochastically"
        if own_group and layout.quantizer.reduces and not layout.spans_rows:
            return f"its amax group would mix the scales of different rows of {fmt.name}"
        if uneven and not _keeps_shape(layout, (rows, shape[1])):
            return (
                f"{shape[0]} rows over {ranks} ranks leave shards of different sizes, and {fmt.name} has parts to move"
            )
        if not uneven and not fmt.concatenates(int(layout.transposed), rows):
            return f"{rows} rows a rank are no multiple of the {fmt.block[layout.transposed]} in a block of {fmt.name}"
    return None


def weight_layouts(
    recipe: Recipe, shape: tuple[int, int], ranks: int, *, refused: str | None, own_group: bool
) -> tuple[ShardLayouts | None, str | None]:
    """How the orientations of a weight [N, K] (of one tp rank) travel over `ranks`, None: as values; and why they do so
    where the recipe quantizes them. `refused`: why they must;
    `own_group`: of `weight_obstacle`."""
    if recipe.w.keeps_source:
        return None, None
    why = refused or weight_obstacle(recipe, shape, ranks, own_group)
    return (shard_layouts(recipe.w) if why is None else None), why


def _keeps_shape(layout: ShardLayout, shape: tuple[int, int]) -> bool:
    """All that moves has the shape of the weight, so that shards may be padded."""
    shapes = zip(layout.format.part_shapes(shape), layout.dims, strict=True)
    return not layout.transposed and all(part == shape for part, dim in shapes if dim is not SHARED)


def check(layer: str, gathers: str | None, recipe: Recipe) -> None:
    """ValueError for a recipe that this layer cannot run under: shards that are gathered need equal scales. `gathers`: what
    travels, None: nothing."""
    delayed = any(caps_of(quantizer).slot is not None for quantizer in recipe.quantizers())
    if gathers is not None and delayed and not recipe.reduce_amax:
        raise ValueError(
            f"{layer}: {recipe} has reduce_amax=False, so tp ranks would scale {gathers} differently and then "
            f"gather it; set reduce_amax=True, or sequence_parallel=False for this layer"
        )
