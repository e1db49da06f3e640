"""From matrices to quantized operands: observe, agree once, cast.

This is the one place where a recipe meets a parallel style: quantizers say which dimensions a scale spans, the style
says which dimension tp cuts and what travels, and a scale is agreed over tp iff the dimension it spans is cut in an
operand that is gathered. A matrix that a format cannot hold is zero-padded first, alike in both operands of a GEMM.
One that a cast can make on its way (`ops.Produced`) is handed to it, where one cast is all there is; else it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dlp.comm.amax import agree
from dlp.kernels.ops import Produced, stored
from dlp.parallel import fit
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, remembered
from dlp.parallel.style import ParallelStyle
from dlp.parallel.weight.casts import NOBODY, Cast
from dlp.quant.quantizer import OneRead, Origin, Quantizer, caps_of, flagged, one_read
from dlp.quant.recipe import OPERANDS, Operand, Recipe
from dlp.quant.tensor import QuantizedTensor

Amaxes = tuple[Tensor | None, ...]  # an amax for each operand that a cast makes
Values = Tensor | Produced
NONE = (None, None)


class Pair(NamedTuple):
    """The two orientations of one operand. `col` None: not needed, or derived by transposing `row`."""

    row: QuantizedTensor | None
    col: QuantizedTensor | None

    def rowwise(self) -> QuantizedTensor:
        assert self.row is not None, "the rowwise operand was not asked for"
        return self.row

    def columnwise(self) -> QuantizedTensor:
        return self.col if self.col is not None else self.rowwise().transpose()


class _Job(NamedTuple):
    """One cast: a matrix with its contraction last, whether its rows are the columns of the stored tensor, the shape of
    that tensor before zeros were appended, and what to write into: an operand, or both where both are made."""

    quantizer: Quantizer
    matrix: Any  # Values
    flipped: bool
    shape: Sequence[int]
    member: str
    into: tuple[QuantizedTensor | None, ...]


def quantize(
    bound: BoundSpec, tensor: str, values: Sequence[Values], *, row: bool, col: bool,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False, into: Pair | None = None,
) -> list[Pair]:  # fmt: skip
    """Values [rows, cols] of x, w, dy, y or dx -> their operands, with one amax agreement for all.

    row, col   the orientations needed, made in one read where their quantizer offers it; elsewhere a columnwise operand
               that can be derived is left to `Pair.columnwise`
    members    whose values they are, where not every member has some
    record     their amaxes count for delayed scales
    whole      x or dy has been gathered: no rank has a part of it
    into       storage of `operand_shape` for the one operand there is, in the orientations that have some
    """
    way = _way(bound, tensor, row, col, whole, values[0].shape[0])
    owners = members or bound.spec.owners(tensor)
    if not way.makes:
        values = [stored(value) for value in values]
    if way.plain and way.both is not None and into is None:
        matrices = [_pad(value, way.units[0], way.units[1]) for value in values]
        flags = [_flag(bound, way, tensor, member, matrix) for matrix, member in zip(matrices, owners, strict=True)]
        return [
            Pair(*way.both.cast(x, way.both.observe(x), **flagged(way.quantizers.rowwise, x, flag)))
            for x, flag in zip(matrices, flags, strict=True)
        ]
    jobs = [
        job
        for value, member in zip(values, owners, strict=True)
        for job in _jobs(way, value, member, into or Pair(None, None))
    ]
    amaxes = _agreed(bound, way, jobs)
    made = [_cast(bound, tensor, way, job, amax, record, whole) for job, amax in zip(jobs, amaxes, strict=True)]
    if way.together:
        return [Pair(*both) for both in made]
    found = iter(made)
    return [Pair(next(found)[0] if way.row else None, next(found)[0] if way.col else None) for _ in values]


class _Way(NamedTuple):
    """How the matrices of one tensor are cast: `together` both orientations from one read, else those of `row` and `col`
    that are needed. What is padded to what, who must agree, and what casts ask for (by orientation: row, col). `plain`:
    both come from one read, and nothing is asked for but what that observes. `makes`: the cast takes a `Produced`. `casts`:
    not all is kept as it is."""

    quantizers: Operand
    together: bool
    row: bool
    col: bool
    units: tuple[int, int]
    tokens: int
    agree: tuple[bool, bool]
    slot: tuple[bool, bool]
    origin: tuple[bool, bool]
    both: OneRead | None
    plain: bool
    makes: bool
    casts: bool


@remembered
def _way(bound: BoundSpec, tensor: str, row: bool, col: bool, whole: bool, lines: int) -> _Way:
    """`lines`: the rows of the matrices, of which there are as many as tokens in x and dy."""
    spec, quantizers = bound.spec, bound.quantizers(tensor)
    assert quantizers is not None, f"{spec.name} has no quantizer for {tensor}"
    need_row, need_col, together = casts(spec.recipe, tensor, lines, row, col)
    ways = quantizers.rowwise, quantizers.columnwise
    agree = must_agree(spec, tensor, ways[0], False, whole), must_agree(spec, tensor, ways[1], True, whole)
    caps = caps_of(ways[0]), caps_of(ways[1])
    slot, origin = (caps[0].slot is not None, caps[1].slot is not None), (caps[0].origin, caps[1].origin)
    asks = any((*agree, *slot, *origin))
    return _Way(
        quantizers, together, need_row, need_col, _units(spec.recipe, tensor), _tokens_unit(spec.recipe, tensor), agree,
        slot, origin, one_read(*ways) if together else None, together and not asks,
        makes(spec.recipe, tensor, lines, row, col), not all(each.format.keeps_source for each in ways),
    )  # fmt: skip


def _jobs(way: _Way, value: Values, member: str, into: Pair) -> Iterator[_Job]:
    """The casts of one matrix."""
    padded = _pad(value, way.units[0], way.units[1])
    if way.row:
        outs = tuple(into) if way.together else (into.row,)
        yield _Job(way.quantizers.rowwise, padded, False, value.shape, member, outs)
    if way.col:
        matrix = stored(_pad(padded, way.tokens, 1)).t()
        yield _Job(way.quantizers.columnwise, matrix, True, value.shape, member, (into.col,))


def weight_casts(
    bound: BoundSpec, weights: Sequence[Tensor], values: Sequence[Tensor], into: Sequence[Pair | None]
) -> list[Cast]:
    """What `quantize(bound, "w", weights, row=True, col=True)` casts and agrees on, to be done together with the casts of
    other layers. `values`: the weights, padded to their `operand_shape`; `into`: the operands of those that have some."""
    way = _way(bound, "w", True, True, False, values[0].shape[0])
    reads = [(True, True)] if way.together else [(True, False)] * way.row + [(False, True)] * way.col
    return [
        _weight_cast(bound, way, wanted, _Job(way.quantizers.rowwise, value, False, weight.shape, member, ()), pair)
        for weight, value, member, pair in zip(weights, values, bound.spec.members, into, strict=True)
        for wanted in reads
    ]


def _weight_cast(bound: BoundSpec, way: _Way, wanted: tuple[bool, bool], job: _Job, into: Pair | None) -> Cast:
    """One read of a weight, for its rowwise and its columnwise operand as far as they are `wanted`."""
    first, quantizers = not wanted[0], (way.quantizers.rowwise, way.quantizers.columnwise)
    row, col = (quantizer if asked else None for quantizer, asked in zip(quantizers, wanted, strict=True))
    shared = (None, bound.spec.amax_group or bound.spec.group)
    groups = [shared if asked and agreed else NOBODY for asked, agreed in zip(wanted, way.agree, strict=True)]
    slot = bound.session.slot(bound, "w", job.member, first, True) if way.slot[first] else None
    flips = [flipped for flipped in (False, True) if wanted[flipped]] if way.origin[first] else []
    origins = tuple(_origin(bound, "w", job, flipped, False) for flipped in flips)
    flag = _flag(bound, way, "w", job.member, job.matrix)
    kept = [
        q if asked and q and not q.format.keeps_source else None for asked, q in zip(wanted, into or NONE, strict=True)
    ]
    return Cast(job.matrix, row, col, (groups[0], groups[1]), slot, origins, (kept[0], kept[1]), flag)


def operand_shape(recipe: Recipe, tensor: str, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """[rows, contraction] of an operand of values [tokens, features] of x or dy, or [N, K] of w, padded as `quantize`
    pads it."""
    rows, columns = (size + -size % unit for size, unit in zip(shape, _units(recipe, tensor), strict=True))
    return (columns, rows + -rows % fit.units(recipe)[0]) if columnwise else (rows, columns)


def casts(recipe: Recipe, tensor: str, rows: int, row: bool, col: bool) -> tuple[bool, bool, bool]:
    """Which casts make the orientations `row` and `col` of a tensor with so many rows: a rowwise one, a columnwise one,
    and whether one read makes both, which then is the rowwise one."""
    quantizers = fit.quantizers(recipe, tensor)
    assert quantizers is not None
    offered = one_read(quantizers.rowwise, quantizers.columnwise) is not None
    derived = not offered and (tensor not in OPERANDS or fit.derived(recipe, tensor, rows))
    together = offered and row and col and rows % _tokens_unit(recipe, tensor) == 0
    return together or row or (col and derived), col and not derived and not together, together


def makes(recipe: Recipe, tensor: str, rows: int, row: bool, col: bool) -> bool:
    """Whether these orientations of a tensor come from one cast, that may be given a `Produced`."""
    quantizers = fit.quantizers(recipe, tensor)
    assert quantizers is not None
    _, need_col, _ = casts(recipe, tensor, rows, row, col)
    return not need_col and caps_of(quantizers.rowwise).lazy and caps_of(quantizers.columnwise).lazy


def observed_by_casts(
    recipe: Recipe, tensor: str, value: Tensor, row: bool, col: bool
) -> list[tuple[bool, Tensor | None]]:
    """What the casts of these orientations of a tensor observe, and whether of its transpose; one tensor may serve both."""
    quantizers = fit.quantizers(recipe, tensor)
    assert quantizers is not None
    need_row, need_col, together = casts(recipe, tensor, len(value), row, col)
    rowwise, columnwise = matrices(recipe, tensor, value)
    both = one_read(quantizers.rowwise, quantizers.columnwise) if together else None
    if both is not None:
        return list(zip((False, True), both.observe(rowwise), strict=True))
    ways = ((False, quantizers.rowwise, rowwise, need_row), (True, quantizers.columnwise, columnwise, need_col))
    return [(flipped, quantizer.observe(matrix)) for flipped, quantizer, matrix, needed in ways if needed]


def matrices(recipe: Recipe, tensor: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """What a stored tensor's quantizers are given for its two orientations: padded where its formats need it."""
    padded = _pad(value, *_units(recipe, tensor))
    return padded, _pad(padded, _tokens_unit(recipe, tensor), 1).t()


