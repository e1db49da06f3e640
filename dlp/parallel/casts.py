"""The cast engine: from matrices to quantized operands.

    plan       of one tensor: which reads of it make the orientations that are needed, padded to what, agreed on or not
    observe    what casts need to know; of all matrices of a `CastBatch` that share a quantizer in one launch
    agree      one MAX all-reduce a group for all that was observed; those whose rows lie on several ranks first
    cast       into new operands, or into those given; of a `CastBatch` in one launch for all that share a quantizer

x and dy of a layer are batches of their own, made at once (`make_casts`). Weights are cast together at the step boundary, into
operands that stay where they are (`CastBatch`): a launch there reads a table of addresses in device memory, which is written
when a matrix, an operand or a delayed scale has moved: in the first steps, after a load and after a swap. A step in between
only launches, so it can be captured in a CUDA graph. Where a quantizer offers no batch, where operands are still to be
allocated, or where no kernel reads a matrix, it is observed and cast by itself, with the same bits.

Nothing here knows a layer: `dlp.parallel.linear.state` says what casts of one take beside a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
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
    caps_of,
    flagged,
    one_read,
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
Groups = tuple[ProcessGroup | None, ProcessGroup | None]  # that agree, the second on what the first has agreed on
NOBODY: Groups = (None, None)
NOWHERE: Wanted = (None, None)


def agrees(
    style: ParallelStyle, recipe: Recipe, tensor: str, quantizer: Quantizer, columnwise: bool, *,
    whole: bool = False, own_group: bool = False,
) -> bool:  # fmt: skip
    """The rule: tp cuts the dimension that a scale spans, in an operand that is gathered, or, with `amax_scope="all"`, in any.

    columnwise   the quantizer is given the transposed tensor
    whole        the tensor has been gathered: no rank has a part of it
    own_group    a group of the user's agrees, on every scale
    """
    if own_group:
        return True
    cut = style.cut(tensor)
    if whole or cut is None:
        return False
    spans_the_cut = (1 - cut if columnwise else cut) in quantizer.reduces
    return spans_the_cut and (style.gathers == tensor or recipe.amax_scope == "all")


def operand_shape(recipe: Recipe, tensor: str, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """[rows, contraction] of an operand of values [tokens, features] of x or dy, or [N, K] of w, with the zeros that casts
    append."""
    rows, columns = (size + -size % unit for size, unit in zip(shape, _units(recipe, tensor), strict=True))
    return (columns, rows + -rows % recipe.units[0]) if columnwise else (rows, columns)


def _units(recipe: Recipe, tensor: str) -> tuple[int, int]:
    """What rows and columns of a stored tensor are padded to multiples of; rows that are tokens only where they are
    contracted."""
    _, n, k = recipe.units
    return {"x": (1, k), "w": (n, k), "dy": (1, n)}.get(tensor, (1, 1))


@dataclass(frozen=True)
class Read:
    """What one read of a stored matrix makes: by `rowwise` its operand, by `columnwise` that of its transpose, None for one
    that is not wanted; both only where `one_read` makes both. `groups`: who agrees on what is observed for each of them."""

    rowwise: Quantizer | None
    columnwise: Quantizer | None
    groups: tuple[Groups, Groups] = (NOBODY, NOBODY)

    @cached_property
    def both(self) -> OneRead | None:
        row, col = self.rowwise, self.columnwise
        return None if row is None or col is None else one_read(row, col)

    @cached_property
    def quantizer(self) -> Quantizer:
        """Whose slot, origin and flag the cast takes."""
        quantizer = self.rowwise or self.columnwise
        assert quantizer is not None, "a read that makes nothing"
        return quantizer

    @cached_property
    def agreed(self) -> bool:
        """Whether ranks agree on anything before the cast."""
        return any(group is not None for groups in self.groups for group in groups)

    @cached_property
    def takes_flag(self) -> bool:
        return caps_of(self.quantizer).flag and not self.quantizer.format.keeps_source

    @cached_property
    def has_slot(self) -> bool:
        return caps_of(self.quantizer).slot is not None

    @cached_property
    def origins(self) -> tuple[bool, ...]:
        """Of each origin that the cast asks for: whether it is that of the transposed matrix."""
        wanted = ((False, self.rowwise), (True, self.columnwise))
        return tuple(col for col, q in wanted if q is not None) if caps_of(self.quantizer).origin else ()

    @cached_property
    def _writes(self) -> Orientations:
        """What it writes: not what is kept as it is."""
        row, col = self.rowwise, self.columnwise
        return row is not None and not row.format.keeps_source, col is not None and not col.format.keeps_source

    def into(self, wanted: Wanted) -> Wanted:
        """Where it writes, of storage for both orientations."""
        row, col = self._writes
        return wanted[0] if row else None, wanted[1] if col else None

    def observe(self, matrix: Any) -> Amaxes:
        both = self.both
        if both is not None:
            return both.observe(matrix)
        if self.rowwise is not None:
            return self.rowwise.observe(matrix), None
        return None, None if self.columnwise is None else self.columnwise.observe(matrix.t())


class Cast(NamedTuple):
    """A read of `matrix` [rows, columns], as stored. `slot`, `at`: as quantizers take them; `into`: the operands, where there
    are some already; `flag`: see `flagged`."""

    read: Read
    matrix: Any  # Values
    slot: ScaleSlot | None = None
    at: tuple[Origin, ...] = ()
    into: Wanted = NOWHERE
    flag: Tensor | None = None

    def make(self, amaxes: Amaxes) -> Wanted:
        """The operands, by agreed amaxes."""
        read, matrix, slot, at, (out, out_t), flag = self
        more: dict[str, Any] = {}
        if flag is not None:
            more = {"flag": flag} if read.takes_flag else flagged(read.quantizer, matrix, flag)
        if slot is not None:
            more["slot"] = slot
        both = read.both
        if both is not None:
            if at:
                more["at"] = at
            if out is not None or out_t is not None:  # where one of them travels, the other one is made like it
                rowwise, columnwise = both.rowwise.format, both.columnwise.format
                more["outs"] = (
                    out or compact(rowwise, matrix.shape, matrix.dtype, matrix.device),
                    out_t or compact(columnwise, matrix.shape[::-1], matrix.dtype, matrix.device),
                )
            row, col = both.cast(matrix, amaxes, **more)
            return row if out is None else placed(row, out), col if out_t is None else placed(col, out_t)
        if at:
            more["at"] = at[0]
        if read.rowwise is not None:
            if out is not None:
                more["out"] = out
            return placed(read.rowwise.cast(matrix, amaxes[0], **more), out), None
        if out_t is not None:
            more["out"] = out_t
        return None, placed(read.quantizer.cast(matrix.t(), amaxes[1], **more), out_t)

    def batch(self) -> Quantizer | None:
        """The quantizer whose batch this cast can be part of; None: it is made by itself."""
        read = self.read
        wanted = [
            (q, into) for q, into in zip((read.rowwise, read.columnwise), self.into, strict=True) if q is not None
        ]
        quantizer = read.quantizer
        if self.at or not caps_of(quantizer).one_launch or any(q != quantizer or into is None for q, into in wanted):
            return None
        return quantizer if ops.has_batches(self.matrix) else None

    def addresses(self) -> tuple[int, ...]:
        """All that a launch reads or writes."""
        parts = [part for operand in self.into if operand is not None for part in operand.parts]
        beside = [] if self.slot is None else [self.slot.scale, self.slot.staging]
        beside += [] if self.flag is None else [self.flag]
        return tuple(tensor.data_ptr() for tensor in (self.matrix, *parts, *beside))


def compact(fmt: Format, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
    """Storage for an operand as it travels, where `Format.empty` may lay scales out for a GEMM."""
    rows, contraction = shape
    parts = zip(fmt.part_shapes((rows, contraction)), fmt.part_dtypes(dtype), strict=True)
    return fmt.wrap([torch.empty(part, dtype=of, device=device) for part, of in parts])


def placed(made: QuantizedTensor, out: QuantizedTensor | None) -> QuantizedTensor:
    """The operand in `out`: copied there by a quantizer that did not write into it."""
    return made if out is None or made is out else made.format.fill(out, *made.parts)


class Operands(NamedTuple):
    """One tensor in the orientations that were asked for; None for another."""

    rowwise: QuantizedTensor | None
    columnwise: QuantizedTensor | None

    def at(self, columnwise: bool) -> QuantizedTensor:
        found = self[columnwise]
        assert found is not None, "this orientation was not asked for"
        return found


class Beside(NamedTuple):
    """What the casts of one matrix take beside it: where they tell that a value was not finite, and by read the delayed scale
    and the origins of what they make."""

    flag: Tensor | None
    slots: Sequence[ScaleSlot | None]
    origins: Sequence[tuple[Origin, ...]]


# the plan, whose values they are, their shape, where they lie, and whether amaxes count
AskBeside = Callable[["CastPlan", str, torch.Size, torch.device, bool], Beside]


@dataclass(frozen=True)
class CastPlan:
    """How matrices of one tensor become operands; the same for all with so many rows.

    whole      they have been gathered: no rank has a part of them
    reads      which reads make what is needed
    agreed     by orientation: whether ranks agree on its scales
    derived    the columnwise operand is the transposed rowwise one
    units      what rows and columns are padded to multiples of; `contracted`: and rows where they are contracted
    lazy       the one cast there is may be given a `LazyMatrix`
    quantizes  not all is kept as it is
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

    @cached_property
    def pads(self) -> bool:
        """Whether a matrix may need zeros; with none, and one read, it is cast as it is."""
        return (*self.units, self.contracted) != (1, 1, 1)

    def matrices(self, value: Values) -> list[Any]:
        """What each read is given, as stored."""
        if not self.lazy:
            value = stored(value)
        if not self.pads:
            return [value] * len(self.reads)
        rows, columns = value.shape
        if not (rows % self.units[0] or columns % self.units[1] or rows % self.contracted):
            return [value] * len(self.reads)
        padded = _pad(value, *self.units)
        return [padded if read.rowwise is not None else _pad(padded, self.contracted, 1) for read in self.reads]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Those of `matrices`, of a value of this shape."""
        rows, columns = (size + -size % unit for size, unit in zip(shape, self.units, strict=True))
        whole = rows + -rows % self.contracted
        return [(rows if read.rowwise is not None else whole, columns) for read in self.reads]

    @cached_property
    def keeps(self) -> bool:
        """All is kept as it is, and nothing is known of it."""
        return all(type(q) is KeepHighPrecision for read in self.reads for q in (read.rowwise, read.columnwise) if q)

    @cached_property
    def scaled_by_slots(self) -> bool:
        """A cast reads a delayed scale."""
        return any(read.has_slot for read in self.reads)

    def casts(self, matrices: Sequence[Any], beside: Beside, into: Wanted = NOWHERE) -> list[Cast]:
        """Those of one tensor, of which each read is given a matrix."""
        casts = []
        for read, matrix, slot, at in zip(self.reads, matrices, beside.slots, beside.origins, strict=True):
            casts.append(Cast(read, matrix, slot, at, into if into is NOWHERE else read.into(into), beside.flag))
        return casts

    def numbers_agreed(self, value: Tensor) -> int:
        """How many numbers ranks agree on before these casts."""
        observed: list[Tensor | None] = []
        for read, matrix in zip(self.reads, self.matrices(value), strict=True):
            observed += [amax for amax, agreed in zip(read.observe(matrix), self.agreed, strict=True) if agreed]
        return numbers_in(observed)


def numbers_in(amaxes: Iterable[Tensor | None]) -> int:
    """How many there are; by identity, since one value may serve both orientations."""
    return sum({id(amax): amax.numel() for amax in amaxes if amax is not None}.values())


def cast_plan(
    style: ParallelStyle, recipe: Recipe, tensor: str, orientations: Orientations, rows: int, *,
    whole: bool = False, own_group: bool = False, group: ProcessGroup | None = None,
) -> CastPlan:  # fmt: skip
    """The plan of matrices of x, w, dy, y or dx with so many rows, in these orientations. `whole`, `own_group`: see `agrees`;
    `group`: the ranks that agree where they do, None for one alone."""
    quantizers = recipe.of(tensor)
    assert quantizers is not None, f"{recipe} has no quantizer for {tensor}"
    row, col = orientations
    by_row, by_col = quantizers.rowwise, quantizers.columnwise
    contracted = 1 if tensor == "w" else recipe.units[0]  # the rows of a weight fit already
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
    lazy = len(reads) == 1 and reads[0].rowwise is not None and caps_of(by_row).lazy and caps_of(by_col).lazy
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
    """Zeros appended up to multiples; the matrix itself where it fits."""
    below, right = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    return F.pad(stored(matrix), (0, right, 0, below)) if below or right else matrix


def cast(
    plan: CastPlan, orientations: Orientations, values: Sequence[Values], members: Sequence[str], beside: AskBeside, *,
    record: bool = True, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Values [rows, cols] of the plan's tensor, one of each member -> their operands, with one amax agreement for all.

    beside   says what casts take beside a matrix
    record   their amaxes count for delayed scales
    into     storage of `operand_shape` for the one operand there is, in the orientations that have some
    """
    row, col = orientations
    if not plan.reads:
        return [Operands(None, None)] * len(values)
    if plan.keeps:
        kept = []
        for value in values:
            x = stored(plan.matrices(value)[0] if plan.pads else value)
            kept.append(Operands(_kept(x) if row else None, _kept(x.t()) if col else None))
        return kept
    casts: list[Cast] = []
    for value, member in zip(values, members, strict=True):
        matrices = plan.matrices(value)
        casts += plan.casts(matrices, beside(plan, member, value.shape, value.device, record), into)
    made = make_casts(casts)
    if len(plan.reads) == 1 and not plan.derived:
        return list(starmap(Operands, made))
    if plan.derived:
        return [Operands(q if row else None, placed(q.transpose(), into[1]) if col else None) for q, _ in made if q]
    return [Operands(q, q_t) for (q, _), (_, q_t) in zip(made[::2], made[1::2], strict=True)]


