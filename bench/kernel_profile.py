"""Device time of an iteration by kernel: `torch.profiler` records iterations, or replays of a CUDA graph, and the times of
kernels are summed by name and by group.

Kernels on different streams overlap, so the sum of their times can be larger than the time of an iteration. For each group:

    ms        sum of the kernels' milliseconds in one iteration
    alone     milliseconds in which kernels of this group run, and kernels of no other group
    launches  number of kernels in one iteration

`busy` is the time in which any kernel runs, `idle` is the rest of the iteration.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GROUPS = (  # patterns; the first that matches the name of a kernel determines the group
    ("comm", r"nccl|userbuffers|symm_mem|ptop|sum_parts|sum_in_order|fp8_wire|agree_kernel|barrier|signal"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("norm, rope, act", r"triton|rms_?norm|layer_?norm|swiglu|silu|gate|activation|rope|rotary"),
    (
        "cast",
        r"cast|amax|quantize|transpose|decode|swizzle|delayed_update|scale|nvfp4|mxfp8|tensor_kernel|block_kernel",
    ),
    ("copy", r"memcpy|memset|copy|cat|fill|zeros"),
    ("elementwise", r"elementwise|reduce"),
)
OTHER, TOP, WIDTH = "other", 25, 96


class Interval(NamedTuple):
    """Name, start and end of one kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """Time of a kernel or a group in one iteration.

    ms          sum of the kernels' milliseconds
    alone       milliseconds in which kernels of this group run, and kernels of no other group; None for a kernel
    launches    number of launches
    """

    name: str
    ms: float
    alone: float | None
    launches: float


@dataclass(frozen=True)
class Found:
    """Profile of one iteration: milliseconds of the iteration (`wall`) and with at least one running kernel (`busy`), and rows
    of groups and of kernels, longest first."""

    wall: float
    busy: float
    groups: list[Row]
    kernels: list[Row]


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def record(run: Callable[[], None], count: int, device: torch.device, here: bool) -> Found | None:
    """Run `count` iterations, and return their profile if this rank records (`here`), else None."""
    if not here:
        for _ in range(count):
            run()
        return None
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        for _ in range(count):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = recorded.events() or []
    leaves = [event for event in events if event.device_type == wanted and (on_gpu or not event.cpu_children)]
    ranges = [Interval(event.name, event.time_range.start, event.time_range.end) for event in leaves]
    return tables([each for each in ranges if each.end > each.start], count)


def tables(intervals: Sequence[Interval], count: int) -> Found:
    """Return the profile of one iteration from the intervals of `count` iterations."""
    kernels: dict[str, list[float]] = defaultdict(list)
    groups: dict[str, list[float]] = defaultdict(list)
    for name, start, end in intervals:
        kernels[name].append(end - start)
        groups[group_of(name)].append(end - start)
    busy, alone = _overlaps(intervals)
    scale = 1e-3 / count

    def rows(sums: dict[str, list[float]], of: dict[str, float] | None) -> list[Row]:
        made = [
            Row(name, scale * sum(times), None if of is None else scale * of.get(name, 0.0), len(times) / count)
            for name, times in sums.items()
        ]
        return sorted(made, key=lambda row: -row.ms)

    wall = max((each.end for each in intervals), default=0.0) - min((each.start for each in intervals), default=0.0)
    return Found(scale * wall, scale * busy, rows(groups, alone), rows(kernels, None))


def _overlaps(intervals: Iterable[Interval]) -> tuple[float, dict[str, float]]:
    """Return the microseconds in which any kernel runs, and for each group the microseconds in which only kernels of this group
    run."""
    edges = sorted(
        edge for name, start, end in intervals for edge in ((start, 1, group_of(name)), (end, -1, group_of(name)))
    )
    running: dict[str, int] = defaultdict(int)
    alone: dict[str, float] = defaultdict(float)
    busy = last = 0.0
    for time, change, group in edges:
        active = [name for name, number in running.items() if number]
        if active:
            busy += time - last
        if len(active) == 1:
            alone[active[0]] += time - last
        running[group] += change
        last = time
    return busy, alone


def show(title: str, found: Found, top: int = TOP) -> None:
    """Print the groups, then the kernels with the largest sums."""
    print(f"\n{title}: {found.wall:.3f} ms an iteration, busy {found.busy:.3f}, idle {found.wall - found.busy:.3f}")
    print(f"{'ms':>8} {'alone':>8} {'launches':>8}  group")
    for row in found.groups:
        print(f"{row.ms:8.3f} {row.alone or 0.0:8.3f} {row.launches:8.1f}  {row.name}")
    print(f"{'ms':>8} {'us each':>8} {'launches':>8}  kernel")
    for row in found.kernels[:top]:
        each = 1e3 * row.ms / row.launches
        print(f"{row.ms:8.3f} {each:8.1f} {row.launches:8.1f}  [{group_of(row.name)}] {short(row.name)}", flush=True)


def short(name: str) -> str:
    """Shorten the name of a kernel to WIDTH characters, without a leading "void" and the namespaces of torch and std."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|at::native::|std::|c10::", "", name)
    return plain if len(plain) <= WIDTH else f"{plain[: WIDTH // 2]}...{plain[3 - WIDTH // 2 :]}"
