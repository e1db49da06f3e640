"""`[train] deterministic = true`: equal bits in every run, on GPUs as well; the cost is measured at the start.

Off, some CUDA kernels add by atomics, in the order of arrival. On a CPU every run repeats its bits anyway. Collectives
sum in rank order in both cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REPEATS = 3


def prepare() -> None:
    """Before the first use of a GPU: cuBLAS reads this when it makes its workspace."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def switch_on(device: torch.device, work: Callable[[], None]) -> str:
    """Make all that follows deterministic. `work` is a microbatch without effects; returns a sentence on the cost."""
    if device.type != "cuda":
        return "deterministic: free on a CPU, where every run repeats its bits"
    with torch.random.fork_rng([device]):
        before = _seconds(work)
        torch.use_deterministic_algorithms(True)
        # filling is a debugging aid, and it is on by default
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        after = _seconds(work)
    slower = f"{1e3 * after:.1f} ms instead of {1e3 * before:.1f} ms ({after / before - 1:+.1%})"
    return f"deterministic: a microbatch takes {slower}"


def _seconds(work: Callable[[], None]) -> float:
    """The fastest of a few runs, after one that warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
