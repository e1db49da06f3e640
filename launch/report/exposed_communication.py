"""Measure the exposed communication of one profiled step: the time in which transfers run, but no computation.

    transfers      ███████      ████
    computation  ████    ██████████████
    exposed          ████

`[train] profile = N` profiles step N of a run, and writes the times into metrics.jsonl and a trace for chrome://tracing or
Perfetto. On GPUs transfers are NCCL kernels and copies between devices, on CPUs operations of gloo. Profiling slows the step
down, mainly on the host; the duration of the profiled step is therefore reported as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import profiler

T = TypeVar("T")
Span = tuple[float, float]
TRANSFERS = ("nccl", "gloo:", "memcpy ptop", "memcpy peer")  # prefixes of the names of transfers, in lower case
# ATen operators on CPU ranks that only copy or wait, and do not count as computation
NO_WORK = (
    "aten::to",
    "aten::item",
    "aten::_local_scalar_dense",
)


class Activity(NamedTuple):
    """Kernel, copy or operator that ran from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Exposure:
    """Times of one profiled step on this rank, in milliseconds.

    step        duration of the step
    transfers   time in which at least one transfer ran
    exposed     time in which a transfer, but no computation ran
    """

    step: float
    transfers: float
    exposed: float


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans; return disjoint spans, sorted by start."""
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
    """Return the length of the intersection of two lists of disjoint, sorted spans."""
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return total


def exposure(activities: Iterable[Activity]) -> Exposure:
    """Compute the exposed communication from the activities of one step."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for name, start, end in activities:
        spans[name.lower().startswith(TRANSFERS)].append((start, end))
    transfers, work = union(spans[True]), union(spans[False])
    everything = union([*transfers, *work])
    step = everything[-1][1] - everything[0][0] if everything else 0.0
    exposed = length(transfers) - common(transfers, work)
    return Exposure(*(round(value / 1e3, 3) for value in (step, length(transfers), exposed)))


def profiled(run: Callable[[], T], device: torch.device, trace: Path) -> tuple[T, Exposure]:
    """Call `run` under torch's profiler, and write the trace to `trace`. Returns the result of `run`, and the times."""
    result, record = recorded(run, device)
    record.export_chrome_trace(str(trace))
    return result, exposure(activities(record, device))


def recorded(run: Callable[[], T], device: torch.device) -> tuple[T, profiler.profile]:
    """Call `run` under torch's profiler, and wait for the device. Returns the result of `run`, and the profile."""
    kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with profiler.profile(activities=kinds) as record:
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result, record


def activities(record: profiler.profile, device: torch.device) -> list[Activity]:
    """Return the kernels and memory copies of the GPU, without annotated ranges. On a CPU, return the ATen operators and the
    transfers."""
    on_device = device.type == "cuda"
    device_type = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    seen = ("aten::", *TRANSFERS)
    return [
        Activity(event.name, event.time_range.start, event.time_range.end)
        for event in record.events() or []
        if event.device_type == device_type
        and (not getattr(event, "is_user_annotation", False) if on_device else event.name.startswith(seen))
        and event.name not in NO_WORK
    ]
