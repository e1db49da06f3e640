"""Schedule the operations of a step on the streams of a GPU.

    compute   ████ ██████   ████████      kernels
    tp            ▓▓▓▓▓▓                  transfers over tp
    dp        ▓▓▓▓▓▓▓▓▓▓▓▓                collectives of FSDP and cp

Each stream runs its operations in order. An operation starts when its stream is free and every operation that it waits for has
ended. Time in which the compute stream waits for a transfer is exposed communication.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlp.comm.mesh import TP

COMPUTE, TP_LINK, DP_LINK = "compute", TP, "dp"
LANES = (COMPUTE, TP_LINK, DP_LINK)
EXPOSED = "exposed transfers"


class Operation(NamedTuple):
    """Operation of a program.

    name      name in the trace
    kind      kind of device time under which the seconds are counted
    seconds   duration
    lane      stream, one of `LANES`
    waits     indices of earlier operations that must have ended
    """

    name: str
    kind: str
    seconds: float
    lane: str
    waits: tuple[int, ...] = ()


class Span(NamedTuple):
    """Scheduled operation, with start and end in seconds."""

    operation: Operation
    start: float
    end: float


@dataclass
class Program:
    """Operations in the order in which they are launched."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, name: str, kind: str, seconds: float, lane: str = COMPUTE, waits: Sequence[int] = ()) -> int:
        """Append an operation and return its index."""
        self.operations.append(Operation(name, kind, seconds, lane, tuple(waits)))
        return len(self.operations) - 1

    @property
    def last(self) -> tuple[int, ...]:
        """Index of the last operation on the compute stream, as a tuple for `waits`; empty if there is none."""
        for index in range(len(self.operations) - 1, -1, -1):
            if self.operations[index].lane == COMPUTE:
                return (index,)
        return ()


@dataclass(frozen=True)
class Timeline:
    """Result of `schedule`: the scheduled operations in the order of their launches."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def shares(self) -> dict[str, float]:
        """Return the seconds on the compute stream by kind; the kind EXPOSED counts the seconds in which this stream waits. The
        sum is `seconds`."""
        found: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.operation.lane == COMPUTE:
                found[span.operation.kind] += span.end - span.start
        found[EXPOSED] = self.seconds - sum(found.values())
        return {kind: seconds for kind, seconds in found.items() if seconds > 1e-9}

    def transfers(self) -> dict[str, float]:
        """Return the seconds in which each link is busy, by stream."""
        found: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.operation.lane != COMPUTE:
                found[span.operation.lane] += span.end - span.start
        return dict(found)

    def write_trace(self, path: Path) -> None:
        """Write the schedule as a trace for Perfetto or chrome://tracing."""
        events = [
            {"name": span.operation.name, "cat": span.operation.kind, "ph": "X", "pid": 0,
             "tid": LANES.index(span.operation.lane), "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            for span in self.spans
        ]  # fmt: skip
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(LANES)
        ]
        path.write_text(json.dumps({"traceEvents": names + events}))


def schedule(program: Program, slowdown: float = 0.0) -> Timeline:
    """Schedule each operation as early as its stream and its `waits` allow.

    slowdown    relative loss of speed of the compute stream while the dp stream is busy
    """
    free = dict.fromkeys(LANES, 0.0)
    spans: list[Span] = []
    busy: list[tuple[float, float]] = []  # (start, end) of the operations on the dp stream
    for operation in program.operations:
        start = max([free[operation.lane], *(spans[i].end for i in operation.waits)])
        end = start + operation.seconds
        if operation.lane == DP_LINK:
            busy.append((start, end))
        elif operation.lane == COMPUTE and slowdown and busy:
            shared = sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy[-4:])
            end += shared * slowdown / (1 - slowdown)
        free[operation.lane] = end
        spans.append(Span(operation, start, end))
    return Timeline(tuple(spans))
