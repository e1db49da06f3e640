"""The step boundary of weights whose rows are spread over ranks: what each rank casts of them, and who agrees.

What a cast observes of the rows here is agreed over dp_shard where it spans the rows of other ranks, then over a group
that has a wider say. Gathers are served from the casts until the next boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.parallel.linear.operands import must_agree
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.casts import NOBODY, Cast, Groups
from dlp.parallel.weight.sharded import ShardedWeight
from dlp.parallel.weight.values import Values
from dlp.parallel.weight.ways import Way
from dlp.quant.quantizer import ScaleSlot, caps_of


def casts_of(weight: ShardedWeight, values: Values) -> list[Cast]:
    """The casts of this rank's rows, in the order of `weight.reads`."""
    layout, bound = weight.layout, weight.core.bound
    rows = layout.shard().detach()
    dtype = rows.dtype if layout.from_master else layout.dtype
    matrix = values.of(weight.name, rows, dtype, (rows.shape[0], rows.shape[1]))
    made = []
    for ways in weight.reads:
        row, col = (None if way is None else way.quantizer for way in ways)
        out, out_t = (None if way is None else weight.mine.get(way) for way in ways)
        groups = _groups(weight, ways[0]), _groups(weight, ways[1])
        slot, flag = _slot(weight, ways[0] or ways[1]), bound.session.flag(bound, "w", weight.name, matrix.device)
        made.append(Cast(matrix, row, col, groups, slot, (), (out, out_t), flag))
    return made


def _groups(weight: ShardedWeight, way: Way | None) -> Groups:
    """Who agrees on what one way observes."""
    if way is None:
        return NOBODY
    spec = weight.core.spec
    wider = must_agree(spec, "w", way.quantizer, way.flipped)
    return weight.layout.group if way.spans_rows else None, (spec.amax_group or spec.tp_group) if wider else None


def _slot(weight: ShardedWeight, way: Way | None) -> ScaleSlot | None:
    """The delayed scale of a way that has one."""
    if way is None or caps_of(way.quantizer).slot is None:
        return None
    bound = weight.core.bound
    return bound.session.slot(bound, "w", weight.name, way.columnwise, True)


def share_staged(weights: Sequence[ShardedWeight]) -> None:
    """After the casts: agree on the amaxes of shards that delayed scaling recorded, where its update will not."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for weight in weights:
        slots = [slot for row, col in weight.reads if (slot := _slot(weight, row or col)) is not None]
        if slots and not _covers(weight.core.bound, weight.layout.group):
            by_group.setdefault(weight.layout.group, []).extend(slot.staging for slot in slots)
    for group, staged in by_group.items():
        torch._foreach_copy_(staged, agree(staged, group))


def _covers(bound: BoundSpec, group: ProcessGroup) -> bool:
    """Whether the ranks that share delayed scales include those that share a weight."""
    runtime = bound.session
    if runtime.amax_group is None or not bound.spec.recipe.reduce_amax:
        return False
    sharing, keeping = (set(dist.get_process_group_ranks(g)) for g in (runtime.amax_group, group))
    return keeping <= sharing
