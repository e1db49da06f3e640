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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from launch.report.exposed_communication import Activity, Span, activities, common, length, recorded, union

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


def record(run: Callable[[], object], count: int, device: torch.device, here: bool) -> Found | None:
    """Run `count` iterations, and return their profile if this rank records (`here`), else None."""
    if not here:
        for _ in range(count):
            run()
        return None
    _, recording = recorded(lambda: [run() for _ in range(count)], device)
    return tables([each for each in activities(recording, device) if each.end > each.start], count)


def tables(intervals: Sequence[Activity], count: int) -> Found:
    """Return the profile of one iteration from the intervals of `count` iterations."""
    kernels: dict[str, list[Span]] = defaultdict(list)
    groups: dict[str, list[Span]] = defaultdict(list)
    for name, start, end in intervals:
        kernels[name].append((start, end))
        groups[group_of(name)].append((start, end))
    merged = {group: union(spans) for group, spans in groups.items()}
    alone = {}
    for group, spans in merged.items():
        others = union(span for other in merged if other != group for span in merged[other])
        alone[group] = length(spans) - common(spans, others)
    busy = union(span for spans in merged.values() for span in spans)
    scale = 1e-3 / count

    def rows(found: dict[str, list[Span]], of: dict[str, float] | None) -> list[Row]:
        made = [
            Row(name, scale * length(spans), None if of is None else scale * of[name], len(spans) / count)
            for name, spans in found.items()
        ]
        return sorted(made, key=lambda row: -row.ms)

    wall = busy[-1][1] - busy[0][0] if busy else 0.0
    return Found(scale * wall, scale * length(busy), rows(groups, alone), rows(kernels, None))


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


def longest_kernels(run: Callable[[], object], times: int = 4, most: int = 14) -> list[str]:
    """Profile `times` runs on a GPU. Returns a line for each of the `most` longest kernels, with device time and number of
    launches in one run, and a last line with the time of all kernels."""
    found = record(run, times, torch.device("cuda"), True)
    assert found is not None
    lines = [f"    {1e3 * row.ms:9.1f} us {row.launches:6.1f} x {row.name[:100]}" for row in found.kernels[:most]]
    return [*lines, f"    {1e3 * sum(row.ms for row in found.kernels):9.1f} us in all kernels"]
