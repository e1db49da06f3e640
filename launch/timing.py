"""Milliseconds of some work on one GPU: of the device alone, and with the host.

Large GEMMs hold an H200 at its limit of power: within 0.1 s of load its clocks fall from 1980 MHz to 1400 or 1500, by how
much the work takes and by how long the device has rested. A time is therefore that of a device which does nothing but this
work, without a rest, after it has done so for a while: what a training of such layers sees. Five milliseconds of rest
before eight iterations of a linear make it up to 12 % faster, and the faster one the more, since it rests a larger share of
its time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

Run = Callable[[], object]
ROUNDS = 15
SETTLING = 0.3  # seconds
AHEAD = 3  # batches of runs that are queued while one is timed


class DeviceTime(NamedTuple):
    """`rested`: the host could not keep the device busy, so it had to wait before each batch."""

    ms: float
    rested: bool


def device_ms(run: Run, count: int = 8) -> DeviceTime:
    """Milliseconds of device time of a run, of which the host queues `count` while the device is busy with others."""
    settled = time.perf_counter() + SETTLING
    marks, times, lates = deque([_mark()]), list[float](), 0
    while len(times) < ROUNDS:
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
        if lates > ROUNDS // 4:
            return DeviceTime(statistics.median(_behind_ms(run, count) for _ in range(ROUNDS)), True)
    return DeviceTime(statistics.median(times), False)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _behind_ms(run: Run, count: int) -> float:
    """Milliseconds of a run, of which `count` are queued behind a kernel that does nothing for long enough."""
    ahead = 10_000_000  # clocks
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        start = _mark()
        for _ in range(count):
            run()
        end = _mark()
        late = start.query()
        end.synchronize()
        if not late or ahead > 2e9:
            return start.elapsed_time(end) / count
        ahead *= 2


def host_ms(run: Run) -> float:
    """Milliseconds of a run that begins with an idle device, host included; the device has only the rests that this makes."""
    settled, times = time.perf_counter() + SETTLING, list[float]()
    while len(times) < ROUNDS:
        torch.cuda.synchronize()
        start = _mark()
        run()
        end = _mark()
        end.synchronize()
        if time.perf_counter() > settled:
            times.append(start.elapsed_time(end))
    return statistics.median(times)