def _tokens_unit(recipe: Recipe, tensor: str) -> int:
    """What rows are padded to where they are contracted; a weight's fit already."""
    return 1 if tensor == "w" else fit.units(recipe)[0]


def _units(recipe: Recipe, tensor: str) -> tuple[int, int]:
    """What the features of a stored operand are padded to multiples of; its tokens are where they are contracted."""
    _, n, k = fit.units(recipe)
    return {"x": (1, k), "w": (n, k), "dy": (1, n)}.get(tensor, (1, 1))


def _pad(matrix: Values, rows: int, columns: int) -> Any:
    """Zeros appended up to multiples; the matrix itself where it fits."""
    if rows == columns == 1:
        return matrix
    below, right = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    return F.pad(stored(matrix), (0, right, 0, below)) if below or right else matrix


def _cast(
    bound: BoundSpec, tensor: str, way: _Way, job: _Job, amaxes: Amaxes, record: bool, whole: bool
) -> tuple[QuantizedTensor, ...]:  # fmt: skip
    """One cast, with what its quantizer asks for beside an amax -> the operand of its matrix, or of both ways."""
    more: dict[str, Any] = flagged(job.quantizer, job.matrix, _flag(bound, way, tensor, job.member, job.matrix))
    if way.slot[job.flipped]:
        more["slot"] = bound.session.slot(bound, tensor, job.member, job.flipped, record)
    if way.origin[job.flipped]:
        origins = tuple(_origin(bound, tensor, job, flipped, whole) for flipped in _ways(way, job))
        more["at"] = origins if way.both else origins[0]
    given = all(out is not None for out in job.into)
    if way.both:
        outs: Any = job.into if given else None
        made: tuple[QuantizedTensor, ...] = way.both.cast(job.matrix, (amaxes[0], amaxes[1]), outs=outs, **more)
    else:
        more |= {"out": job.into[0]} if given else {}
        made = (job.quantizer.cast(job.matrix, amaxes[0], **more),)
    return tuple(_placed(operand, out) for operand, out in zip(made, job.into, strict=True))


