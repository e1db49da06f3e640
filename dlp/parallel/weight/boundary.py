"""The casts of a step boundary: all weights of a model, whole ones in both orientations, and of those that FSDP shards this
rank's rows, as they travel. They are rounded together (`Values`), then observed, agreed on and cast in one `CastBatch`.

What a cast observes of rows whose weight lies on several ranks is agreed over dp_shard where it spans the rows of others,
then over a group that has a wider say. Gathers are served from the casts until the next boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.parallel.casts import NOBODY, Cast, CastBatch, Groups, Read, agrees
from dlp.parallel.linear.modules import LinearCore
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.model.runtime import Runtime
from dlp.parallel.weight.sharded import ShardedWeight
from dlp.parallel.weight.values import Values
from dlp.parallel.weight.ways import Way
from dlp.quant.quantizer import ScaleSlot, caps_of


class WeightBatch:
    """What one model keeps for this from step to step."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


@torch.inference_mode(False)  # later boundaries write into what this one has made
@torch.no_grad()
def refresh(runtime: Runtime, cores: Sequence[LinearCore], shards: Sequence[ShardedWeight]) -> None:
    """Cast the weights of these layers, and these shards; all ranks call it together."""
    runtime.weight_batch = batch = runtime.weight_batch or WeightBatch()
    whole = [(core, casts) for core in cores if (casts := core.casts(batch.values))]
    sharded = [(weight, casts_of(weight, batch.values)) for weight in shards if weight.reads]
    batch.values.renew()
    made = iter(batch.casts.make([cast for _, casts in (*whole, *sharded) for cast in casts]))
    for core, casts in whole:
        core.cast_weights.take([next(made) for _ in casts], len(core.members))
    for weight, casts in sharded:
        weight.take([next(made) for _ in casts])
    share_staged([weight for weight, _ in sharded])
    for weight in shards:
        weight.fresh = True
    runtime.watch.cast([core for core, _ in whole] + list(dict.fromkeys(weight.core for weight, _ in sharded)))


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
        read = Read(row, col, (_groups(weight, ways[0]), _groups(weight, ways[1])))
        slot, flag = _slot(weight, ways[0] or ways[1]), bound.session.flag(bound, "w", weight.name, matrix.device)
        made.append(Cast(read, matrix, slot, (), (out, out_t), flag))
    return made


def _groups(weight: ShardedWeight, way: Way | None) -> Groups:
    """Who agrees on what one way observes."""
    if way is None:
        return NOBODY
    spec = weight.core.spec
    own_group = spec.amax_group is not None
    wider = agrees(spec.style, spec.recipe, "w", way.quantizer, way.flipped, own_group=own_group)
    return weight.layout.group if way.spans_rows else None, (spec.amax_group or spec.group) if wider else None


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
