"""The cast engine: cast matrices to quantized operands.

    matrix [rows, columns]  ──►  rowwise operand [rows, columns]       quantized along its columns
                                 columnwise operand [columns, rows]    quantized along its rows, stored transposed

A cast has four steps:

    plan       `CastPlan`, one for a tensor (x, w, dy, y, dx) and a number of rows: the reads of the matrix that produce the
               orientations, the padding, and the scales on which ranks agree
    observe    the amaxes that the casts need
    agree      one MAX all-reduce per group over all observed amaxes; an amax with two `Groups` is reduced over the first
               group, then over the second
    cast       cast into new storage, or into given storage

x, dy, y and dx are cast when the layer runs (`make_casts`). Weights are cast all together at the step boundary, into operands
whose memory stays the same (`CastBatch`): matrices that share a quantizer are observed in one launch and cast in another. Both
launches read a table of addresses in device memory. The table is rewritten when the address of a matrix, an operand, a delayed
scale or a flag has changed: in the first steps, after a load, after a recipe change. All other steps only launch, so that a
CUDA graph can capture these steps. A matrix is observed and cast separately, with bitwise equal operands, if the quantizer has
no method `batch`, the operands have no storage yet, or no kernel can read the matrix.

This file does not depend on layers. `dlp.parallel.linear.quantize` passes the delayed scales, random-number origins and flags
of a layer in a `CastContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.transport import agree
from dlp.kernels import ops
from dlp.kernels.ops import LazyMatrix, stored
from dlp.parallel.style import ParallelStyle
from dlp.quant.quantizer import (
    Amaxes,
    KeepHighPrecision,
    OneRead,
    Origin,
    Quantizer,
    ScaleSlot,
    Wanted,
    batches,
    caps_of,
    flagged,
    offers,
    one_read,
    takes_flag,
)
from dlp.quant.recipe import OPERANDS, Recipe
from dlp.quant.tensor import Format, HighPrecision, QuantizedTensor

Orientations = tuple[bool, bool]  # rowwise, columnwise
NEITHER: Orientations = (False, False)
ROWWISE: Orientations = (True, False)
COLUMNWISE: Orientations = (False, True)
BOTH: Orientations = (True, True)

HP = HighPrecision()
Values = Tensor | LazyMatrix
# Groups over which an amax is reduced by MAX: over the first group, then the result over the second. None: no reduction.
Groups = tuple[ProcessGroup | None, ProcessGroup | None]
NOBODY: Groups = (None, None)
NOWHERE: Wanted = (None, None)  # casts allocate their operands


def agrees(
    style: ParallelStyle, recipe: Recipe, tensor: str, quantizer: Quantizer, columnwise: bool, *,
    whole: bool = False, own_group: bool = False,
) -> bool:  # fmt: skip
    """Whether ranks agree on the scales of an operand.

    With `own_group` they always agree. Otherwise they agree if the tensor is not gathered yet, tp shards the dimension that a
    scale spans, and the style gathers this tensor or the recipe has `amax_scope="all"`.

    columnwise   whether the quantizer casts the transposed tensor
    whole        whether the tensor has been gathered, so that every rank has the full tensor
    own_group    whether the user named an amax group, which agrees on every scale
    """
    if own_group:
        return True
    cut = style.cut(tensor)
    if whole or cut is None:
        return False
    spans_the_cut = (1 - cut if columnwise else cut) in quantizer.reduces
    return spans_the_cut and (style.gathers == tensor or recipe.amax_scope == "all")


def operand_shape(recipe: Recipe, tensor: str, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """Return the shape [rows, contraction], with padding, of the operand that is cast from a matrix of this `shape`: x [M, K],
    w [N, K] or dy [M, N]."""
    rows, columns = (size + -size % unit for size, unit in zip(shape, _units(recipe, tensor), strict=True))
    return (columns, rows + -rows % recipe.units[0]) if columnwise else (rows, columns)


def _units(recipe: Recipe, tensor: str) -> tuple[int, int]:
    """Return the multiples to which rows and columns of a stored tensor are padded. Tokens are padded only where they are the
    contraction dimension, to a multiple of `CastPlan.contracted`."""
    _, n, k = recipe.units
    return {"x": (1, k), "w": (n, k), "dy": (1, n)}.get(tensor, (1, 1))


@dataclass(frozen=True)
class Read:
    """One read of a stored matrix, which produces one or both operands.

    rowwise      quantizer of the rowwise operand; None: the read does not produce this operand
    columnwise   quantizer of the columnwise operand; None: the read does not produce this operand
    groups       for each operand the groups that agree on its amaxes

    A read produces both operands only if `one_read` supports the two quantizers.
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None
    groups: tuple[Groups, Groups] = (NOBODY, NOBODY)

    @cached_property
    def both(self) -> OneRead | None:
        row, col = self.rowwise, self.columnwise
        return None if row is None or col is None else one_read(row, col)

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer whose capabilities (`caps_of`) define whether the cast takes a slot, an origin and a flag."""
        quantizer = self.rowwise or self.columnwise
        assert quantizer is not None, "a read without operands"
        return quantizer

    @cached_property
    def batched(self) -> Quantizer | None:
        """The quantizer of all operands, if one launch can cast many matrices by this quantizer; else None."""
        chosen = [q for q in (self.rowwise, self.columnwise) if q is not None]
        return chosen[0] if chosen[0] == chosen[-1] and batches(chosen[0]) else None

    @cached_property
    def agreed(self) -> bool:
        """Whether ranks agree on any amax before the cast."""
        return any(group is not None for groups in self.groups for group in groups)

    @cached_property
    def takes_flag(self) -> bool:
        return takes_flag(self.quantizer) and not self.quantizer.format.keeps_source

    @cached_property
    def has_slot(self) -> bool:
        return caps_of(self.quantizer).slot is not None

    @cached_property
    def origins(self) -> tuple[bool, ...]:
        """For each `Origin` argument of the cast: whether the origin is a position in the transposed matrix."""
        wanted = ((False, self.rowwise), (True, self.columnwise))
        return tuple(col for col, q in wanted if q is not None) if caps_of(self.quantizer).origin else ()

    @cached_property
    def _writes(self) -> Orientations:
        """Orientations that the read writes to storage; an operand that keeps the source's values is not written."""
        row, col = self.rowwise, self.columnwise
        return row is not None and not row.format.keeps_source, col is not None and not col.format.keeps_source

    def into(self, wanted: Wanted) -> Wanted:
        """Select the storage that the read writes to, from storage for both orientations."""
        row, col = self._writes
        return wanted[0] if row else None, wanted[1] if col else None