def _flag(bound: BoundSpec, way: _Way, tensor: str, member: str, matrix: Values) -> Tensor | None:
    """Where a cast tells that a value was not finite; None where nothing is cast."""
    if not way.casts:
        return None
    return bound.session.flag(bound, tensor, member, matrix.device)


def _ways(way: _Way, job: _Job) -> tuple[bool, ...]:
    """Of each operand that a job makes: whether it is of the transpose of the stored tensor."""
    return (False, True) if way.both else (job.flipped,)


def _placed(made: QuantizedTensor, out: QuantizedTensor | None) -> QuantizedTensor:
    """The operand in `out`: copied there by a quantizer that did not write into it."""
    return made if out is None or made is out else made.format.fill(out, *made.parts)


@cache
def _tensor_id(name: str) -> int:
    """32 bits that are the same for this name everywhere and always."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(bound: BoundSpec, tensor: str, job: _Job, flipped: bool, whole: bool) -> Origin:
    """Where this rank's matrix lies in the unsharded one, over tp and, along the tokens, over data-parallel ranks;
    `flipped`: its transpose in the transposed one."""
    spec, runtime = bound.spec, bound.session
    cut = None if whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
        index, count = (spec.tp_group.rank(), spec.tp) if cut == dim and spec.tp > 1 else (0, 1)
        if dim == 0 and tensor != "w":
            index, count = index + runtime.dp[0] * count, count * runtime.dp[1]
        return index * size, count * size

    row, rows = span(int(flipped), job.shape[int(flipped)])
    column, columns = span(1 - int(flipped), job.matrix.shape[int(flipped == job.flipped)])
    name = f"{job.member}.{tensor}"
    return Origin(row, column, rows, columns, runtime.seed, _tensor_id(name), runtime.counter, int(flipped))


def _observe(way: _Way, job: _Job) -> Amaxes:
    """What one job observes for each operand that it makes."""
    return way.both.observe(job.matrix) if way.both else (job.quantizer.observe(job.matrix),)


def _agreed(bound: BoundSpec, way: _Way, jobs: Sequence[_Job]) -> list[Amaxes]:
    """What each job observed; where the style asks for it, the maximum over the group."""
    observed = [_observe(way, job) for job in jobs]
    if not any(way.agree):
        return observed
    shared = {  # by identity: one value may serve both operands of a job
        id(amax): amax
        for job, amaxes in zip(jobs, observed, strict=True)
        for flipped, amax in zip(_ways(way, job), amaxes, strict=True)
        if amax is not None and way.agree[flipped]
    }
    if not shared:
        return observed
    agreed = dict(zip(shared, agree(list(shared.values()), bound.spec.amax_group or bound.spec.tp_group), strict=True))
    return [tuple(agreed.get(id(amax), amax) for amax in amaxes) for amaxes in observed]


def must_agree(spec: LinearSpec, tensor: str, quantizer: Quantizer, flipped: bool, whole: bool = False) -> bool:
    """A user's amax group makes every scale an agreed one; else `agrees` says, for a tensor that is not `whole`."""
    if spec.amax_group is not None:
        return True
    return spec.group is not None and not whole and agrees(spec.style, spec.recipe, tensor, quantizer, flipped)


