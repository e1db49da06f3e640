"""TransferPlan: all that one layer with so many tokens casts, agrees on, sends and keeps; decided once.

    y  [M, N]   fprop of x rowwise [M, K], w rowwise [N, K]               x columnwise [K, M] is kept for wgrad
    dx [M, K]   dgrad of dy rowwise [M, N], w columnwise [K, N]
    dw [N, K]   wgrad of dy columnwise [N, M], x columnwise [K, M]

A pure function of a recipe, a row of the style table, the number of tp ranks and the tokens of this rank. Layers carry it
out (`dlp.parallel.linear.core`); the opaque ops read shapes and dtypes from it, the plan's notes and predicted bytes the rest.
The observer of bytes does not know it. Shards travel quantized where they concatenate to the quantized whole; otherwise the
values travel and are cast on arrival.

What contributions to a sum over ranks are carried as (`WIRES`), by the name that recipes and settings use:

    hp      the dtype they have
    bf16    bf16
    fp8     E4M3 with an fp32 scale every 128 features (1.03 bytes an element)

All are exchanged once, summed in fp32 in rank order and rounded once, so a sum has the same bits on every run. A rank's
own contribution is rounded as those of others are: a sum does not depend on which rank adds it up.
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

ASKED = "its recipe asks for it"
Reasons = tuple[str | None, str | None]


class Gathered(NamedTuple):
    """One transfer. `gemm`: whose strategy moves it. `columnwise`: the orientation of the operand that travels; None: the
    values do, [M/R, features]. `leased`: the operand only travels, so it is quantized straight into this rank's segment of
    what is gathered; one that forward keeps is not, since it would keep the whole."""

    gemm: str
    columnwise: bool | None
    leased: bool = False

    @property
    def dim(self) -> int:
        """Along which dimension of the operand shards concatenate."""
        return int(bool(self.columnwise))

    @property
    def at_once(self) -> bool:
        """Whether it is read when all of it is here: what wgrad contracts, and values that are cast then."""
        return self.gemm == "wgrad" or self.columnwise is None


@dataclass(frozen=True)
class Route:
    """x or dy, from the tokens of this rank to the GEMMs that read it.

    here      the orientations that are cast of this rank's tokens (how, and agreed over whom: `TransferPlan.casts`)
    gathers   the transfers, in the order in which they start
    there     the orientations that are cast of the values of all ranks, when these have arrived
    why       of each orientation in `there`
    """

    tensor: str
    here: Orientations
    gathers: tuple[Gathered, ...] = ()
    there: Orientations = NEITHER
    why: Reasons = (None, None)


class Result(NamedTuple):
    """What a tensor is like that a pass returns or keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reduction(NamedTuple):
    """The sum of a result over tp: "all", or "scatter" over its rows; contributions are carried as `codec`."""

    how: str
    codec: str


