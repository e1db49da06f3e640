"""Kernels of a run on a GPU, longest first."""

from __future__ import annotations

from collections.abc import Callable

import torch


def longest_kernels(run: Callable[[], object], times: int = 4, most: int = 14) -> list[str]:
    """Profile `times` runs. Returns a line for each of the `most` longest kernels, with device time and number of launches in
    one run, and a last line with the time of all kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    lines = [
        f"    {row.self_device_time_total / times:9.1f} us {row.count / times:6.1f} x {row.key[:100]}"
        for row in rows[:most]
    ]
    total = sum(row.self_device_time_total for row in rows) / times
    return [*lines, f"    {total:9.1f} us in all kernels"]
