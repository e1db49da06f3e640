"""Exposed communication of one profiled step: time during which transfers ran and no computation ran.

    transfers      ███████      ████
    computation  ████    ██████████████
    exposed          ████

`[train] profile = N` profiles step N of a run and writes the numbers with the metrics, beside a trace for chrome://tracing or
Perfetto. On GPUs transfers are NCCL's kernels and copies between devices, on CPUs gloo's operations. Profiling slows the step
down, mainly on the host; therefore the duration of the step is reported too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import profiler

T = TypeVar("T")
Span = tuple[float, float]
TRANSFERS = ("nccl", "gloo:", "memcpy ptop", "memcpy peer")
# Copies and waits on CPU ranks, which are not kernels
NO_WORK = (
    "aten::to",
    "aten::item",
    "aten::_local_scalar_dense",
)


class Activity(NamedTuple):
    """Activity from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Exposure:
    """Milliseconds of one profiled step on this rank: the complete step, transfers, and transfers without simultaneous
    computation."""

    step: float
    transfers: float
    exposed: float


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into disjoint spans, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Return the time that two results of `union` have in common."""
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return total


def exposure(activities: Iterable[Activity]) -> Exposure:
    """Return the exposure of the activities of one step."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for name, start, end in activities:
        spans[name.lower().startswith(TRANSFERS)].append((start, end))
    transfers, work = union(spans[True]), union(spans[False])
    everything = union([*transfers, *work])
    step = everything[-1][1] - everything[0][0] if everything else 0.0
    exposed = length(transfers) - common(transfers, work)
    return Exposure(*(round(value / 1e3, 3) for value in (step, length(transfers), exposed)))


def profiled(run: Callable[[], T], device: torch.device, trace: Path) -> tuple[T, Exposure]:
    """Run a step under the profiler of torch, wait for the step, and write the trace."""
    on_device = device.type == "cuda"
    kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * on_device
    with profiler.profile(activities=kinds) as record:
        result = run()
        if on_device:
            torch.cuda.synchronize(device)
    record.export_chrome_trace(str(trace))
    return result, exposure(_activities(record.events(), on_device))


def _activities(events: Any, on_device: bool) -> list[Activity]:
    """Return the kernels and memory copies of the GPU, without annotated ranges. On a CPU, return the ATen operators and the
    transfers."""
    device_type = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    seen = ("aten::", *TRANSFERS)
    return [
        Activity(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device_type
        and (not getattr(event, "is_user_annotation", False) if on_device else event.name.startswith(seen))
        and event.name not in NO_WORK
    ]