@dataclass(frozen=True)
class TransferPlan:
    """Of one layer with so many tokens.

    tokens     rows of x and dx on this rank; `y_tokens`: of y and dy, which are token shards [M, N] of their own where x is
               gathered or y scattered, and else have x's own leading dimensions
    x          fprop's x, without and with a wgrad to come
    kept       what forward keeps of x for wgrad: "values" (x itself), or the operand that it is, "rowwise" or "columnwise"
    x_again    wgrad's x, from what is kept
    dys        dgrad's and wgrad's dy, by which of them is asked for: see `dy`
    fprop, dgrad   how y and dx are reduced; None: they are not
    own_group  the user's own group agrees on every scale; `group`: of the ranks that agree, None where nothing is carried out
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
        """How the orientations `here` are cast, or those `there` of what has `arrived`."""
        whole = "dy" if route.tensor == "x" else "x"  # has the tokens of all ranks
        orientations, rows = (route.there, self.rows(whole)) if arrived else (route.here, self.rows(route.tensor))
        return cast_plan(
            self.style, self.recipe, route.tensor, orientations, rows, whole=arrived, own_group=self.own_group,
            group=self.group,
        )  # fmt: skip

    def format(self, route: Route, gathered: Gathered) -> Format | None:
        """That of an operand that travels; None: the values do."""
        quantizers: Operand = getattr(self.recipe, route.tensor)
        if gathered.columnwise is None:
            return None
        return (quantizers.columnwise if gathered.columnwise else quantizers.rowwise).format

    def sends_codes(self, tensor: str, agreed: ProcessGroup | None, group: ProcessGroup) -> bool:
        """Whether operands of x or dy that exist, on whose scales some ranks have `agreed`, travel over a group as they are."""
        routes = [*self.x, self.x_again] if tensor == "x" else self.dys
        if any(any(route.there) for route in routes) or (tensor == "x" and self.kept == "values"):
            return False
        return agreed is group or not any(any(self.casts(route).agreed) for route in routes if any(route.here))

    def rows(self, tensor: str) -> int:
        """Of x, dy, y or dx on this rank."""
        return self.tokens if tensor in ("x", "dx") else self.y_tokens

    def sends(self, route: Route, gathered: Gathered, features: int, dtype: torch.dtype) -> int:
        """Bytes of this rank's part of one transfer, of values [tokens, features] of `dtype`."""
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
        """Of y (fprop), which is that of dy, or of dx (dgrad) before it is x's, `dtype`."""
        options: GemmOptions = getattr(self.recipe, gemm)
        return options.out_dtype or dtype

    def dy(self, row: bool, col: bool) -> Route:
        return self.dys[2 * row + col]

    def y(self, x: Result, out_features: int) -> Result:
        """y, of x [..., K]."""
        shape = x.shape[:-1] if self.style.gathers is None else (self.y_tokens,)
        return Result((*shape, out_features), self.result_dtype("fprop", x.dtype))

    def saved(self, x: Tensor, made: bool) -> list[Tensor]:
        """Uninitialised tensors like those that forward keeps of x [..., K] for wgrad, strides included: the parts of an
        operand, or none where that is x itself, and no prologue has `made` it."""
        values = self.tokens, x.shape[-1]
        if self.kept == "values":
            return [x.new_empty(values)] if made else []
        shape, fmt = operand_shape(self.recipe, "x", values, self.kept == "columnwise"), self.recipe.x.columnwise.format
        if self._made_beside_a_lease():
            return list(compact(fmt, shape, x.dtype, x.device).parts)
        return list(fmt.empty(shape, dtype=x.dtype, device=x.device).parts)

    def _made_beside_a_lease(self) -> bool:
        """Whether one read makes what forward keeps and what it sends, which is compact, and so is the other (`Cast.make`)."""
        route = self.x[True]
        leased = any(each.leased for each in route.gathers) and not self.recipe.x.rowwise.format.keeps_source
        return leased and self.kept == "columnwise" and self.casts(route).reads[0].both is not None

    def dx(self, in_features: int, dtype: torch.dtype) -> Result:
        return Result((self.tokens, in_features), dtype)


def y_tokens_of(style: ParallelStyle, tp: int, tokens: int) -> int:
    """Rows of y from those of x: x that is gathered is a shard of them, y that is scattered another."""
    if style.gathers == "x":
        return tokens * tp
    return tokens // tp if style.gathers == "dy" else tokens


def x_tokens_of(style: ParallelStyle, tp: int, y_tokens: int) -> int:
    """Rows of x from those of y."""
    if style.gathers == "x":
        return y_tokens // tp
    return y_tokens * tp if style.gathers == "dy" else y_tokens


