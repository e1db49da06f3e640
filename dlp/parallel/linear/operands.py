"""The operands of a layer: its plans of casts, with what they read of its model: delayed scales, origins, flags.

`dlp.parallel.casts` says how a tensor is cast and makes the casts; a matrix that a cast can make on its way (`ops.Produced`) is
handed to it, where one cast is all there is, and stored first elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from hashlib import sha256

import torch
from torch import Tensor

from dlp.parallel.casts import BOTH, NOWHERE, Beside, Cast, CastPlan, Operands, Orientations, Values, cast, cast_plan
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, remembered
from dlp.quant.quantizer import Origin, ScaleSlot, Wanted
from dlp.quant.recipe import Operand


def quantize(
    bound: BoundSpec, tensor: str, values: Sequence[Values], orientations: Orientations, *,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Values [rows, cols] of x, w, dy, y or dx -> their operands, with one amax agreement for all.

    members    whose values they are, where not every member has some
    record     their amaxes count for delayed scales
    whole      x or dy has been gathered: no rank has a part of it
    into       storage of `operand_shape` for the one operand there is, in the orientations that have some
    """
    plan = _plan(bound, tensor, orientations, whole, values[0].shape[0])
    owners = members or bound.spec.owners(tensor)
    return cast(plan, orientations, values, owners, partial(beside, bound), record=record, into=into)


@remembered
def _plan(bound: BoundSpec, tensor: str, orientations: Orientations, whole: bool, rows: int) -> CastPlan:
    """`rows`: of the matrices, as many as tokens in x and dy."""
    spec = bound.spec
    group = spec.amax_group or spec.group
    return cast_plan(
        spec.style, spec.recipe, tensor, orientations, rows, whole=whole, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def beside(
    bound: BoundSpec, plan: CastPlan, member: str, shape: Sequence[int], padded: Sequence[Sequence[int]],
    device: torch.device, record: bool,
) -> Beside:  # fmt: skip
    """What the casts of one matrix of this shape read and write of the layer's model. `padded`: the shapes of what each read is
    given, with zeros appended, where it draws."""
    session, tensor, bare = bound.session, plan.tensor, plan.bare
    flag = session.flag(bound.spec.members, tensor, member, device) if plan.quantizes else None
    if bare is not None:
        return Beside(flag, bare.slots, bare.origins)
    slots: list[ScaleSlot | None] = []
    origins: list[tuple[Origin, ...]] = []
    for i, read in enumerate(plan.reads):
        slots.append(
            session.slot(bound.slot_name(tensor, member, read.rowwise is None), record) if read.has_slot else None
        )
        origins.append(tuple([_origin(bound, plan, member, shape, padded[i], each) for each in read.origins]))
    return Beside(flag, slots, origins)


def weight_casts(bound: BoundSpec, member: str, weight: Tensor, value: Tensor, into: Wanted = NOWHERE) -> list[Cast]:
    """What `quantize(bound, "w", [weight], BOTH)` casts and agrees on, to be made with the casts of other layers. `value`: the
    weight, padded to its `operand_shape`."""
    plan = _plan(bound, "w", BOTH, False, value.shape[0])
    matrices = [value] * len(plan.reads)
    its = beside(bound, plan, member, weight.shape, [value.shape] * len(matrices), value.device, True)
    return plan.casts(matrices, its, into)


@cache
def _tensor_id(name: str) -> int:
    """32 bits that are the same for this name everywhere and always."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(
    bound: BoundSpec, plan: CastPlan, member: str, shape: Sequence[int], padded: Sequence[int], columnwise: bool
) -> Origin:
    """Where this rank's matrix lies in the unsharded one, over tp and, along the tokens, over data-parallel ranks;
    `columnwise`: its transpose in the transposed one."""
    spec, session, tensor = bound.spec, bound.session, plan.tensor
    cut = None if plan.whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
        index, count = (spec.tp_group.rank(), spec.tp) if cut == dim and spec.tp > 1 else (0, 1)
        if dim == 0 and tensor != "w":
            index, count = index + session.dp[0] * count, count * session.dp[1]
        return index * size, count * size

    row_dim, column_dim = int(columnwise), 1 - int(columnwise)
    row, rows = span(row_dim, shape[row_dim])
    column, columns = span(column_dim, padded[column_dim])
    name = f"{member}.{tensor}"
    return Origin(row, column, rows, columns, session.seed, _tensor_id(name), session.counter, row_dim)


def weights_agree(spec: LinearSpec) -> bool:
    """Whether other ranks may have a say in the scales of this rank's weights."""
    return spec.amax_group is not None or (spec.group is not None and spec.recipe.amax_scope == "all")


def flatten(operands: Sequence[Operands]) -> list[Tensor]:
    """The parts of both orientations of each operand, rowwise first."""
    return [part for both in operands for columnwise in (False, True) for part in both.at(columnwise).parts]


def unflatten(quantizers: Operand, parts: Sequence[Tensor], count: int) -> list[Operands]:
    """The inverse of `flatten` for `count` operands of these quantizers."""
    row, col = quantizers.rowwise.format, quantizers.columnwise.format
    size = len(row.parts) + len(col.parts)
    starts = range(0, count * size, size)
    return [Operands(row.wrap(parts[i:]), col.wrap(parts[i + len(row.parts) :])) for i in starts]
