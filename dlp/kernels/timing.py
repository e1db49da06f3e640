"""Timing of work on one GPU, in milliseconds.

    device_ms      device time of a run in a burst; the device waits until the burst is queued, so host time does not count
    parts_ms       device time of each part of a run, measured as in device_ms
    sustained_ms   device time under continuous load
    host_ms        time of one run that starts on an idle device, including the work of the host

The results differ because the clock frequency of a GPU depends on the load: large GEMMs bring the GPU to its power limit, and
the clock falls within a fraction of a second. Short idle times between runs therefore make work look faster, FP8 more than
bf16, and may change the fastest algorithm of cuBLASLt.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Run = Callable[[], object]
ROUNDS = 5  # number of measurements, of which the median is returned
SETTLING = 0.25  # seconds of load before the first measurement
AHEAD = 3  # number of batches that are queued or running while the host queues the next batch


def device_ms(run: Run, count: int = 8, *, settling: float = SETTLING, rounds: int = ROUNDS) -> float:
    """Return the milliseconds of one run in a burst of `count` runs."""
    (burst,) = parts_ms([lambda: [run() for _ in range(count)]], 1, settling=settling, rounds=rounds)
    return burst / count


def parts_ms(parts: Sequence[Run], count: int = 8, *, settling: float = SETTLING, rounds: int = ROUNDS) -> list[float]:
    """Return the milliseconds of each part of a run in a burst of `count` runs; a run consists of the parts in order."""
    settled = time.perf_counter() + settling
    while time.perf_counter() < settled:
        _burst_ms(parts, count)
    bursts = [_burst_ms(parts, count) for _ in range(rounds)]
    return [statistics.median(times) / count for times in zip(*bursts, strict=True)]


def sustained_ms(run: Run, count: int = 4, *, settling: float = SETTLING, rounds: int = ROUNDS) -> float | None:
    """Return the milliseconds of one run under continuous load; None if the host cannot keep the device busy."""
    settled = time.perf_counter() + settling
    marks, times, lates = deque([_mark()]), list[float](), 0
    while len(times) < rounds:
        for _ in range(count):
            run()
        late = marks[-1].query()  # previous work is already complete: the device waited for the host
        marks.append(_mark())
        if len(marks) <= AHEAD:
            continue
        begin = marks.popleft()
        marks[0].synchronize()
        if time.perf_counter() < settled:
            continue
        lates += late
        times.append(begin.elapsed_time(marks[0]) / count)
        if lates > rounds // 4:
            return None
    return statistics.median(times)


def host_ms(run: Run, *, settling: float = SETTLING, rounds: int = 2 * ROUNDS + 1) -> float:
    """Return the milliseconds of a run that starts on an idle device."""
    settled, times = time.perf_counter() + settling, list[float]()
    while len(times) < rounds:
        torch.cuda.synchronize()
        start = _mark()
        run()
        end = _mark()
        end.synchronize()
        if time.perf_counter() > settled:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def _burst_ms(parts: Sequence[Run], count: int) -> list[float]:
    """Return the milliseconds of each part, summed over `count` runs."""
    ahead = 10_000_000  # clock cycles for which the device waits while the host queues the runs
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        marks = [_mark()]
        for part in [*parts] * count:
            part()
            marks.append(_mark())
        late = marks[0].query()  # the device started before all runs were queued
        marks[-1].synchronize()
        if not late or ahead > 2e9:
            times = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
            return [sum(times[i :: len(parts)]) for i in range(len(parts))]
        ahead *= 2


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
