"""Milliseconds of some work on one GPU: of a device that never rests, and with the host.

Large GEMMs hold an H200 at its limit of power: within 0.1 s of load its clocks fall from 1980 MHz to between 1400 and 1500,
depending on what the work takes and on how long the device has rested. So a time is that of a device that does nothing but
this work, without a rest, after it has done so for a while: what a training of such layers sees. Five milliseconds of rest
before eight iterations of a linear make it up to 12 % faster, and the faster one the more, since it rests a larger share of
its time; and of cuBLASLt's candidates another one wins.
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
SETTLING = 0.25  # seconds
AHEAD = 3  # batches of runs that are queued or running while the host queues one


class DeviceTime(NamedTuple):
    """`rested`: the device could not be kept busy, so it had a rest before each batch."""

    ms: float
    rested: bool


def device_ms(run: Run, count: int = 8, *, settling: float = SETTLING, rounds: int = ROUNDS) -> DeviceTime:
    """Milliseconds of device time of a run, of which `count` are queued while the device is busy with others; where the
    host is too slow for that, as a CUDA graph; and where a run cannot be captured, behind a kernel that does nothing."""
    found = _steady_ms(run, count, settling, rounds)
    if found is not None:
        return DeviceTime(found / count, False)
    graph = _captured(run, count)
    found = None if graph is None else _steady_ms(graph.replay, 1, settling, rounds)
    if found is not None:
        return DeviceTime(found / count, False)
    return DeviceTime(statistics.median(_rested_ms(run, count) for _ in range(rounds)) / count, True)


def host_ms(run: Run) -> float:
    """Milliseconds of a run that begins with an idle device, host included; the device has only the rests that this makes."""
    settled, times = time.perf_counter() + SETTLING / 2, list[float]()  # after `device_ms` clocks change but little
    while len(times) < ROUNDS:
        torch.cuda.synchronize()
        start = _mark()
        run()
        end = _mark()
        end.synchronize()
        if time.perf_counter() > settled:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def _steady_ms(run: Run, count: int, settling: float, rounds: int) -> float | None:
    """Milliseconds of a batch of runs, batch after batch; None where the device waits for the host."""
    settled = time.perf_counter() + settling
    marks, times, lates = deque([_mark()]), list[float](), 0
    while len(times) < rounds:
        for _ in range(count):
            run()
        late = marks[-1].query()  # all before was done
        marks.append(_mark())
        if len(marks) <= AHEAD:
            continue
        begin = marks.popleft()
        marks[0].synchronize()
        if time.perf_counter() < settled:
            continue
        lates += late
        times.append(begin.elapsed_time(marks[0]))
        if lates > rounds // 4:
            return None
    return statistics.median(times)


def _captured(run: Run, count: int) -> torch.cuda.CUDAGraph | None:
    """A batch of runs as a graph; None where torch refuses to capture them."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what a stream has of its own comes to be
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(count):
                run()
    except RuntimeError:
        return None
    return graph


def _rested_ms(run: Run, count: int) -> float:
    """Milliseconds of a batch of runs that are queued behind a kernel that does nothing for long enough."""
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
            return start.elapsed_time(end)
        ahead *= 2


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
