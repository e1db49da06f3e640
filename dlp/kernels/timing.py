"""Times of some work on one GPU, in milliseconds.

    device_ms      of the device alone: a burst, queued behind a kernel that does nothing for as long as the host needs
    parts_ms       the same of each part of the work
    sustained_ms   of the device alone, which never rests
    host_ms        of one run that begins with an idle device, so that what the host does counts

They differ by clocks. Large GEMMs hold an H200 at its limit of power: within 0.1 s of load its clocks fall from 1980 MHz to
between 1400 and 1500, depending on what the work takes and on how much the device rests. A rest of 5 ms before eight
iterations makes those of `nn.Linear` (8192 x 8192 -> 8192) 5 % faster and those of FP8, which are shorter and so rest a larger
share of their time, 8 to 13 %; and another of cuBLASLt's candidates may win.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Run = Callable[[], object]
ROUNDS = 5
SETTLING = 0.25  # seconds of the same load before the first time that counts
AHEAD = 3  # batches of runs that are queued or running while the host queues one


def device_ms(run: Run, count: int = 8, *, settling: float = SETTLING, rounds: int = ROUNDS) -> float:
    """Milliseconds of a run in a burst of `count`, at the clocks that such bursts leave."""
    (burst,) = parts_ms([lambda: [run() for _ in range(count)]], 1, settling=settling, rounds=rounds)
    return burst / count


def parts_ms(parts: Sequence[Run], count: int = 8, *, settling: float = SETTLING, rounds: int = ROUNDS) -> list[float]:
    """Milliseconds of each part of a run, which is these parts one after another, in such a burst."""
    settled = time.perf_counter() + settling
    while time.perf_counter() < settled:
        _burst_ms(parts, count)
    bursts = [_burst_ms(parts, count) for _ in range(rounds)]
    return [statistics.median(times) / count for times in zip(*bursts, strict=True)]


def sustained_ms(run: Run, count: int = 4, *, settling: float = SETTLING, rounds: int = ROUNDS) -> float | None:
    """Milliseconds of a run among others, at the clocks that these leave; None where the host cannot keep the device busy."""
    settled = time.perf_counter() + settling
    marks, times, lates = deque([_mark()]), list[float](), 0
    while len(times) < rounds:
        for _ in range(count):
            run()
        late = marks[-1].query()  # all before was done, so the device has waited for the host
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
    """Milliseconds of a run that begins with an idle device, which has no other rests than those that this makes."""
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
    """Milliseconds of each part, in all `count` runs together."""
    ahead = 10_000_000  # clocks
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        marks = [_mark()]
        for part in [*parts] * count:
            part()
            marks.append(_mark())
        late = marks[0].query()  # the device had nothing to do before all was queued
        marks[-1].synchronize()
        if not late or ahead > 2e9:
            times = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
            return [sum(times[i :: len(parts)]) for i in range(len(parts))]
        ahead *= 2


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
