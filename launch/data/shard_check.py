"""Check all shards before the first step: the hash of each shard, and that every token is in the vocabulary.

The ranks of a host divide the shards. Every host checks all shards, since hosts may have different files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from launch.common.units import said_bytes, said_seconds
from launch.data.shard import Shard, verify
from launch.ranks import rank_objects


def check_data(shards: Sequence[Shard]) -> str:
    """Check the shards, and return a log line with size and duration. Collective. Raises ValueError on all ranks if a shard is
    damaged, or if a rank has other data than rank 0."""
    began = time.perf_counter()
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    mine = (",".join(shard.digest for shard in shards), _damage(shards[rank::ranks]))
    found = rank_objects.from_all(mine)
    for damage in (damage for _, damage in found if damage):
        raise ValueError(damage)
    for other, (digests, _) in enumerate(found):
        if digests != found[0][0]:
            raise ValueError(
                f"{shards[0].path.parent}: rank {other} and rank 0 read different data under this name; give all hosts the "
                f"same folder"
            )
    nbytes = sum(shard.starts.nbytes + shard.tokens.nbytes for shard in shards)
    took = said_seconds(time.perf_counter() - began)
    return f"data: {said_bytes(nbytes)} in {len(shards)} shards, hashes and tokens checked in {took}"


def _damage(shards: Sequence[Shard]) -> str:
    try:
        for shard in shards:
            verify(shard)
    except (ValueError, OSError) as error:
        return str(error)
    return ""
