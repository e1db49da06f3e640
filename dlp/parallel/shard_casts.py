"""The step boundary of weights whose rows are spread over ranks: all casts, with one agreement on their amaxes.

round      this rank's rows of every weight, to the dtype they would be gathered in
observe    what each cast needs to know of the rows
agree      one MAX all-reduce over dp_shard for all that spans rows; one more for each group with a wider say
cast       into codes and scales, from which gathers are served until the next boundary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.parallel.operands import must_agree
from dlp.parallel.shards import ShardedWeight
from dlp.parallel.spec import LinearSpec
from dlp.parallel.ways import Way
from dlp.quant.quantizer import slot_options


class _Job(NamedTuple):
    """One cast of this rank's rows, or of their transpose."""

    weight: ShardedWeight
    way: Way
    matrix: Tensor

    @property
    def spec(self) -> LinearSpec:
        return self.weight.core.spec


@torch.no_grad()
def cast_shards(weights: Sequence[ShardedWeight]) -> None:
    """Cast the rows of these weights; all ranks call it together. One all-reduce over dp_shard agrees on every amax
    that spans rows, and one more for each group that has a wider say (see `dlp.parallel.operands`)."""
    rows = {weight: weight.rows(weight.layout.from_master) for weight in weights if weight.casts}
    jobs = [
        _Job(weight, way, rows[weight].t() if way.flipped else rows[weight]) for weight in rows for way in weight.casts
    ]
    amaxes = [job.way.quantizer.observe(job.matrix) for job in jobs]
    _agree_over([job.weight.layout.group if job.way.spans_rows else None for job in jobs], amaxes)
    _agree_over([_wider_group(job) for job in jobs], amaxes)
    staged = []
    for job, amax in zip(jobs, amaxes, strict=True):
        more: dict[str, Any] = {}
        if slot_options(job.way.quantizer) is not None:
            more["slot"] = job.spec.runtime.slot(job.spec, "w", job.weight.name, job.way.columnwise, True)
            staged.append((None if _covers(job) else job.weight.layout.group, more["slot"].staging))
        job.weight.mine[job.way] = job.way.quantizer.cast(job.matrix, amax, **more)
    _share_staged(staged)
    for weight in weights:
        weight.fresh = True


def _agree_over(groups: Sequence[ProcessGroup | None], amaxes: list[Any]) -> None:
    """Replace each amax that has a group by the maximum over it; one all-reduce a group."""
    for group in dict.fromkeys(group for group in groups if group is not None):
        chosen = [i for i, its in enumerate(groups) if its is group and amaxes[i] is not None]
        for i, amax in zip(chosen, agree([amaxes[i] for i in chosen], group), strict=True):
            amaxes[i] = amax


def _wider_group(job: _Job) -> ProcessGroup | None:
    if not must_agree(job.spec, "w", job.way.quantizer, job.way.flipped):
        return None
    return job.spec.amax_group or job.spec.tp_group


def _covers(job: _Job) -> bool:
    """Whether the ranks that share delayed scales include those that share this weight."""
    group = job.spec.runtime.amax_group
    if group is None or not job.spec.recipe.reduce_amax:
        return False
    sharing, keeping = (set(dist.get_process_group_ranks(g)) for g in (group, job.weight.layout.group))
    return keeping <= sharing


def _share_staged(staged: Sequence[tuple[ProcessGroup | None, Tensor]]) -> None:
    """Where the update of delayed scales does not: agree on the amaxes of shards that were just cast."""
    agreed: list[Any] = [staging for _, staging in staged]
    _agree_over([group for group, _ in staged], agreed)
    for (group, staging), value in zip(staged, agreed, strict=True):
        if group is not None:
            staging.copy_(value)
