"""`[train] deterministic = true`: equal bits in every run, on GPUs as well; the cost is measured at the start.

Otherwise some CUDA kernels add with atomics, in the order of arrival. CPUs repeat their bits in any case, and collectives
sum in the order of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REPEATS = 3


def prepare() -> None:
    """Set the environment of cuBLAS, which reads it when creating a workspace. Call before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def switch_on(device: torch.device, work: Callable[[], None]) -> str:
    """Switch deterministic algorithms on. On a GPU, time `work`, which runs a microbatch without side effects, before and
    after. Returns a line for the log with the slowdown."""
    if device.type != "cuda":
        return "deterministic: no cost on a CPU, where every run repeats its bits"
    with torch.random.fork_rng([device]):
        before = _seconds(work)
        _use_deterministic_algorithms()
        after = _seconds(work)
    slower = f"{1e3 * after:.1f} ms instead of {1e3 * before:.1f} ms ({after / before - 1:+.1%})"
    return f"deterministic: a microbatch takes {slower}"


def fix_sums(device: torch.device) -> None:
    """Fix the order of sums inside torch on this process, for `[train] invariant`. Call before the first use of a GPU."""
    torch.set_num_threads(1)  # on CPUs sums depend on the number of threads
    if device.type == "cuda":
        prepare()
        _use_deterministic_algorithms()


def _use_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    # filling is a debugging aid, which torch enables by default
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _seconds(work: Callable[[], None]) -> float:
    """Return the shortest time of a few runs, after one warm-up run."""
    work()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
