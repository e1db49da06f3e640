"""Exposed communication: unions and intersections of time spans, and a profiled step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.report.exposed_communication import Activity, Exposure, common, exposure, length, profiled, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda s: (float(s[0]), float(s[0] + s[1]))))


def moments(spans: list[tuple[float, float]]) -> set[int]:
    """Return the set of integers that lie in some span."""
    return {moment for start, end in spans for moment in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_spans_are_the_moments_they_cover(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    merged_a, merged_b = union(a), union(b)
    assert moments(merged_a) == moments(a) and length(merged_a) == len(moments(a))
    assert common(merged_a, merged_b) == len(moments(a) & moments(b))


def test_a_transfer_is_exposed_where_nothing_computes() -> None:
    found = exposure(
        [
            Activity("sm90_gemm", 0.0, 4000.0),
            Activity("ncclDevKernel_AllGather_RING_LL", 3000.0, 6000.0),
            Activity("Memcpy PtoP (Device -> Device)", 5000.0, 8000.0),
            Activity("cast_transpose", 7500.0, 9000.0),
        ]
    )
    assert found == Exposure(step=9.0, transfers=5.0, exposed=3.5)


def test_nothing_is_exposed_where_nothing_travels() -> None:
    assert exposure([]) == Exposure(0.0, 0.0, 0.0)
    assert exposure([Activity("gemm", 1000.0, 3000.0)]) == Exposure(2.0, 0.0, 0.0)


def test_a_profiled_step_returns_its_result_and_leaves_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result, found = profiled(lambda: (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item(), torch.device("cpu"), trace)
    assert result == 64.0**3
    assert found.step > 0 and found.transfers == found.exposed == 0
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