def _kept(matrix: Tensor) -> QuantizedTensor:
    return QuantizedTensor(HP, (matrix,))


def make_casts(casts: Sequence[Cast], prepared: Prepared | None = None) -> list[Wanted]:
    """All ranks that agree call it with casts in the same order; returns their operands, `into` where that was given.
    `prepared`: the launches that make some of them."""
    grads = _gate_grads(casts) if prepared is None and len(casts) == 2 else None
    if grads is not None:
        quantizer: Any = casts[0].read.quantizer
        agreed = _agreed(casts, list(quantizer.observe_grads(grads)))
        both: list[Wanted] = quantizer.both_grads(
            grads, agreed, [cast.slot for cast in casts], [cast.flag for cast in casts]
        )
        return both
    for cast in casts:
        if prepared is not None or cast.read.agreed:
            break
    else:
        made = []
        for cast in casts:
            made.append(cast.make(cast.read.observe(cast.matrix)))
        return made
    amaxes = {} if prepared is None else prepared.observe()
    observed = [amaxes[i] if i in amaxes else cast.read.observe(cast.matrix) for i, cast in enumerate(casts)]
    agreed = _agreed(casts, observed)
    if prepared is not None:
        prepared.cast([pair for i in amaxes for pair in zip(observed[i], agreed[i], strict=True)])
    return [cast.into if i in amaxes else cast.make(agreed[i]) for i, cast in enumerate(casts)]


