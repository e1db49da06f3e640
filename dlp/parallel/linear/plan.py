"""LinearPlan: the casts, agreements, transfers, GEMMs, reductions and saved tensors of a linear, decided once per
(spec, number of tokens).

    fprop  y  [M, N]   x rowwise [M, K]       w rowwise [N, K]      x is saved for wgrad (`kept`)
    dgrad  dx [M, K]   dy rowwise [M, N]      w columnwise [K, N]
    wgrad  dw [N, K]   dy columnwise [N, M]   x columnwise [K, M]

The plan is a pure function of the arguments of `linear_plan`: a recipe, a row of the style table, the number of tp ranks, the
tokens of this rank, and the options and groups of the layer. No other code repeats these decisions. The plan is read by

    dlp.parallel.linear.functional    to execute the GEMMs and reductions
    dlp.parallel.linear.quantize      to execute the routes of x and dy
    dlp.parallel.linear.opaque        for shapes and dtypes of results, which torch.compile needs
    dlp.parallel.model.rows           to print notes
    dlp.parallel.traffic.predict      to predict bytes. The observer that counts bytes does not read the plan

A `Route` lists the casts and gathers of x or dy before a GEMM. If the cast shards of all ranks concatenate to the cast of all
tokens, shards are cast, then gathered; else, or for dy if `gather_dy` is "high_precision", values are gathered, then cast:

    x [M/R, K] of this rank  ──cast──►  operand of M/R tokens  ──gather──►  operand of M tokens
                             ──gather──►  x [M, K]             ──cast──►    operand of M tokens

A reduction sums the contributions of all ranks. A `ReduceCodec` defines the format in which contributions are sent (`WIRES`).
Recipes and settings name the formats:

    hp      the dtype of the result
    bf16    bf16
    fp8     E4M3 with an fp32 scale every 128 features (1.03 bytes an element)

Contributions are exchanged once, summed in fp32 in rank order and rounded once, so a sum has the same bits on every run. The
contribution of this rank is packed as all others are, so a sum does not depend on which rank adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import AS_IT_IS, Kinds, Own, Parts, ReduceCodec
from dlp.comm.transport import in_pass
from dlp.kernels.ranges import named_range
from dlp.kernels.wire import BLOCK, E4M3, pack_fp8, sum_fp8
from dlp.parallel.casts import (
    BOTH,
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
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.overlap import Overlap
from dlp.parallel.style import ParallelStyle
from dlp.quant.gemm import GemmOptions
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import UNSAID, Format
from dlp.runtime.capture import PASSES


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

ASKED = 'the recipe has gather_dy = "high_precision"'
Reasons = tuple[str | None, str | None]


@dataclass(frozen=True)
class Gathered:
    """The all-gather of x or dy.

    gemm         the GEMM whose overlap strategy schedules the gather
    columnwise   the orientation of the gathered operand; None: values [M/R, features] are gathered in high precision
    leased       whether the operand is cast directly into the segment of this rank in the output buffer of the gather. False
                 if forward saves this operand for backward, since it would keep the complete buffer alive, or saved it before
    format       the format of the operand; None: values are gathered
    overlap      the overlap strategy; None in a plan that is only printed
    """

    gemm: str
    columnwise: bool | None
    leased: bool = False
    format: Format | None = field(default=None, compare=False)
    overlap: Overlap | None = field(default=None, compare=False)

    @cached_property
    def dim(self) -> int:
        """The dimension of the operand along which shards concatenate."""
        return int(bool(self.columnwise))

    @property
    def at_once(self) -> bool:
        """Whether the operand is read only after all shards have arrived, because wgrad, or a cast after the gather, reads
        it."""
        return self.gemm == "wgrad" or self.columnwise is None


@dataclass(frozen=True)
class Route:
    """Casts and gathers of x or dy, from the tokens of this rank to the GEMMs.

    tensor        "x" or "dy"
    cast_before   orientations that are cast from the tokens of this rank, before the gathers
    gathers       the gathers, in the order in which they start
    cast_after    orientations that are cast from the gathered values of all ranks
    reasons       for each orientation in `cast_after` the reason why the cast is not before the gather, else None
    casts         returns the cast plan of (orientations, whether the values have been gathered); set by `linear_plan`
    """

    tensor: str
    cast_before: Orientations
    gathers: tuple[Gathered, ...] = ()
    cast_after: Orientations = NEITHER
    reasons: Reasons = (None, None)
    casts: Callable[[Orientations, bool], CastPlan] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def before(self) -> CastPlan | None:
        """The cast plan of `cast_before`; None: nothing is cast. The property is lazy, since a fake implementation needs no
        cast plan, and its sizes may be symbolic."""
        return None if self.casts is None or not any(self.cast_before) else self.casts(self.cast_before, False)

    @cached_property
    def after(self) -> CastPlan | None:
        """The cast plan of `cast_after`; None: nothing is cast."""
        return None if self.casts is None or not any(self.cast_after) else self.casts(self.cast_after, True)

    @cached_property
    def leases(self) -> bool:
        """Whether an operand is cast into the output buffer of a gather."""
        return any(each.leased for each in self.gathers)

    def remarks(self, recipe: Recipe) -> list[str]:
        """Return log lines about operands that are gathered in high precision although the recipe does not request this."""
        return [
            f"{self.tensor} {orientation} ({recipe.name}) is gathered in high precision: {why}"
            for orientation, why in zip(("rowwise", "columnwise"), self.reasons, strict=True)
            if why not in (None, ASKED)
        ]


class Result(NamedTuple):
    """Shape and dtype of a tensor that a pass returns or saves."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reduction(NamedTuple):
    """Sum of a result over tp.

    how     "all": each rank gets the sum; "scatter": each rank gets its rows of the sum
    codec   format in which contributions are sent, a key of `WIRES`
    """

    how: str
    codec: str


