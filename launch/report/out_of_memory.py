"""Memory snapshot and error message for a GPU that runs out of memory.

An observer of torch takes the snapshot when an allocation fails, before anything is freed. https://pytorch.org/memory_viz shows
the snapshot: live allocations with their sizes, and with `[train] memory_history` the Python stack of each allocation.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.common.units import said_bytes

HISTORY = 100_000  # maximum number of recorded allocations


def snapshot_path(folder: Path) -> Path:
    return folder / f"out-of-memory-rank{dist.get_rank()}.pickle"


def observer(path: Path, snapshot: Callable[[], Any]) -> Callable[..., None]:
    """Return a function that writes a snapshot to `path`, for torch to call when an allocation fails. An OSError while writing
    is ignored, so that the out-of-memory error is still raised."""

    def observe(*_: Any) -> None:
        try:
            with path.open("wb") as file:
                pickle.dump(snapshot(), file)
        except OSError:
            path.unlink(missing_ok=True)

    return observe


def watch_memory(folder: Path, device: torch.device, history: bool) -> None:
    """Register the observer that writes a snapshot into `folder` if this GPU runs out of memory; do nothing on a CPU.
    `history`: record the Python stack of each allocation."""
    if device.type != "cuda":
        return
    if history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    attach = vars(torch._C)["_cuda_attach_out_of_memory_observer"]  # vars(): CPU builds of torch lack this function
    attach(observer(snapshot_path(folder), torch.cuda.memory._snapshot))


def sentence(error: torch.OutOfMemoryError, where: str, folder: Path, peak: int) -> str:
    """Return the error message: where memory ran out, peak memory (`peak`, in bytes), snapshot, and settings that save
    memory."""
    path = snapshot_path(folder)
    seen = f"{path} lists the live allocations and opens at https://pytorch.org/memory_viz; " if path.is_file() else ""
    reason = str(error).partition("\n")[0].partition(". GPU")[0].removeprefix("CUDA out of memory. ")
    return (
        f"rank {dist.get_rank()}: out of memory in {where}, at most {said_bytes(peak)} was allocated ({reason}); {seen}"
        f"smaller: --train.micro_batch, --train.checkpointing full, or more ranks as --mesh.dp_shard; launch.train --plan "
        f"predicts each"
    )