def agrees(style: ParallelStyle, recipe: Recipe, tensor: str, quantizer: Quantizer, flipped: bool) -> bool:
    """The rule of this module: tp cuts the dimension that a scale spans, in an operand that is gathered, or, with
    `amax_scope="all"`, in any. `flipped`: the quantizer is given the transposed tensor."""
    cut = style.cut(tensor)
    if cut is None:
        return False
    spans_the_cut = (1 - cut if flipped else cut) in quantizer.reduces
    return spans_the_cut and (style.gathers == tensor or recipe.amax_scope == "all")


def weights_agree(spec: LinearSpec) -> bool:
    """Whether other ranks may have a say in the scales of this rank's weights."""
    return spec.amax_group is not None or (spec.group is not None and spec.recipe.amax_scope == "all")


def flatten(pairs: Sequence[Pair]) -> list[Tensor]:
    """The parts of both orientations of each operand, rowwise first."""
    return [part for pair in pairs for q in (pair.rowwise(), pair.columnwise()) for part in q.parts]


def unflatten(quantizers: Operand, parts: Sequence[Tensor], count: int) -> list[Pair]:
    """The inverse of `flatten` for `count` operands of these quantizers."""
    row, col = quantizers.rowwise.format, quantizers.columnwise.format
    size = len(row.parts) + len(col.parts)
    starts = range(0, count * size, size)
    return [Pair(row.wrap(parts[i:]), col.wrap(parts[i + len(row.parts) :])) for i in starts]