def transfer_plan(
    recipe: Recipe, style: ParallelStyle, tp: int, tokens: int | None, *, kept: str = "", own_group: bool = False,
    group: ProcessGroup | None = None,
) -> TransferPlan:  # fmt: skip
    """`tokens`: of x on this rank; None where they are not known yet: as many as every block wants. `kept`:
    what forward keeps of x by the layer's choice; "values" are quantized again for wgrad; "": what is least. `own_group`: the
    user's own agrees on every scale. `group`: that of the ranks that agree; None where nothing is carried out."""
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
    formats = [
        quantizer.format for operand in (recipe.x, recipe.dy) for quantizer in (operand.rowwise, operand.columnwise)
    ]
    blocks = [size for fmt in formats for size in (*fmt.block, *fmt.multiple) if size]
    return lcm(*blocks, recipe.units[0])


def _reduction(how: str | None, codec: str, tp: int) -> Reduction | None:
    """A rank alone has the sum."""
    return Reduction(how, codec) if how is not None and tp > 1 else None


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
    unit = lcm(fmt.block[dim] or 1, fmt.multiple[dim], recipe.units[0] if columnwise else 1)
    if tokens is None or (fmt.concatenates(dim, tokens) and tokens % unit == 0):
        return None
    return f"{tokens} tokens a rank are no multiple of {unit}, a block of {fmt.name}"


def _kept(recipe: Recipe, style: ParallelStyle, tokens: int) -> str:
    """x itself, where wgrad reads it in high precision or it travels so. Rowwise, an operand whose payload may be transposed
    when it is read: on arrival, if it travels again in backward, or by a view."""
    derived, gathered = recipe.derives("x", tokens), style.gathers == "x"
    if recipe.x.columnwise.format.keeps_source:
        return "values"
    if gathered and obstacle(recipe, "x", not derived, tokens) is not None:
        return "values"
    by_view = recipe.x.rowwise.format.gemm_kind == HP.gemm_kind
    return "rowwise" if derived and (gathered or by_view) else "columnwise"


def _x(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    """`kept`: what a wgrad to come wants; "": there is none."""
    columnwise = kept == "columnwise"
    if style.gathers != "x":
        return Route("x", (True, columnwise))
    why = obstacle(recipe, "x", False, tokens)
    if why is not None:
        return Route("x", (False, columnwise), (Gathered("fprop", None),), ROWWISE, (why, None))
    return Route("x", (True, columnwise), (Gathered("fprop", False, leased=kept != "rowwise"),))


def _x_again(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    if style.gathers != "x":
        return Route("x", (False, kept == "values"))
    derived = recipe.derives("x", tokens)
    if kept == "values":
        why = obstacle(recipe, "x", not derived, tokens)
        if why is None and not recipe.x.columnwise.format.keeps_source:
            here = ROWWISE if derived else COLUMNWISE
            return Route("x", here, (Gathered("wgrad", not derived, leased=True),))
        return Route("x", NEITHER, (Gathered("wgrad", None),), COLUMNWISE, (None, obstacle(recipe, "x", True, tokens)))
    return Route("x", NEITHER, (Gathered("wgrad", kept == "columnwise"),))


def _dy(recipe: Recipe, style: ParallelStyle, tokens: int, row: bool, col: bool) -> Route:
    """`tokens`: of dy on this rank. One transfer where wgrad's operand is the transposed one of dgrad."""
    if style.gathers != "dy" or not (row or col):
        return Route("dy", (row, col))
    why = obstacle(recipe, "dy", False, tokens), obstacle(recipe, "dy", True, tokens)
    if recipe.derives("dy", tokens) and why[0] is None:
        return Route("dy", ROWWISE, (Gathered("dgrad", False, leased=True),))
    here = row and why[0] is None, col and why[1] is None
    there = row and not here[0], col and not here[1]
    gathers = [Gathered(gemm, way, True) for way, gemm in ((False, "dgrad"), (True, "wgrad")) if here[way]]
    if any(there):
        gathers.append(Gathered("dgrad" if there[0] else "wgrad", None))
    return Route("dy", here, tuple(gathers), there, (why[0] if there[0] else None, why[1] if there[1] else None))
