"""Quantize x before the linear, in traced calls: the op `dlp::quantize_x`, and the codes that accompany a dense x.

    y, a dense tensor  ──quantize_x──►  Codes(y) [rowwise parts, columnwise parts]  ──linear_fwd──►  y of the next linear

In traced calls ops pass dense tensors, since autograd passes dense gradients. An op returns the parts of the operands of x as
further dense tensors, which are stored in an attribute of the Python object x, which torch.compile follows from module to
module. The result of an operation on x has no codes, and if x was written to after the cast, the codes of x are ignored: the
next linear then casts x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.comm import observer
from dlp.parallel.casts import CastContext, CastPlan, Operands, cast, operand_shape
from dlp.parallel.linear.active import check_compiled
from dlp.parallel.linear.plan import LinearPlan, Route
from dlp.parallel.linear.quantize import OPERANDS, as_matrix, cast_context, plan_of
from dlp.parallel.linear.spec import LinearSpec, Overlaps, spec_of, trace_of
from dlp.parallel.linear.state import BoundSpec, bound_of, plan_for
from dlp.parallel.style import LOCAL
from dlp.quant.quantizer import Quantizer, caps_of
from dlp.quant.recipe import Recipe

UNQUANTIZED = "the recipe does not quantize"
DRAWS = "stochastic rounding depends on the layer that reads the tensor"


def _constant(function: Any) -> Any:
    """Do the same as `torch.compiler.assume_constant_result`, without the import of torch._dynamo, which takes a second."""
    function._dynamo_marked_constant = True
    return function


def inside_only(spec: LinearSpec, route: Route) -> str:
    """Return the reason why the x or dy of this route cannot be cast before the linear of this spec; "": it can be cast
    before."""
    operand = spec.recipe.of(route.tensor)
    assert operand is not None
    quantizers = operand.rowwise, operand.columnwise
    if operand.keeps_source:
        return UNQUANTIZED
    if any(caps_of(quantizer).origin for quantizer in quantizers):
        return DRAWS
    if any(route.cast_after) or any(quantizer.format.keeps_source for quantizer in quantizers):
        return f"the recipe also needs {route.tensor} in high precision, for a gather or a GEMM"
    if spec.options.save_original_input and route.tensor == "x":
        return "save_original_input saves x in high precision"
    if route.tensor == "dy" and len(spec.members) > 1:
        return "siblings share one cast of all dy"
    return ""


# The op


def _why_dense(spec: LinearSpec, plan: LinearPlan, wgrad: bool, layer: bool) -> str:
    """Return the reason why `quantize_x` returns no operands; "": the op returns operands.

    wgrad   whether backward of the linear computes wgrad
    layer   whether the op casts for one known layer, not for any linear with the recipe
    """
    if spec.slots and not layer:
        return "delayed scales belong to the layer that reads the tensor"
    keeps_values = wgrad and plan.kept == "values"
    return inside_only(spec, plan.x[wgrad]) or ("forward saves x in high precision" if keeps_values else "")


def quantize_x(
    x: Tensor, spec_id: Tensor | None, trace_id: int, wgrad: bool, record: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Cast x [..., K] as a linear casts x. Return the rowwise parts and, if backward reads x columnwise, the columnwise parts.
    If only the linear itself can cast x, return empty lists, and, if the linear is known and its recipe quantizes x, log the
    reason.

    spec_id   identifies the linear; None: any linear that casts x by the recipe of `trace_id` and shares no scales over ranks
    wgrad     whether backward reads x
    record    whether autograd records the forward, so that amaxes are recorded for delayed scales
    """
    rows, context = as_matrix(x), no_context
    if spec_id is None:
        spec, plan = _spec_of_recipe(trace_id), _plan_of_recipe(trace_id, rows.shape[0])
    else:
        bound = bound_of(spec_id)
        check_compiled(bound)
        spec, context = bound.spec, partial(cast_context, bound)
        plan = bound.plans.get(x.shape) or plan_of(bound, x.shape)
    why, route = _why_dense(spec, plan, wgrad, spec_id is not None), plan.x[wgrad]
    if why:
        if spec_id is not None and why is not UNQUANTIZED:
            bound.session.note(f"{spec.name}: x arrives in high precision: {why}")
        return [], []
    assert route.before is not None
    with observer.label(layer=spec.members[0], purpose="fprop"):
        (operands,) = cast(route.before, route.cast_before, [rows], spec.owners("x")[:1], context, record=record)
    return _parts_of(operands)


