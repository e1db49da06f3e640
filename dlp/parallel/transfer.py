"""TransferPlan: what a layer casts, agrees on, sends and saves for a given number of tokens; decided once.

    y  [M, N]   fprop of x rowwise [M, K], w rowwise [N, K]               x columnwise [K, M] is kept for wgrad
    dx [M, K]   dgrad of dy rowwise [M, N], w columnwise [K, N]
    dw [N, K]   wgrad of dy columnwise [N, M], x columnwise [K, M]

A pure function of a recipe, a row of the style table, the number of tp ranks and the tokens of this rank. It is read by

    dlp.parallel.linear.core        executes it
    dlp.parallel.linear.autograd    shapes and dtypes of results, for torch.compile
    dlp.parallel.model.rows         the notes of the printed plan
    dlp.parallel.traffic.predict    predicted bytes; the observer that counts bytes does not read it

A `Route` is the path of x or dy to a GEMM. If the shards of an operand concatenate to the operand of all tokens, they are cast,
then gathered; else the values are gathered in high precision, then cast:

    x [M/R, K] of this rank  ──cast──►  operand of M/R tokens  ──gather──►  operand of M tokens
                             ──gather──►  x [M, K]             ──cast──►    operand of M tokens

A reduction sums contributions of all ranks, each carried in the format that a `ReduceCodec` packs (`WIRES`), by the name that
recipes and settings use:

    hp      the dtype of the result
    bf16    bf16
    fp8     E4M3 with an fp32 scale every 128 features (1.03 bytes an element)

Contributions are exchanged once, summed in fp32 in rank order and rounded once, so a sum has the same bits on every run. A
rank's own contribution is packed as those of others are, so a sum does not depend on which rank adds it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import AS_IT_IS, Kinds, Own, Parts, ReduceCodec
from dlp.kernels.wire import BLOCK, E4M3, pack_fp8, sum_fp8
from dlp.parallel.casts import (
    COLUMNWISE,
    HP,
    NEITHER,
    ROWWISE,
    CastPlan,
    Orientations,
    cast_plan,
    compact,
    operand_shape,
)
from dlp.parallel.style import ParallelStyle
from dlp.quant.gemm import GemmOptions
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import UNSAID, Format


def _pack_bf16(chunks: Tensor) -> Parts:
    return (chunks.bfloat16(),)


def _sum_fp8(parts: Parts, dtype: torch.dtype, own: Own | None = None) -> Tensor:
    codes, scale_inv = parts
    return sum_fp8(codes, scale_inv, dtype, None if own is None else (own[0], own[1][0], own[1][1]))


def _kinds_fp8(shape: tuple[int, ...], dtype: torch.dtype) -> Kinds:
    return [shape, (*shape[:-1], -(-shape[-1] // BLOCK))], [E4M3, torch.float32]


WIRES = {
    "hp": AS_IT_IS,
    "bf16": ReduceCodec(_pack_bf16, AS_IT_IS.total, lambda shape, dtype: ([shape], [torch.bfloat16])),
    "fp8": ReduceCodec(pack_fp8, _sum_fp8, _kinds_fp8),
}

ASKED = "its recipe asks for it"  # by gather_dy = "high_precision"
Reasons = tuple[str | None, str | None]


class Gathered(NamedTuple):
    """One gather.

    gemm         the GEMM whose overlap strategy schedules it
    columnwise   the orientation of the operand that is gathered; None: the values are, [M/R, features]
    leased       the operand is cast straight into this rank's segment of the gathered storage. Not one that forward saves for
                 backward, since that would keep the whole storage alive
    """

    gemm: str
    columnwise: bool | None
    leased: bool = False

    @property
    def dim(self) -> int:
        """The dimension of the operand along which shards concatenate."""
        return int(bool(self.columnwise))

    @property
    def at_once(self) -> bool:
        """Whether it is read only when all shards have arrived: by wgrad, which contracts over them, and by a cast after it."""
        return self.gemm == "wgrad" or self.columnwise is None


@dataclass(frozen=True)
class Route:
    """x or dy, from the tokens of this rank to the GEMMs that read it.

    cast_before   the orientations that are cast of this rank's tokens, before the gathers
    gathers       in the order in which they start
    cast_after    the orientations that are cast of the values of all ranks, after their gather
    reasons       for each orientation in `cast_after`: why it is not cast before
    """

    tensor: str
    cast_before: Orientations
    gathers: tuple[Gathered, ...] = ()
    cast_after: Orientations = NEITHER
    reasons: Reasons = (None, None)


class Result(NamedTuple):
    """Shape and dtype of a tensor that a pass returns or saves."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reduction(NamedTuple):
    """The sum of a result over tp: "all", or "scatter" over its rows; contributions are carried as `codec`."""

    how: str
    codec: str


