"""Milliseconds of some work on one GPU: of the device alone, and with the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]
ROUNDS = 7
SETTLING = 0.5  # seconds


def device_ms(run: Run, count: int = 8) -> float:
    """Milliseconds of device time of a run, on a device whose clocks have settled under it."""
    start = time.perf_counter()
    while time.perf_counter() - start < SETTLING:
        _queued_ms(run, count)
    return statistics.median(_queued_ms(run, count) for _ in range(ROUNDS))


def _queued_ms(run: Run, count: int) -> float:
    """Milliseconds of a run, of which `count` are queued while the device is busy with something else."""
    ahead = 10_000_000  # clocks
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        start.record()
        for _ in range(count):
            run()
        end.record()
        late = start.query()  # the device had nothing to do before all was queued
        end.synchronize()
        if not late or ahead > 2e9:
            return start.elapsed_time(end) / count
        ahead *= 2


def host_ms(run: Run, count: int = 15) -> float:
    """Milliseconds of a run that begins with an idle device, host included."""
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
