"""Deterministic algorithms for `[train] deterministic = true`: runs with equal settings are bitwise equal, on GPUs as well. The
slowdown is measured at the start of a run.

Without this setting, some CUDA kernels sum with atomics in a varying order. Runs on CPUs are bitwise equal without it, and
collectives sum in the same order in every run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REPEATS = 3  # number of timed runs


def prepare() -> None:
    """Set the environment variable that makes cuBLAS deterministic. Call before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def switch_on(device: torch.device, work: Callable[[], None]) -> str:
    """On a GPU, switch deterministic algorithms on, and return a log line with the slowdown: `work`, which must run a
    microbatch without side effects, is timed before and after. On a CPU, only return a log line."""
    if device.type != "cuda":
        return "deterministic: no cost on a CPU, where runs are always bitwise equal"
    with torch.random.fork_rng([device]):
        before = _seconds(work)
        _use_deterministic_algorithms()
        after = _seconds(work)
    slower = f"{1e3 * after:.1f} ms instead of {1e3 * before:.1f} ms ({after / before - 1:+.1%})"
    return f"deterministic: a microbatch takes {slower}"


def fix_sums(device: torch.device) -> None:
    """Fix the order of sums in operations of torch in this process, for `[train] invariant`. Call before the first use of a
    GPU."""
    torch.set_num_threads(1)  # on CPUs the order of sums depends on the number of threads
    if device.type == "cuda":
        prepare()
        _use_deterministic_algorithms()


def _use_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    # filling uninitialized memory is a debugging aid, which torch enables by default in deterministic mode
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _seconds(work: Callable[[], None]) -> float:
    """Return the shortest time of `REPEATS` runs in seconds, after one warm-up run."""
    work()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