class Cast(NamedTuple):
    """A read of one matrix, with all inputs.

    matrix   [rows, columns] as stored, or lazy
    slot     delayed scale, as argument of `Quantizer.cast`; None: the scale is not delayed
    at       origins, as argument of `Quantizer.cast`; (): no stochastic rounding
    into     storage of the rowwise and the columnwise operand; None: the cast allocates
    flag     fp32 [], which the cast sets to NaN if a value is not finite; None: not recorded
    """

    read: Read
    matrix: Any  # Values
    slot: ScaleSlot | None = None
    at: tuple[Origin, ...] = ()
    into: Wanted = NOWHERE
    flag: Tensor | None = None

    def observe(self) -> Amaxes:
        """Return the amaxes of both operands; None for an operand that the read does not produce, or that needs no amax."""
        read, matrix = self.read, self.matrix
        if read.both is not None:
            return read.both.observe(matrix)
        if read.rowwise is not None:
            return read.rowwise.observe(matrix), None
        return None, read.quantizer.observe(matrix.t())

    def make(self, amaxes: Amaxes) -> Wanted:
        """Return the operands, cast with these agreed amaxes."""
        read, matrix, slot, at, into, flag = self
        more: dict[str, Any] = {}
        if flag is not None:
            more = {"flag": flag} if read.takes_flag else flagged(read.quantizer, matrix, flag)
        if slot is not None:
            more["slot"] = slot
        if at:
            more["at"] = at if read.both is not None else at[0]
        if read.both is not None:
            out, out_t = into
            if out is not None or out_t is not None:
                more["outs"] = self._both_storages()
            row, col = read.both.cast(matrix, amaxes, **more)
            return row if out is None else placed(row, out), col if out_t is None else placed(col, out_t)
        turned = read.rowwise is None
        if (given := into[turned]) is not None:
            more["out"] = given
        operand = read.quantizer.cast(matrix.t() if turned else matrix, amaxes[turned], **more)
        operand = operand if given is None else placed(operand, given)
        return (None, operand) if turned else (operand, None)

    def _both_storages(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Return `into`, completed by contiguous storage for the other operand: a read of both operands takes storage for both
        or for none."""
        read, matrix, (out, out_t) = self.read, self.matrix, self.into
        assert read.rowwise is not None and read.columnwise is not None
        return (
            out or compact(read.rowwise.format, matrix.shape, matrix.dtype, matrix.device),
            out_t or compact(read.columnwise.format, matrix.shape[::-1], matrix.dtype, matrix.device),
        )

    def batch(self) -> Quantizer | None:
        """Return the quantizer by which this cast can run in one launch with other casts; None: the cast runs separately."""
        read, (out, out_t) = self.read, self.into
        if (out is None and read.rowwise is not None) or (out_t is None and read.columnwise is not None):
            return None
        return read.batched if read.batched is not None and ops.has_batches(self.matrix) else None

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of all memory that the launch reads and writes."""
        tensors = [self.matrix, *(part for operand in self.into if operand is not None for part in operand.parts)]
        tensors += [] if self.slot is None else [self.slot.scale, self.slot.staging]
        tensors += [] if self.flag is None else [self.flag]
        return tuple(tensor.data_ptr() for tensor in tensors)


def compact(fmt: Format, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
    """Allocate contiguous storage for an operand [rows, contraction], as a gather sends the operand. (`Format.empty` may
    allocate scales with other strides, as a GEMM reads them.)"""
    rows, contraction = shape
    parts = zip(fmt.part_shapes((rows, contraction)), fmt.part_dtypes(dtype), strict=True)
    return fmt.wrap([torch.empty(part, dtype=of, device=device) for part, of in parts])


def placed(operand: QuantizedTensor, out: QuantizedTensor) -> QuantizedTensor:
    """Return the operand in `out`, copied there if the quantizer did not write to `out`."""
    return out if operand is out else operand.format.fill(out, *operand.parts)


def _turned(rowwise: QuantizedTensor, out: QuantizedTensor | None) -> QuantizedTensor:
    columnwise = rowwise.transpose()
    return columnwise if out is None else placed(columnwise, out)


class Operands(NamedTuple):
    """Operands of one tensor, by orientation; None for an orientation that was not requested."""

    rowwise: QuantizedTensor | None
    columnwise: QuantizedTensor | None

    def at(self, columnwise: bool) -> QuantizedTensor:
        found = self[columnwise]
        assert found is not None, "this orientation was not requested"
        return found


class CastContext(NamedTuple):
    """Inputs of the casts of one matrix that come from the state of the model.

    flag         fp32 [], which becomes NaN if a value is not finite; None: not recorded
    slots        delayed scale for each read; None for a read without a delayed scale
    origins      origins of the operands of each read, for stochastic rounding
    slot_names   names of the delayed scales, by read
    """

    flag: Tensor | None
    slots: Sequence[ScaleSlot | None]
    origins: Sequence[tuple[Origin, ...]]
    slot_names: Sequence[str | None] = ()


# Function that returns the `CastContext` of a matrix. Arguments: plan, name of the linear (member), shape, device, and whether
# amaxes are recorded for delayed scales
GetContext = Callable[["CastPlan", str, torch.Size, torch.device, bool], CastContext]


@dataclass(frozen=True)
class CastPlan:
    """Casts of one tensor: one plan for all matrices with the same number of rows.

    tensor      x, w, dy, y or dx
    whole       whether the tensor has been gathered, so that every rank has the full tensor
    reads       the reads that produce the requested operands
    agreed      for each orientation, whether ranks agree on the scales
    derived     whether the columnwise operand is the transposed rowwise operand, without a separate cast
    units       multiples to which rows and columns are padded
    contracted  multiple to which rows are padded for the columnwise operand, in which rows are the contraction dimension
    lazy        whether the plan has one read, which accepts a `LazyMatrix`
    quantizes   whether at least one orientation is quantized
    contexts    cache of `CastContext`, by member, shape and device of the values; a context with slots is not cached, since
                an autocast region may have separate scales
    """

    tensor: str
    whole: bool
    reads: tuple[Read, ...]
    agreed: Orientations
    derived: bool
    units: tuple[int, int]
    contracted: int
    lazy: bool
    quantizes: bool
    contexts: dict[tuple[str, torch.Size, torch.device], CastContext] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def pads(self) -> bool:
        """Whether some matrices need zero padding."""
        return (*self.units, self.contracted) != (1, 1, 1)

    def matrices(self, value: Values) -> list[Any]:
        """Return the matrix for each read: the value, computed if it is lazy and the plan is not, and padded for the read."""
        if not (self.lazy or isinstance(value, Tensor)):
            value = value.value
        if not self.pads:
            return [value] * len(self.reads)
        rows, columns = value.shape
        if not (rows % self.units[0] or columns % self.units[1] or rows % self.contracted):
            return [value] * len(self.reads)
        padded = _pad(value, *self.units)
        return [padded if read.rowwise is not None else _pad(padded, self.contracted, 1) for read in self.reads]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shapes of `matrices` for a value of this shape."""
        rows, columns = (size + -size % unit for size, unit in zip(shape, self.units, strict=True))
        whole = rows + -rows % self.contracted
        return [(rows if read.rowwise is not None else whole, columns) for read in self.reads]

    @cached_property
    def keeps(self) -> bool:
        """Whether no cast runs: all quantizers are `KeepHighPrecision` itself, not a wrapper that records statistics."""
        return all(type(q) is KeepHighPrecision for read in self.reads for q in (read.rowwise, read.columnwise) if q)

    @cached_property
    def scaled_by_slots(self) -> bool:
        """Whether a cast reads a delayed scale."""
        return any(read.has_slot for read in self.reads)

    def numbers_agreed(self, value: Tensor) -> int:
        """Return the number of amaxes (fp32) on which ranks agree before the casts of this value."""
        observed: list[Tensor | None] = []
        for read, matrix in zip(self.reads, self.matrices(value), strict=True):
            observed += [amax for amax, agreed in zip(Cast(read, matrix).observe(), self.agreed, strict=True) if agreed]
        return numbers_in(observed)


def numbers_in(amaxes: Iterable[Tensor | None]) -> int:
    """Return the total number of elements of these tensors. A tensor that serves both orientations counts once."""
    return sum({id(amax): amax.numel() for amax in amaxes if amax is not None}.values())


def cast_plan(
    style: ParallelStyle, recipe: Recipe, tensor: str, orientations: Orientations, rows: int, *,
    whole: bool = False, own_group: bool = False, group: ProcessGroup | None = None,
) -> CastPlan:  # fmt: skip
    """Return the plan that produces these orientations of matrices of x, w, dy, y or dx with this number of rows.

    whole, own_group   see `agrees`
    group              ranks that agree on the scales that need an agreement; None: there is one rank, or the plan is not
                       executed
    """
    quantizers = recipe.of(tensor)
    assert quantizers is not None, f"{recipe} has no quantizer for {tensor}"
    row, col = orientations
    by_row, by_col = quantizers.rowwise, quantizers.columnwise
    contracted = 1 if tensor == "w" else recipe.units[0]  # the rows of a weight need no padding
    offered = one_read(by_row, by_col) is not None
    derived = not offered and (tensor not in OPERANDS or recipe.derives(tensor, rows))
    together = offered and row and col and rows % contracted == 0

    rowwise, columnwise = row or together or (col and derived), col and not derived
    agreed = tuple(
        agrees(style, recipe, tensor, quantizer, columnwise, whole=whole, own_group=own_group)
        for columnwise, quantizer in ((False, by_row), (True, by_col))
    )
    groups = tuple((None, group) if each else NOBODY for each in agreed)
    if together:
        wanted: list[Orientations] = [BOTH]
    else:
        wanted = [ROWWISE] * rowwise + [COLUMNWISE] * columnwise
    reads = [
        Read(by_row if r else None, by_col if c else None, (groups[0] if r else NOBODY, groups[1] if c else NOBODY))
        for r, c in wanted
    ]
    native = all(caps_of(quantizer).native and not quantizer.format.keeps_source for quantizer in (by_row, by_col))
    lazy = native and len(reads) == 1 and reads[0].rowwise is not None
    quantizes = not (by_row.format.keeps_source and by_col.format.keeps_source)
    return CastPlan(
        tensor,
        whole,
        tuple(reads),
        (agreed[0], agreed[1]),
        derived,
        _units(recipe, tensor),
        contracted,
        lazy,
        quantizes,
    )


def _pad(matrix: Values, rows: int, columns: int) -> Any:
    """Return the matrix, zero-padded to multiples of `rows` and `columns`; unchanged if it fits."""
    below, right = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    return F.pad(stored(matrix), (0, right, 0, below)) if below or right else matrix


def cast(
    plan: CastPlan, orientations: Orientations, values: Sequence[Values], members: Sequence[str], get_context: GetContext, *,
    record: bool = True, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Cast values [rows, columns] of the plan's tensor, one value for each of `members`, with one amax agreement for all.

    get_context   function that returns the `CastContext` of a value
    record        whether amaxes are recorded for delayed scales
    into          storage of `operand_shape` for the operands of a single value; None for an orientation: the cast
                  allocates
    """
    row, col = orientations
    if not plan.reads:
        return [Operands(None, None)] * len(values)
    if plan.keeps:
        return [_kept(plan, orientations, value) for value in values]
    casts: list[Cast] = []
    for value, member in zip(values, members, strict=True):
        context = None if plan.scaled_by_slots else plan.contexts.get((member, value.shape, value.device))
        if context is None:
            context = get_context(plan, member, value.shape, value.device, record)
        casts += casts_of(plan, value, context, into)
    results = make_casts(casts)
    if len(plan.reads) == 1 and not plan.derived:  # one read of each value produces all operands
        return list(starmap(Operands, results))
    if plan.derived:  # the rowwise operand, and its transpose
        return [Operands(q if row else None, _turned(q, into[1]) if col else None) for q, _ in results if q]
    # two reads for each value: rowwise, columnwise
    return [Operands(q, q_t) for (q, _), (_, q_t) in zip(results[::2], results[1::2], strict=True)]


def casts_of(plan: CastPlan, value: Values, context: CastContext, into: Wanted = NOWHERE) -> list[Cast]:
    """Return the casts of one value, one for each read of the plan."""
    matrices = plan.matrices(value) if plan.pads or not plan.lazy else [value]  # a lazy plan has one read
    casts = []
    for read, matrix, slot, at in zip(plan.reads, matrices, context.slots, context.origins, strict=True):
        casts.append(Cast(read, matrix, slot, at, into if into is NOWHERE else read.into(into), context.flag))
    return casts


def _kept(plan: CastPlan, orientations: Orientations, value: Values) -> Operands:
    """Return the operands of a plan that runs no cast: the padded value, and a transposed view of the padded value."""
    x = stored(plan.matrices(value)[0] if plan.pads else value)
    row, col = orientations
    return Operands(QuantizedTensor(HP, (x,)) if row else None, QuantizedTensor(HP, (x.t(),)) if col else None)


def make_casts(casts: Sequence[Cast]) -> list[Wanted]:
    """Observe, agree and cast, and return the operands of each cast.

    Ranks that agree must call this with the same casts in the same order."""
    if len(casts) == 2 and (grads := _gate_grads(casts)) is not None:
        return _cast_gate_grads(casts, grads)
    observed = [cast.observe() for cast in casts]
    if any([cast.read.agreed for cast in casts]):
        observed = _agreed(casts, observed)
    return [cast.make(amaxes) for cast, amaxes in zip(casts, observed, strict=True)]


def _gate_grads(casts: Sequence[Cast]) -> ops.GatedGrads | None:
    """Return the lazy gradients of gate and up that these two casts read, if one kernel can produce all four operands from one
    read of both gradients; else None."""
    first, second = casts
    gate, up, read = first.matrix, second.matrix, first.read
    if not (isinstance(gate, ops.GatedGrad) and isinstance(up, ops.GatedGrad) and gate.of_both(up)):
        return None
    same_read = read is second.read and read.both is not None and read.rowwise == read.columnwise
    plain = first.into is NOWHERE and (first.flag is None or read.takes_flag)
    return gate.grads if same_read and plain and offers(read.quantizer, "both_grads") else None


def _cast_gate_grads(casts: Sequence[Cast], grads: ops.GatedGrads) -> list[Wanted]:
    """Run `make_casts` for the two casts that read `grads`, with one kernel for all four operands."""
    quantizer: Any = casts[0].read.quantizer
    agreed = _agreed(casts, list(quantizer.observe_grads(grads)))
    operands: list[Wanted] = quantizer.both_grads(
        grads, agreed, [cast.slot for cast in casts], [cast.flag for cast in casts]
    )
    return operands


def _agreed(casts: Sequence[Cast], observed: list[Amaxes]) -> list[Amaxes]:
    """Return the observed amaxes after their MAX reductions: over the first of the `Groups` of each cast, then over the
    second."""
    for turn in range(len(NOBODY)):
        # keyed by id, since both orientations may share one amax tensor
        by_group: dict[ProcessGroup, dict[int, Tensor]] = {}
        for cast, amaxes in zip(casts, observed, strict=True):
            for groups, amax in zip(cast.read.groups, amaxes, strict=True):
                group = groups[turn]
                if group is not None and amax is not None:
                    by_group.setdefault(group, {})[id(amax)] = amax
        if by_group:
            new: dict[int, Tensor] = {}
            for group, its in by_group.items():
                new |= zip(its, agree(list(its.values()), group), strict=True)
            observed = [(new.get(id(row), row), new.get(id(col), col)) for row, col in observed]
    return observed


class Prepared(NamedTuple):
    """Launches of batched casts. `places[i]`: indices, in the list of all casts, of the casts that `launches[i]` runs."""

    places: list[list[int]]
    launches: list[ops.Launches]

    def observe(self) -> dict[int, Amaxes]:
        """Launch the kernels that compute amaxes, and return the amaxes by index of the cast."""
        amaxes: dict[int, Amaxes] = {}
        for places, launches in zip(self.places, self.launches, strict=True):
            for launch in launches.observe:
                launch()
            amaxes |= zip(places, launches.amaxes, strict=True)
        return amaxes

    def cast(self, agreed: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Launch the casts. `agreed`: pairs of an observed amax and the agreed amax, which is copied into the memory of the
        observed amax, because the launches read this memory."""
        changed = {id(own): (own, new) for own, new in agreed if own is not None and new is not None and own is not new}
        if changed:
            owns, news = zip(*changed.values(), strict=True)
            torch._foreach_copy_(owns, news)
        for launch in (launch for launches in self.launches for launch in launches.cast):
            launch()


class CastBatch:
    """Casts that run at every step boundary. Their launches are prepared once, and again after an address has changed."""

    def __init__(self) -> None:
        self._made_for: list[tuple[int, Quantizer, tuple[int, ...]]] = []
        self._prepared = Prepared([], [])

    @torch.no_grad()
    def make(self, casts: Sequence[Cast]) -> list[Wanted]:
        """Observe, agree and cast as `make_casts` does, with one launch for all casts that share a quantizer and a dtype and
        can run in batches (`Cast.batch`)."""
        batched: dict[tuple[Quantizer, torch.dtype], list[int]] = {}
        for i, cast in enumerate(casts):
            quantizer = cast.batch()
            if quantizer is not None:
                batched.setdefault((quantizer, cast.matrix.dtype), []).append(i)
        made_for = [(i, q, casts[i].addresses()) for (q, _), places in batched.items() for i in places]
        if made_for != self._made_for:
            launches = [_launches(q, [casts[i] for i in places]) for (q, _), places in batched.items()]
            self._prepared, self._made_for = Prepared(list(batched.values()), launches), made_for
        amaxes = self._prepared.observe()
        observed = [amaxes[i] if i in amaxes else cast.observe() for i, cast in enumerate(casts)]
        agreed = _agreed(casts, observed)
        self._prepared.cast([pair for i in amaxes for pair in zip(observed[i], agreed[i], strict=True)])
        return [cast.into if i in amaxes else cast.make(agreed[i]) for i, cast in enumerate(casts)]


def _launches(quantizer: Any, casts: Sequence[Cast]) -> ops.Launches:
    """Return launches that run these casts together. All casts have this `quantizer`, which has a method `batch`."""
    matrices, into = [cast.matrix for cast in casts], [cast.into for cast in casts]
    launches: ops.Launches = quantizer.batch(
        matrices, into, [cast.slot for cast in casts], [cast.flag for cast in casts]
    )
    return launches