def _gate_grads(casts: Sequence[Cast]) -> ops.GatedGrads | None:
    """What two casts make their matrices of, where these are both gradients of a gate and one read makes all four operands."""
    first, second = casts
    mine, its, read = first.matrix, second.matrix, first.read
    if not (isinstance(mine, ops.GatedGrad) and isinstance(its, ops.GatedGrad) and mine.of_both(its)):
        return None
    alike = read is second.read and read.both is not None and read.rowwise == read.columnwise
    plain = first.into is NOWHERE and (first.flag is None or read.takes_flag)
    return mine.grads if alike and plain and caps_of(read.quantizer).gate_grads else None


def _agreed(casts: Sequence[Cast], observed: list[Amaxes]) -> list[Amaxes]:
    """What was observed; where a cast asks for it, the maximum over the first group, then over the second."""
    for turn in range(len(NOBODY)):
        by_group: dict[ProcessGroup, dict[int, Tensor]] = {}  # by identity: one value may serve both orientations
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
    """Launches that make casts: of each kind the places of the casts among all, and what observes and casts them."""

    places: list[list[int]]
    launches: list[ops.Launches]

    def observe(self) -> dict[int, Amaxes]:
        """What the casts observe, by place."""
        amaxes: dict[int, Amaxes] = {}
        for places, launches in zip(self.places, self.launches, strict=True):
            for launch in launches.observe:
                launch()
            amaxes |= zip(places, launches.amaxes, strict=True)
        return amaxes

    def cast(self, agreed: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """`agreed`: what was observed, where the launches read it, and what ranks have agreed on."""
        changed = {id(own): (own, new) for own, new in agreed if own is not None and new is not None and own is not new}
        if changed:
            owns, news = zip(*changed.values(), strict=True)
            torch._foreach_copy_(owns, news)
        for launch in (launch for launches in self.launches for launch in launches.cast):
            launch()


class CastBatch:
    """Makes casts that come again and again; keeps the launches that it has prepared for them."""

    def __init__(self) -> None:
        self._made_for: list[tuple[int, Quantizer, tuple[int, ...]]] = []
        self._prepared = Prepared([], [])

    @torch.no_grad()
    def make(self, casts: Sequence[Cast]) -> list[Wanted]:
        """`make_casts`, with as few launches as quantizers offer."""
        batched: dict[tuple[Quantizer, torch.dtype], list[int]] = {}
        for i, cast in enumerate(casts):
            quantizer = cast.batch()
            if quantizer is not None:
                batched.setdefault((quantizer, cast.matrix.dtype), []).append(i)
        made_for = [(i, q, casts[i].addresses()) for (q, _), places in batched.items() for i in places]
        if made_for != self._made_for:
            launches = [_launches(q, [casts[i] for i in places]) for (q, _), places in batched.items()]
            self._prepared, self._made_for = Prepared(list(batched.values()), launches), made_for
        return make_casts(casts, self._prepared)


def _launches(quantizer: Any, casts: Sequence[Cast]) -> ops.Launches:
    """`quantizer`: that of all of them, which has a `batch`."""
    matrices, into = [cast.matrix for cast in casts], [cast.into for cast in casts]
    made: ops.Launches = quantizer.batch(matrices, into, [cast.slot for cast in casts], [cast.flag for cast in casts])
    return made
