"""Start the ranks of a benchmark as processes on this machine; refuse to run a benchmark of collectives on one rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dlp.comm.mesh import BACKENDS, world_size
from launch.ranks.process_exit import refuse


def refuse_one_rank() -> None:
    """Exit with code 2 if this process is the only rank."""
    if world_size() == 1:
        refuse(
            "one rank has nothing to gather or to sum; start 2 or more ranks, for example by torchrun --nproc-per-node 2",
            code=2,
        )


def start(
    work: Callable[..., None], ranks: int, *arguments: Any, device_type: str = "cpu", timeout: timedelta | None = None
) -> None:
    """Run `work(rank, ranks, *arguments)` on each rank of a new process group, and return when all ranks have ended.

    Each rank is a forked process on this machine, with one GPU if `device_type` is "cuda".

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised an exception.
        torch.multiprocessing.ProcessExitedException: the process of a rank ended with a nonzero exit code or by a signal.
    """
    with tempfile.TemporaryDirectory(prefix="dlp-ranks-") as folder:
        given = ranks, folder, device_type, timeout, work, arguments
        mp.start_processes(_rank, given, ranks, start_method="fork")


def _rank(
    rank: int, ranks: int, folder: str, device_type: str, timeout: timedelta | None, work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(BACKENDS[device_type], init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    work(rank, ranks, *arguments)
    dist.destroy_process_group()