@dataclass(frozen=True)
class TransferPlan:
    """For one layer and one number of tokens.

    tokens         rows of x and dx on this rank
    y_tokens       rows of y and dy on this rank: others than `tokens` where x is gathered or y scattered
    x              the routes of x to fprop, without and with a wgrad to come
    kept           what forward saves of x for wgrad: "values" (x itself), or its "rowwise" or "columnwise" operand
    x_again        the route of x to wgrad, from what is saved
    dys            the routes of dy to dgrad and wgrad, by which of the two are wanted: see `dy`
    fprop, dgrad   how y and dx are reduced; None: they are not
    own_group      the user named an amax group, which agrees on every scale
    group          the ranks that agree; None where nothing is executed, as in a prediction
    """

    recipe: Recipe
    style: ParallelStyle
    tokens: int
    y_tokens: int
    x: tuple[Route, Route]
    kept: str
    x_again: Route
    dys: tuple[Route, Route, Route, Route]
    fprop: Reduction | None
    dgrad: Reduction | None
    own_group: bool = False
    group: ProcessGroup | None = None

    def casts(self, route: Route, *, arrived: bool = False) -> CastPlan:
        """How the orientations `cast_before` are cast of this rank's tokens, or, of values that have `arrived`,
        `cast_after`."""
        orientations, rows = route.cast_before, self.rows(route.tensor)
        if arrived:  # where x is gathered, dy has the tokens of all ranks, and the other way round
            orientations, rows = route.cast_after, self.rows("dy" if route.tensor == "x" else "x")
        return cast_plan(
            self.style, self.recipe, route.tensor, orientations, rows, whole=arrived, own_group=self.own_group,
            group=self.group,
        )  # fmt: skip

    def format(self, route: Route, gathered: Gathered) -> Format | None:
        """The format of the operand that is gathered; None: the values are."""
        quantizers: Operand = getattr(self.recipe, route.tensor)
        if gathered.columnwise is None:
            return None
        return (quantizers.columnwise if gathered.columnwise else quantizers.rowwise).format

    def sends_codes(self, tensor: str, agreed: ProcessGroup | None, group: ProcessGroup) -> bool:
        """Whether operands of x or dy that were cast outside of the layer, with scales that the ranks of `agreed` share, can be
        gathered over `group` as they are: no route gathers values, and the scales are agreed over that group or need not be."""
        routes = [*self.x, self.x_again] if tensor == "x" else self.dys
        if any(any(route.cast_after) for route in routes) or (tensor == "x" and self.kept == "values"):
            return False
        return agreed is group or not any(any(self.casts(route).agreed) for route in routes if any(route.cast_before))

    def rows(self, tensor: str) -> int:
        """The rows of x, dy, y or dx on this rank."""
        return self.tokens if tensor in ("x", "dx") else self.y_tokens

    def sends(self, route: Route, gathered: Gathered, features: int, dtype: torch.dtype) -> int:
        """Bytes of this rank's part of one gather, of values [tokens, features] of `dtype`."""
        shape, fmt = (self.rows(route.tensor), features), self.format(route, gathered)
        if fmt is None:
            return HP.nbytes(shape, dtype)
        shape = operand_shape(self.recipe, route.tensor, shape, bool(gathered.columnwise))
        return fmt.nbytes(shape, dtype, along=gathered.dim)

    def contribution(self, gemm: str, features: int, dtype: torch.dtype) -> Result:
        """What this rank adds to the sum of y (fprop) or dx (dgrad), before it is packed. `dtype`: of x."""
        rows, unit = (self.tokens, self.recipe.units[1]) if gemm == "fprop" else (self.y_tokens, self.recipe.units[2])
        return Result((rows, features + -features % unit), self.result_dtype(gemm, dtype))

    def result_dtype(self, gemm: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of y (fprop), which dy has too, or of dx (dgrad) before it is rounded to that of x, `dtype`."""
        options: GemmOptions = getattr(self.recipe, gemm)
        return options.out_dtype or dtype

    def dy(self, row: bool, col: bool) -> Route:
        """The route of dy where dgrad (`row`) and wgrad (`col`) read it, or one of them."""
        return self.dys[2 * row + col]

    def y(self, x: Result, out_features: int) -> Result:
        """y, of x [..., K]."""
        shape = x.shape[:-1] if self.style.gathers is None else (self.y_tokens,)
        return Result((*shape, out_features), self.result_dtype("fprop", x.dtype))

    def saved(self, x: Tensor) -> list[Tensor]:
        """Uninitialised tensors with the shapes, dtypes and strides of the parts of x [..., K] that `run_forward` returns for
        wgrad; empty where x itself is saved."""
        values = self.tokens, x.shape[-1]
        if self.kept == "values":
            return []
        shape, fmt = operand_shape(self.recipe, "x", values, self.kept == "columnwise"), self.recipe.x.columnwise.format
        if self._saved_is_compact():
            return list(compact(fmt, shape, x.dtype, x.device).parts)
        return list(fmt.empty(shape, dtype=x.dtype, device=x.device).parts)

    def _saved_is_compact(self) -> bool:
        """Whether one read makes the saved operand together with a leased one: then both are compact (`Cast.make`)."""
        route = self.x[True]
        leased = any(each.leased for each in route.gathers) and not self.recipe.x.rowwise.format.keeps_source
        return leased and self.kept == "columnwise" and self.casts(route).reads[0].both is not None

    def dx(self, in_features: int, dtype: torch.dtype) -> Result:
        return Result((self.tokens, in_features), dtype)


def y_tokens_of(style: ParallelStyle, tp: int, tokens: int) -> int:
    """Rows of y for so many rows of x on this rank."""
    if style.gathers == "x":
        return tokens * tp
    return tokens // tp if style.gathers == "dy" else tokens


def x_tokens_of(style: ParallelStyle, tp: int, y_tokens: int) -> int:
    """Rows of x for so many rows of y on this rank."""
    if style.gathers == "x":
        return y_tokens // tp
    return y_tokens * tp if style.gathers == "dy" else y_tokens


def transfer_plan(
    recipe: Recipe, style: ParallelStyle, tp: int, tokens: int | None, *, kept: str = "", own_group: bool = False,
    group: ProcessGroup | None = None,
) -> TransferPlan:  # fmt: skip
    """The plan of a layer.

    tokens              rows of x on this rank; None: not known yet, and the plan assumes whole blocks
    kept                "values" where the layer's options ask that x itself is saved; "": what needs the least memory
    own_group, group    see `TransferPlan`
    """
    if tokens is None:
        tokens = tp * _whole_blocks(recipe)
    y_tokens, kept = y_tokens_of(style, tp, tokens), kept or _kept(recipe, style, tokens)
    return TransferPlan(
        recipe, style, tokens, y_tokens,
        (_x(recipe, style, tokens, ""), _x(recipe, style, tokens, kept)), kept,
        _x_again(recipe, style, tokens, kept),
        tuple(_dy(recipe, style, y_tokens, row, col) for row in (False, True) for col in (False, True)),  # type: ignore[arg-type]
        _reduction(style.fprop.reduce, recipe.fprop.wire, tp), _reduction(style.dgrad.reduce, recipe.dgrad.wire, tp),
        own_group, group,
    )  # fmt: skip


def _whole_blocks(recipe: Recipe) -> int:
    """A number of tokens a rank that every block of x and dy divides."""
    formats = [
        quantizer.format for operand in (recipe.x, recipe.dy) for quantizer in (operand.rowwise, operand.columnwise)
    ]
    blocks = [size for fmt in formats for size in (*fmt.block, *fmt.multiple) if size]
    return lcm(*blocks, recipe.units[0])


def _reduction(how: str | None, codec: str, tp: int) -> Reduction | None:
    """None where one rank has the whole sum."""
    return Reduction(how, codec) if how is not None and tp > 1 else None


def obstacle(recipe: Recipe, name: str, columnwise: bool, tokens: int | None) -> str | None:
    """Why shards of x or dy cannot be gathered quantized, so that their values are; None if they can.

    `tokens`: of a shard; None where that is not known yet.
    """
    if name == "dy" and recipe.gather_dy == "high_precision":
        return ASKED
    operand: Operand = getattr(recipe, name)
    fmt: Format = (operand.columnwise if columnwise else operand.rowwise).format
    dim = int(columnwise)
    if any(part.moves_along(dim) == UNSAID for part in fmt.parts):
        return f"the parts of {fmt.name} do not say how they concatenate"
    unit = lcm(fmt.block[dim] or 1, fmt.multiple[dim], recipe.units[0] if columnwise else 1)
    if tokens is None or (fmt.concatenates(dim, tokens) and tokens % unit == 0):
        return None
    return f"{tokens} tokens a rank are no multiple of {unit}, a block of {fmt.name}"


def _kept(recipe: Recipe, style: ParallelStyle, tokens: int) -> str:
    """What forward saves of x.

    values       wgrad reads x in high precision, or x is gathered in high precision for it
    rowwise      its payload may be transposed, by a view, or, where x is gathered again in backward, after that
    columnwise   else
    """
    derived, gathered = recipe.derives("x", tokens), style.gathers == "x"
    if recipe.x.columnwise.format.keeps_source:
        return "values"
    if gathered and obstacle(recipe, "x", not derived, tokens) is not None:
        return "values"
    by_view = recipe.x.rowwise.format.gemm_kind == HP.gemm_kind
    return "rowwise" if derived and (gathered or by_view) else "columnwise"


def _x(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    """The route to fprop. `kept`: what is saved for wgrad; "": no wgrad will read x."""
    columnwise = kept == "columnwise"
    if style.gathers != "x":
        return Route("x", (True, columnwise))
    why = obstacle(recipe, "x", False, tokens)
    if why is not None:
        return Route("x", (False, columnwise), (Gathered("fprop", None),), ROWWISE, (why, None))
    return Route("x", (True, columnwise), (Gathered("fprop", False, leased=kept != "rowwise"),))


def _x_again(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    """The route to wgrad, from what forward saved."""
    if style.gathers != "x":
        return Route("x", (False, kept == "values"))
    derived = recipe.derives("x", tokens)
    if kept == "values":
        why = obstacle(recipe, "x", not derived, tokens)
        if why is None and not recipe.x.columnwise.format.keeps_source:
            return Route("x", ROWWISE if derived else COLUMNWISE, (Gathered("wgrad", not derived, leased=True),))
        return Route("x", NEITHER, (Gathered("wgrad", None),), COLUMNWISE, (None, obstacle(recipe, "x", True, tokens)))
    return Route("x", NEITHER, (Gathered("wgrad", kept == "columnwise"),))


def _dy(recipe: Recipe, style: ParallelStyle, tokens: int, row: bool, col: bool) -> Route:
    """The route to dgrad, if `row`, and to wgrad, if `col`. `tokens`: of dy on this rank. One gather serves both where wgrad's
    operand is dgrad's, transposed, and where both are cast after it."""
    if style.gathers != "dy" or not (row or col):
        return Route("dy", (row, col))
    why = obstacle(recipe, "dy", False, tokens), obstacle(recipe, "dy", True, tokens)
    if recipe.derives("dy", tokens) and why[0] is None:
        return Route("dy", ROWWISE, (Gathered("dgrad", False, leased=True),))
    before = row and why[0] is None, col and why[1] is None
    after = row and not before[0], col and not before[1]
    both = ((False, "dgrad"), (True, "wgrad"))
    gathers = [Gathered(gemm, columnwise, True) for columnwise, gemm in both if before[columnwise]]
    if any(after):
        gathers.append(Gathered("dgrad" if after[0] else "wgrad", None))
    return Route("dy", before, tuple(gathers), after, (why[0] if after[0] else None, why[1] if after[1] else None))
