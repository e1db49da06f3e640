"""All weights of a model cast at the step boundary: whole ones, in both orientations, and this rank's rows of those that
FSDP shards, as they travel. They are rounded together, observed, agreed on and cast together (`casts_together`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlp.parallel.linear.modules import LinearCore
from dlp.parallel.model.runtime import Runtime
from dlp.parallel.weight.casts import CastsTogether
from dlp.parallel.weight.shard_casts import casts_of, share_staged
from dlp.parallel.weight.sharded import ShardedWeight
from dlp.parallel.weight.values import Values


class WeightBatch:
    """What one model keeps for this from step to step."""

    def __init__(self) -> None:
        self.values, self.together = Values(), CastsTogether()


@torch.inference_mode(False)  # later boundaries write into what this one has made
@torch.no_grad()
def refresh(runtime: Runtime, cores: Sequence[LinearCore], shards: Sequence[ShardedWeight]) -> None:
    """Cast the weights of these layers, and these shards; all ranks call it together."""
    runtime.weight_batch = batch = runtime.weight_batch or WeightBatch()
    whole = [(core, casts) for core in cores if (casts := core.casts(batch.values))]
    sharded = [(weight, casts_of(weight, batch.values)) for weight in shards if weight.reads]
    batch.values.renew()
    made = iter(batch.together.make([cast for _, casts in (*whole, *sharded) for cast in casts]))
    for core, casts in whole:
        core.cast_weights.take([next(made) for _ in casts], len(core.members))
    for weight, casts in sharded:
        weight.take([next(made) for _ in casts])
    share_staged([weight for weight, _ in sharded])
    for weight in shards:
        weight.fresh = True
    runtime.watch.cast([core for core, _ in whole] + list(dict.fromkeys(weight.core for weight, _ in sharded)))