STAGES = "cast_x", "cast_dy", "gather_x", "gather_dy", "fprop", "dgrad", "wgrad"


@dataclass(frozen=True)
class LinearPlan:
    """Decisions for one spec and one number of tokens.

    tokens         rows of x and dx on this rank
    y_tokens       rows of y and dy on this rank; differs from `tokens` if x is gathered or y is scattered
    x              the routes of x to fprop, indexed by whether forward saves x for backward
    kept           the form in which forward saves x for wgrad: "values" (x itself), the "rowwise" or the "columnwise" operand
    x_again        the route of the saved x to wgrad, in backward
    dys            the routes of dy, by (whether dgrad reads dy, whether wgrad reads dy)
    fprop, dgrad   the reductions of y and dx; None: no reduction
    spec           the spec of the layer; None: the plan is not executed
    shapes         cache of `shard_shape`
    """

    recipe: Recipe
    style: ParallelStyle
    tokens: int
    y_tokens: int
    x: tuple[Route, Route]
    kept: str
    x_again: Route
    dys: dict[Orientations, Route] = field(hash=False)
    fprop: Reduction | None
    dgrad: Reduction | None
    spec: LinearSpec | None = None
    shapes: dict[Any, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def scope(self) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
        """Functions that return context managers, by name: for a name in STAGES a profiler range, for "forward" and "backward"
        the context in which transfers of the pass use the transport (`in_pass`)."""
        spec = self.spec
        assert spec is not None
        ranges = {stage: partial(named_range, f"{spec.name}.{stage}") for stage in STAGES}
        return ranges | {way: partial(in_pass, spec.group, self.style.name, (spec.name, way)) for way in PASSES}

    @contextmanager
    def observed(self, tensor: str, gathered: Gathered) -> Iterator[None]:
        """Context of a gather of x or dy while an observer counts bytes: the profiler range and the observer's label."""
        fmt = gathered.format
        precision = "" if fmt is None or fmt.keeps_source else fmt.name  # "": the dtype that is sent
        with observer.label(purpose=gathered.gemm, precision=precision), self.scope[f"gather_{tensor}"]():
            yield

    @cached_property
    def bias_in_gemm(self) -> bool:
        """Whether the fprop GEMM adds the bias. If y is reduced, and in invariant layers, the bias is added to the rounded
        y."""
        return self.fprop is None and not (self.spec is not None and self.spec.invariant)

    def sends_codes(self, tensor: str, agreed: ProcessGroup | None, group: ProcessGroup) -> bool:
        """Whether operands of x or dy that were cast outside of the layer can be gathered over `group` as they are: every
        gather of the tensor sends codes, and the scales need no agreement or were agreed over `group`. `agreed`: the ranks that
        share the scales; None: this rank alone."""
        routes = [*self.x, self.x_again] if tensor == "x" else list(self.dys.values())
        if any(any(route.cast_after) for route in routes) or (tensor == "x" and self.kept == "values"):
            return False
        return agreed is group or not any(any(route.before.agreed) for route in routes if route.before is not None)

    def shard_shape(self, tensor: str, shape: torch.Size, columnwise: bool) -> tuple[int, int]:
        """Return `operand_shape` of values [M/R, features] of this rank, and store the shape in `shapes`."""
        found = self.shapes[tensor, shape, columnwise] = operand_shape(self.recipe, tensor, shape, columnwise)
        return found

    def rows(self, tensor: str) -> int:
        """Return the number of rows of x, dy, y or dx on this rank."""
        return self.tokens if tensor in ("x", "dx") else self.y_tokens

    def sends(self, route: Route, gathered: Gathered, features: int, dtype: torch.dtype) -> int:
        """Return the bytes of this rank's shard in one gather of x or dy, whose values are [tokens, features] of `dtype`."""
        shape, fmt = (self.rows(route.tensor), features), gathered.format
        if fmt is None:
            return HP.nbytes(shape, dtype)
        shape = operand_shape(self.recipe, route.tensor, shape, bool(gathered.columnwise))
        return fmt.nbytes(shape, dtype, along=gathered.dim)

    def contribution(self, gemm: str, features: int, dtype: torch.dtype) -> Result:
        """Return shape and dtype of the contribution of this rank to the sum of y (fprop) or dx (dgrad), before it is packed.
        `dtype`: dtype of x."""
        rows, unit = (self.tokens, self.recipe.units[1]) if gemm == "fprop" else (self.y_tokens, self.recipe.units[2])
        return Result((rows, features + -features % unit), self.result_dtype(gemm, dtype))

    def result_dtype(self, gemm: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of y and dy (fprop), or of dx (dgrad) before dx is rounded to the dtype of x. `dtype`: dtype of
        x."""
        options: GemmOptions = getattr(self.recipe, gemm)
        return options.out_dtype or dtype

    def y(self, x: Result, out_features: int) -> Result:
        """Return shape and dtype of y for x [..., K]."""
        shape = x.shape[:-1] if self.style.gathers is None else (self.y_tokens,)
        return Result((*shape, out_features), self.result_dtype("fprop", x.dtype))

    def saved(self, x: Tensor) -> list[Tensor]:
        """Return uninitialised tensors with the shapes, dtypes and strides of the parts of x that forward returns for wgrad.
        The list is empty if x itself is saved."""
        values = self.tokens, x.shape[-1]
        if self.kept == "values":
            return []
        shape, fmt = operand_shape(self.recipe, "x", values, self.kept == "columnwise"), self.recipe.x.columnwise.format
        if self._saved_is_compact():
            return list(compact(fmt, shape, x.dtype, x.device).parts)
        return list(fmt.empty(shape, dtype=x.dtype, device=x.device).parts)

    def _saved_is_compact(self) -> bool:
        """Whether one read produces the saved operand and an operand in the output buffer of a gather: then `Cast.make`
        allocates the saved operand contiguously (`compact`)."""
        route = self.x[True]
        leased = any(each.leased for each in route.gathers) and not self.recipe.x.rowwise.format.keeps_source
        return (
            leased and self.kept == "columnwise" and route.before is not None and route.before.reads[0].both is not None
        )

    def dx(self, in_features: int, dtype: torch.dtype) -> Result:
        return Result((self.tokens, in_features), dtype)


def y_tokens_of(style: ParallelStyle, tp: int, tokens: int) -> int:
    """Return the number of rows of y on this rank for this number of rows of x."""
    if style.gathers == "x":
        return tokens * tp
    return tokens // tp if style.gathers == "dy" else tokens


def x_tokens_of(style: ParallelStyle, tp: int, y_tokens: int) -> int:
    """Return the number of rows of x on this rank for this number of rows of y."""
    if style.gathers == "x":
        return y_tokens // tp
    return y_tokens * tp if style.gathers == "dy" else y_tokens


def linear_plan(
    recipe: Recipe, style: ParallelStyle, tp: int, tokens: int | None, *, kept: str = "", own_group: bool = False,
    group: ProcessGroup | None = None, spec: LinearSpec | None = None,
) -> LinearPlan:  # fmt: skip
    """Decide the plan of a layer.

    tokens                    rows of x on this rank; None: not known yet, and the plan assumes a multiple of every block
    kept                      "values" if an option requests to save x itself; "": the form is decided here (`_kept`)
    own_group                 whether the user named an amax group, which agrees on every scale
    group                     the ranks that agree on scales; None: one rank, or the plan is not executed (prediction)
    spec                      see `LinearPlan`
    """
    if tokens is None:
        tokens = tp * _whole_blocks(recipe)
    y_tokens, kept = y_tokens_of(style, tp, tokens), kept or _kept(recipe, style, tokens)

    def casts(tensor: str, orientations: Orientations, gathered: bool) -> CastPlan:
        rows = tokens if (tensor == "x") != gathered else y_tokens  # if x is gathered, dy has the tokens of all ranks
        return cast_plan(style, recipe, tensor, orientations, rows, whole=gathered, own_group=own_group, group=group)

    def decided(route: Route) -> Route:
        """Add the casts to a route, and the formats and overlap strategies to the gathers of the route."""
        quantizers: Operand = getattr(recipe, route.tensor)
        gathers = []
        for each in route.gathers:
            overlap: Overlap | None = None if spec is None else getattr(spec.overlap, each.gemm)
            if overlap is not None and each.at_once:
                overlap = overlap.at_once
            chosen = quantizers.columnwise if each.columnwise else quantizers.rowwise
            fmt = None if each.columnwise is None else chosen.format
            leased = each.leased and fmt is not None and not fmt.keeps_source
            gathers.append(replace(each, leased=leased, format=fmt, overlap=overlap))
        return replace(route, gathers=tuple(gathers), casts=partial(casts, route.tensor))

    x = [decided(_x(recipe, style, tokens, each)) for each in ("", kept)]
    dys = {wanted: decided(_dy(recipe, style, y_tokens, *wanted)) for wanted in (NEITHER, ROWWISE, COLUMNWISE, BOTH)}
    return LinearPlan(
        recipe, style, tokens, y_tokens, (x[0], x[1]), kept, decided(_x_again(recipe, style, tokens, kept)),
        dys, _reduction(style.fprop.reduce, recipe.fprop.wire, tp),
        _reduction(style.dgrad.reduce, recipe.dgrad.wire, tp), spec,
    )  # fmt: skip


class GradsWanted(NamedTuple):
    """Gradients that a backward computes.

    used     indices of the members whose y has a gradient; a sibling whose y is not used has no gradient
    dx       whether the gradient of x is wanted
    dw, db   for each used member, whether the gradient of the weight and of the bias is wanted
    dtype    dtype of x and dx
    reads_w  whether the backward reads the weights (`reads_w`)
    shape    shape of dx; None: [M, K]
    """

    used: tuple[int, ...]
    dx: bool
    dw: tuple[bool, ...]
    db: tuple[bool, ...]
    dtype: torch.dtype
    reads_w: bool
    shape: tuple[int, ...] | None = None

    def flags(self, count: int) -> list[int]:
        """Encode used, dx, dw and db as integers, which an op can take: 1 if dx is wanted, then for each of `count` members the
        sum of 1 (the member is used), 2 (dw is wanted) and 4 (db is wanted)."""
        flags = [int(self.dx)] + [0] * count
        for i, dw, db in zip(self.used, self.dw, self.db, strict=True):
            flags[1 + i] = 1 + 2 * dw + 4 * db
        return flags

    @classmethod
    def of_flags(cls, flags: Sequence[int], dtype: torch.dtype, recipe: Recipe) -> GradsWanted:
        """Decode the result of `flags` for a layer with this recipe. `shape` is not encoded, and becomes None."""
        used, dx = tuple([i for i, each in enumerate(flags[1:]) if each]), bool(flags[0])
        dw, db = (tuple([bool(flags[1 + i] & bit) for i in used]) for bit in (2, 4))
        return cls(used, dx, dw, db, dtype, reads_w(recipe, dx, any(dw)))


def keeps_x(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that computes these gradients reads x: for dw, and for dx where x was clipped."""
    return dw or (dx and recipe.x.clips)


def reads_w(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that computes these gradients reads the weights: for dx, and for dw where w was clipped."""
    return dx or (dw and recipe.w.clips)


def to_save(x: Tensor, kept: Sequence[Tensor], save: bool) -> list[Tensor]:
    """Return the tensors of x that autograd saves: the parts `kept` that forward returned, or x itself if `kept` is empty. The
    list is empty if `save` is false, because backward does not read x."""
    return list(kept or [x]) if save else []


def _whole_blocks(recipe: Recipe) -> int:
    """Return a number of tokens per rank that is a multiple of every block of x and dy."""
    formats = [
        quantizer.format for operand in (recipe.x, recipe.dy) for quantizer in (operand.rowwise, operand.columnwise)
    ]
    blocks = [size for fmt in formats for size in (*fmt.block, *fmt.multiple) if size]
    return lcm(*blocks, recipe.units[0])


def _reduction(how: str | None, codec: str, tp: int) -> Reduction | None:
    """Return the reduction over tp; None if this rank already has the complete sum."""
    return Reduction(how, codec) if how is not None and tp > 1 else None


def obstacle(recipe: Recipe, name: str, columnwise: bool, tokens: int | None) -> str | None:
    """Return the reason why shards of `name`, "x" or "dy", are gathered in high precision; None: codes can be gathered.

    `tokens`: number of tokens of a shard; None: not known yet.
    """
    if name == "dy" and recipe.gather_dy == "high_precision":
        return ASKED
    operand: Operand = getattr(recipe, name)
    fmt: Format = (operand.columnwise if columnwise else operand.rowwise).format
    dim = int(columnwise)
    if any(part.moves_along(dim) == UNSAID for part in fmt.parts):
        return f"the parts of {fmt.name} do not declare how they concatenate"
    unit = lcm(fmt.block[dim] or 1, fmt.multiple[dim], recipe.units[0] if columnwise else 1)
    if tokens is None or (fmt.concatenates(dim, tokens) and tokens % unit == 0):
        return None
    return f"{tokens} tokens per rank are not a multiple of {unit}, the block of {fmt.name}"


def _kept(recipe: Recipe, style: ParallelStyle, tokens: int) -> str:
    """Return the form in which forward saves x for wgrad.

    values       wgrad reads x in high precision, or x is gathered in high precision for wgrad
    rowwise      the columnwise operand is the transposed rowwise operand, and the transposition is a view or x is gathered
    columnwise   in all other cases
    """
    derived, gathered = recipe.derives("x", tokens), style.gathers == "x"
    if recipe.x.columnwise.format.keeps_source:
        return "values"
    if gathered and obstacle(recipe, "x", not derived, tokens) is not None:
        return "values"
    by_view = recipe.x.rowwise.format.gemm_kind == HP.gemm_kind
    return "rowwise" if derived and (gathered or by_view) else "columnwise"


def _x(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    """Return the route of x to fprop. `kept`: the form in which x is saved for wgrad; "": x is not saved."""
    columnwise = kept == "columnwise"
    if style.gathers != "x":
        return Route("x", (True, columnwise))
    why = obstacle(recipe, "x", False, tokens)
    if why is not None:
        return Route("x", (False, columnwise), (Gathered("fprop", None),), ROWWISE, (why, None))
    return Route("x", (True, columnwise), (Gathered("fprop", False, leased=kept != "rowwise"),))


def _x_again(recipe: Recipe, style: ParallelStyle, tokens: int, kept: str) -> Route:
    """Return the route of the saved x to wgrad. `kept`: the form in which x was saved."""
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
    """Return the route of dy to dgrad (if `row`) and to wgrad (if `col`). `tokens`: rows of dy on this rank. One gather is
    enough for both GEMMs if the operand of wgrad is the transposed operand of dgrad, or if both are cast after the gather."""
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