@cache
def _spec_of_recipe(trace_id: int) -> LinearSpec:
    """Return the spec of a linear with the recipe of this trace_id and without a process group."""
    return LinearSpec("quantize", LOCAL, spec_of(trace_id).recipe, Overlaps.named("serial"))


@cache
def _plan_of_recipe(trace_id: int, tokens: int) -> LinearPlan:
    return plan_for(_spec_of_recipe(trace_id), tokens)


def _parts_of(operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of the rowwise and of the columnwise operand; an empty list for an orientation that was not cast. A
    columnwise part in the memory of a rowwise part is copied, since results of an op must not share memory."""
    rowwise, columnwise = (list(each.parts) if each is not None else [] for each in operands)
    memory = {part.untyped_storage().data_ptr() for part in rowwise}
    return rowwise, [part.clone() if part.untyped_storage().data_ptr() in memory else part for part in columnwise]


def no_context(plan: CastPlan, *asked: Any) -> CastContext:
    """Return the context of a cast without a layer: no flag, no delayed scales, no stochastic rounding."""
    return CastContext(None, (None,) * len(plan.reads), ((),) * len(plan.reads))


def _quantize_x_fake(
    x: Tensor, spec_id: Tensor | None, trace_id: int, wgrad: bool, record: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return empty tensors with the shapes, dtypes and strides that the plan defines for the results of `quantize_x`."""
    spec = _spec_of_recipe(trace_id) if spec_id is None else spec_of(trace_id)
    matrix = prod(x.shape[:-1]), x.shape[-1]
    plan = plan_for(spec, matrix[0])
    if _why_dense(spec, plan, wgrad, spec_id is not None):
        return [], []

    def parts(quantizer: Quantizer, columnwise: bool) -> list[Tensor]:
        shape = operand_shape(spec.recipe, "x", matrix, columnwise)
        return list(quantizer.format.empty(shape, dtype=x.dtype, device=x.device).parts)

    _, columnwise = plan.x[wgrad].cast_before
    return parts(spec.recipe.x.rowwise, False), parts(spec.recipe.x.columnwise, True) if columnwise else []


_LIBRARY = torch.library.Library("dlp", "FRAGMENT")
_LIBRARY.define("quantize_x(Tensor x, Tensor? spec_id, int trace_id, bool wgrad, bool record) -> (Tensor[], Tensor[])")
_LIBRARY.impl("quantize_x", quantize_x, "CompositeExplicitAutograd")
torch.library.register_fake("dlp::quantize_x", _quantize_x_fake, lib=_LIBRARY)


# Codes of a dense tensor


class Codes(NamedTuple):
    """The operands of x that an op cast before the linear.

    reader                describes the linear that will read x
    rowwise, columnwise   the parts of the operands; columnwise is empty if backward does not read x, or reads x rowwise
    version               x._version (torch's counter of writes) when x was cast; -1 in compiled code, where `_is_current`
                          uses dynamo's fake tensors
    """

    reader: Reader
    rowwise: Sequence[Tensor]
    columnwise: Sequence[Tensor]
    version: int

    def __reduce__(self) -> Any:
        """Copy and pickle as None, since the reader refers to a model."""
        return type(None), ()


@dataclass(frozen=True)
class Reader:
    """Description of the linear that will read x, with which an op before the linear casts x in traced calls.

    bound      the bound spec of the linear; None: any linear that casts x in the same way
    trace_id   identifies specs with the recipe of the linear (`dlp.parallel.linear.spec.trace_of`)
    wgrad      whether backward of the linear reads x
    record     whether autograd records the forward, so that amaxes are recorded for delayed scales

    A copied or unpickled reader is the `recipe_reader` of the same recipe, so that its `bound` is None.
    """

    bound: BoundSpec | None
    trace_id: int
    wgrad: bool
    record: bool

    def __reduce__(self) -> Any:
        return recipe_reader, (spec_of(self.trace_id).recipe,)  # registers the trace_id in another process

    def cast(self, x: Tensor) -> Tensor:
        """Cast x and return a view of x with codes. Return x itself if only the linear can cast x, or if torch does not count
        writes to x (inference mode)."""
        if not torch.compiler.is_dynamo_compiling() and x.is_inference():
            return x
        spec_id = None if self.bound is None else self.bound.spec_id
        parts = torch.ops.dlp.quantize_x(x.detach(), spec_id, self.trace_id, self.wgrad, self.record)
        return self.with_codes(x, *parts) if parts[0] else x

    def serves(self, bound: BoundSpec, save: bool) -> bool:
        """Whether a linear with this bound spec can use the operands. save: whether the backward of the linear reads x."""
        if save and not self.wgrad:
            return False
        if self.bound is not None:
            return self.bound is bound
        return bound.spec.amax_group is None and _casts_equally(bound.trace_id, self.trace_id)

    def with_codes(self, x: Tensor, rowwise: Sequence[Tensor], columnwise: Sequence[Tensor]) -> Tensor:
        """Return a view of x with these codes."""
        x = x.view_as(x)
        version = -1 if torch.compiler.is_dynamo_compiling() else x._version
        x.dlp_codes = Codes(self, rowwise, columnwise, version)  # type: ignore[attr-defined]
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.comptime.comptime(_mark)
        return x

    def split(self, parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Split the list of all parts into the rowwise and the columnwise parts."""
        count = _num_parts(self.trace_id)
        return parts[:count], parts[count:]


@_constant
def _num_parts(trace_id: int) -> int:
    """Return the number of parts of the rowwise operand of x."""
    return len(spec_of(trace_id).recipe.x.rowwise.format.parts)


@_constant
def _casts_equally(reads: int, cast_by: int) -> bool:
    """Whether a linear of the trace_id `reads` casts x without agreement between ranks, and exactly as the recipe of the
    trace_id `cast_by` does."""
    mine, other = spec_of(reads), spec_of(cast_by)
    alone = mine.style.gathers != "x" and (mine.tp == 1 or mine.recipe.amax_scope == "table")
    same = mine.recipe.x == other.recipe.x and mine.recipe.units == other.recipe.units
    return alone and same and not mine.options.save_original_input


def codes_of(x: Tensor) -> Codes | None:
    """Return the codes of x. None: x has no codes, was written to after the cast, or has entered or left compiled code
    since."""
    codes: Codes | None = getattr(x, "dlp_codes", None)
    return codes if codes is not None and _is_current(x, codes) else None


def with_operands(bound: BoundSpec, x: Tensor, codes: Sequence[Tensor]) -> Any:
    """Return x [..., K] with an attribute that contains its operands, which the linear reads instead of x. `codes`: the rowwise
    parts, then the columnwise parts."""
    row, col = bound.spec.recipe.x.rowwise.format, bound.spec.recipe.x.columnwise.format
    rest = codes[len(row.parts) :]
    given = x.detach()
    setattr(given, OPERANDS, Operands(row.wrap(codes), col.wrap(rest) if rest else None))
    return given


def recipe_reader(recipe: Recipe) -> Reader:
    """Return the reader for any linear that casts x by this recipe."""
    return trace_reader(trace_of(LinearSpec("quantize", LOCAL, recipe, Overlaps.named("serial"))))


def trace_reader(trace_id: int) -> Reader:
    """Return the reader for any linear that casts x by the recipe of this trace_id."""
    return Reader(None, trace_id, True, False)


# Detect writes to x in compiled code. While dynamo traces, it runs `comptime` functions on fake tensors, which count writes.


class _Seen:
    current = False


def _mark(ctx: Any) -> None:
    """Store the counter of writes to x in an attribute of the fake tensor of x."""
    fake = ctx.get_local("x").as_fake()
    fake.dlp_cast_at = fake._version


def _look(ctx: Any) -> None:
    """Compare the counter of writes to x with the stored counter. A graph input has no stored counter."""
    fake = ctx.get_local("x").as_fake()
    _Seen.current = getattr(fake, "dlp_cast_at", None) == fake._version


@_constant
def _seen() -> bool:
    """Return the result of the last `_look`."""
    return _Seen.current


def _is_current(x: Tensor, codes: Codes) -> bool:
    """Whether x still has the values from which `codes` were cast."""
    if not torch.compiler.is_dynamo_compiling():
        return codes.version == x._version
    torch._dynamo.comptime.comptime(_look)
    return _seen()
