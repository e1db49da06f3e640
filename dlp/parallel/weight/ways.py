"""How a weight whose rows are spread over ranks travels: what casts the rows, how their parts concatenate, and when the
result would not be the cast of the whole weight.

Pure functions of a recipe, a shape and a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dlp.parallel import fit
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, caps_of, one_read
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import SHARED, UNSAID, Format


@dataclass(frozen=True)
class Way:
    """How one orientation of w travels: what casts the shard [n, K], and whether its transpose is cast (`flipped`)
    or, for a columnwise operand, the gathered one is transposed. Equal ways are one cast and one transfer."""

    quantizer: Quantizer
    flipped: bool = False
    columnwise: bool = field(default=False, compare=False)

    @property
    def format(self) -> Format:
        return self.quantizer.format

    @property
    def dims(self) -> list[int | None]:
        """Along which dimension each part of the shards concatenates."""
        return self.format.moves_along(int(self.flipped))

    @property
    def spans_rows(self) -> bool:
        """What the quantizer observes covers rows of other ranks too."""
        return int(self.flipped) in self.quantizer.reduces

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the matrix that is cast, from that of w."""
        return (shape[1], shape[0]) if self.flipped else shape


VALUES = Way(KeepHighPrecision())
Ways = tuple[Way, Way]


def ways_of(w: Operand) -> Ways:
    """The ways of the rowwise and the columnwise operand."""
    columnwise = w.columnwise
    return Way(w.rowwise), Way(columnwise, not columnwise.format.transposable, True)


def reads(ways: Iterable[Way]) -> list[tuple[Way | None, Way | None]]:
    """The casts of a shard that make these ways: of its rows, of its columns, or of both in one read."""
    chosen = [way for way in dict.fromkeys(ways) if not way.format.keeps_source]
    if len(chosen) == 2 and not chosen[0].flipped and chosen[1].flipped:
        if one_read(chosen[0].quantizer, chosen[1].quantizer) is not None:
            return [(chosen[0], chosen[1])]
    return [(None, way) if way.flipped else (way, None) for way in chosen]


def keeps_source(w: Operand) -> bool:
    """Nothing is quantized: the values travel."""
    return all(way.format.keeps_source for way in ways_of(w))


def obstacle(recipe: Recipe, shape: tuple[int, int], ranks: int, own_group: bool = False) -> str | None:
    """Why the rows of a weight [N, K] (of one tp rank) over `ranks` cannot be cast apart; None if they can.

    own_group: the user's own group agrees on what was observed.
    """
    rows, uneven = -(-shape[0] // ranks), shape[0] % ranks > 0
    _, *units = fit.units(recipe)
    if any(size % unit for size, unit in zip(shape, units, strict=True)):
        return f"its {shape[0]} x {shape[1]} are padded to multiples of {units[0]} x {units[1]}"
    for way in ways_of(recipe.w):
        fmt = way.format
        if UNSAID in way.dims:
            return f"the parts of {fmt.name} do not say how they concatenate"
        if caps_of(way.quantizer).origin:
            return f"{fmt.name} is rounded stochastically"
        if own_group and way.quantizer.reduces and not way.spans_rows:
            return f"its amax group would mix the scales of different rows of {fmt.name}"
        if uneven and not _keeps_shape(way, (rows, shape[1])):
            return (
                f"{shape[0]} rows over {ranks} ranks leave shards of different sizes, and {fmt.name} has parts to move"
            )
        if not uneven and not fmt.concatenates(int(way.flipped), rows):
            return f"{rows} rows a rank are no multiple of the {fmt.block[way.flipped]} in a block of {fmt.name}"
    return None


def travel(
    recipe: Recipe, shape: tuple[int, int], ranks: int, *, refused: str | None, own_group: bool
) -> tuple[Ways | None, str | None]:
    """How the orientations of a weight [N, K] (of one tp rank) travel over `ranks`, None: as values; and why they do so
    where the recipe quantizes them. `refused`, `own_group`: of `Layout` and `obstacle`."""
    if keeps_source(recipe.w):
        return None, None
    why = refused or obstacle(recipe, shape, ranks, own_group)
    return (ways_of(recipe.w) if why is None else None), why


def _keeps_shape(way: Way, shape: tuple[int, int]) -> bool:
    """All that moves has the shape of the weight, so that shards may be padded."""
    shapes = zip(way.format.part_shapes(shape), way.dims, strict=True)
    return not way.flipped and all(part == shape for part, dim in shapes if dim is not SHARED)
