"""From matrices to quantized operands: observe, agree once, cast.

This is the one place where a recipe meets a parallel style: quantizers say which dimensions a scale spans, the style
says which dimension tp cuts and what travels, and a scale is agreed over tp iff the dimension it spans is cut in an
operand that is gathered. A matrix that a format cannot hold is zero-padded first, alike in both operands of a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dlp.comm.amax import agree
from dlp.parallel.spec import LinearSpec
from dlp.quant.quantizer import Origin, Quantizer, needs_origin, one_read, slot_options
from dlp.quant.recipe import OPERANDS, Operand
from dlp.quant.tensor import QuantizedTensor


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
    """One cast: a matrix with its contraction last, whether its rows are the columns of the stored tensor, how many
    rows it had before zeros were appended, and whether the operand of its transpose is made with it."""

    quantizer: Quantizer
    matrix: Tensor
    flipped: bool
    rows: int
    member: str
    both: bool = False


def quantize(
    spec: LinearSpec, tensor: str, values: Sequence[Tensor], *, row: bool, col: bool,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False,
) -> list[Pair]:  # fmt: skip
    """Values [rows, cols] of x, w, dy, y or dx -> their operands, with one amax agreement for all.

    row, col   the orientations needed, made in one read where their quantizer offers it; elsewhere a columnwise operand
               that can be derived is left to `Pair.columnwise`
    members    whose values they are, where not every member has some
    record     their amaxes count for delayed scales
    whole      x or dy has been gathered: no rank has a part of it
    """
    quantizers = spec.quantizers(tensor)
    assert quantizers is not None, f"{spec.name} has no quantizer for {tensor}"
    offered, tokens = _offers_one_read(quantizers), 1 if tensor == "w" else spec.units[0]
    derived = not offered and (tensor not in OPERANDS or spec.derived(tensor, len(values[0])))
    together = offered and row and col and len(values[0]) % tokens == 0
    need_row, need_col = row or (col and derived), col and not derived and not together
    jobs = []
    for value, member in zip(values, members or spec.owners(tensor), strict=True):
        padded = _pad(value, *_units(spec, tensor))
        jobs += [_Job(quantizers.rowwise, padded, False, value.shape[0], member, together)] * need_row
        jobs += [_Job(quantizers.columnwise, _pad(padded, tokens, 1).t(), True, value.shape[1], member)] * need_col
    amaxes = _agreed(spec, tensor, jobs, whole)
    made = iter([_cast(spec, tensor, job, amax, record, whole) for job, amax in zip(jobs, amaxes, strict=True)])
    if together:
        return [Pair(*next(made)) for _ in values]
    return [Pair(next(made)[0] if need_row else None, next(made)[0] if need_col else None) for _ in values]


def _offers_one_read(quantizers: Operand) -> bool:
    """Whether both orientations can come from one read."""
    return quantizers.rowwise == quantizers.columnwise and one_read(quantizers.rowwise) is not None


def _units(spec: LinearSpec, tensor: str) -> tuple[int, int]:
    """What the features of a stored operand are padded to multiples of; its tokens are where they are contracted."""
    _, n, k = spec.units
    return {"x": (1, k), "w": (n, k), "dy": (1, n)}.get(tensor, (1, 1))


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros appended up to multiples; the matrix itself where it fits."""
    below, right = (-size % unit for size, unit in zip(matrix.shape, (rows, columns), strict=True))
    return F.pad(matrix, (0, right, 0, below)) if below or right else matrix


def _cast(
    spec: LinearSpec, tensor: str, job: _Job, amax: Tensor | None, record: bool, whole: bool
) -> tuple[QuantizedTensor, ...]:  # fmt: skip
    """One cast, with what its quantizer asks for beside an amax -> the operand of its matrix, or of both ways."""
    more: dict[str, Any] = {}
    if slot_options(job.quantizer) is not None:
        more["slot"] = spec.runtime.slot(spec, tensor, job.member, job.flipped, record)
    if needs_origin(job.quantizer):
        more["at"] = _origin(spec, tensor, job, whole)
    both = one_read(job.quantizer) if job.both else None
    return both(job.matrix, amax, **more) if both else (job.quantizer.cast(job.matrix, amax, **more),)


@cache
def _tensor_id(name: str) -> int:
    """32 bits that are the same for this name everywhere and always."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(spec: LinearSpec, tensor: str, job: _Job, whole: bool) -> Origin:
    """Where this rank's matrix lies in the unsharded one, over tp and, along the tokens, over data-parallel ranks."""
    runtime, cut = spec.runtime, None if whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
        index, count = (spec.tp_group.rank(), spec.tp) if cut == dim and spec.tp > 1 else (0, 1)
        if dim == 0 and tensor != "w":
            index, count = index + runtime.dp[0] * count, count * runtime.dp[1]
        return index * size, count * size

    row, rows = span(int(job.flipped), job.rows)
    column, columns = span(1 - int(job.flipped), job.matrix.shape[1])
    name = f"{job.member}.{tensor}"
    return Origin(row, column, rows, columns, runtime.seed, _tensor_id(name), runtime.counter, int(job.flipped))


def _agreed(spec: LinearSpec, tensor: str, jobs: Sequence[_Job], whole: bool) -> list[Tensor | None]:
    """What each job observed; where the style asks for it, the maximum over the group."""
    amaxes = [job.quantizer.observe(job.matrix) for job in jobs]
    shared = {
        i: amax for i, amax in enumerate(amaxes) if amax is not None and _must_agree(spec, tensor, jobs[i], whole)
    }
    if shared:
        group = spec.amax_group or spec.tp_group
        for i, amax in zip(shared, agree(list(shared.values()), group), strict=True):
            amaxes[i] = amax
    return amaxes


def _must_agree(spec: LinearSpec, tensor: str, job: _Job, whole: bool) -> bool:
    """The rule of this module; a user's amax group makes every scale an agreed one, `amax_scope="all"` every cut one."""
    if spec.amax_group is not None:
        return True
    cut = spec.style.cut(tensor)
    if spec.group is None or cut is None or whole:
        return False
    spans_the_cut = (1 - cut if job.flipped else cut) in job.quantizer.reduces
    return spans_the_cut and (spec.style.gathers == tensor or spec.recipe.amax_scope == "all")


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
