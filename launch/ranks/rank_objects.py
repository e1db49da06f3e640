"""Exchange Python objects between all ranks of a run. Without a process group the process is the only rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def from_rank_0(make: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Call `make` on rank 0, and return the result on all ranks. If `make` raises ValueError, OSError or RuntimeError, all
    ranks raise this error."""
    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except (ValueError, OSError, RuntimeError) as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    if box[1] is not None:
        raise box[1]
    found: T = box[0]
    return found


def from_all(mine: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the value `mine` of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [mine]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine, group)
    return values


def place() -> tuple[int, int]:
    """Return (rank, number of ranks) of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
