"""A direction of a linear, its forward or its backward, as captured launches.

For inputs of equal shapes, strides and alignment a direction launches the same kernels; only addresses differ. If it does
nothing but launch, it is captured (`dlp.kernels.captured`):

    first call      runs `run_forward` or `run_backward`, which build GEMM plans, workspaces and tables
    second call     records the launches of the same functions, and runs them
    further calls   allocate the results and run the recorded launches in one native call; collectives of NCCL and gloo split
                    that into several, and are called between them

So casts and GEMMs must be kernels of this package, and what is communicated must go through memory that ranks map
(`dlp.comm.mapped`) or by collectives. The bits are the same captured and not. A direction that is not captured is launched step
by step, and `describe` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dlp.comm import observer
from dlp.comm.transport import carrier, transport_of, why_not
from dlp.kernels import captured
from dlp.kernels.captured import CapturedLaunches, NotPlain
from dlp.kernels.ranges import named_range
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, cores, remembered

DIRECTIONS = FORWARD, BACKWARD = "forward", "backward"
LIMIT = (
    64  # how many kinds of inputs of a layer are captured; one whose shapes vary without end is launched step by step
)
SEEN = "called once with such tensors"
REGION = "its forward ran under scales of an autocast region, or before a step boundary changed them"
WATCHED = "an observer counts what it sends"
SHARED = "tensors that it is given share memory"
VARIES = f"more than {LIMIT} shapes, strides and alignments came"
Run = Callable[[], list[Tensor]]
RunForward = Callable[[], tuple[list[Tensor], list[Tensor]]]
Key = tuple[Any, ...]


class CapturedDirections:
    """The captured directions of a layer, or of a sequence of ops with layers in it (`dlp.ops.captured`).

    why        by direction: why it is never captured; empty: it can be
    possible   by direction: whether it can be
    found      by direction and all that its launches depend on but addresses: the captured launches, or why there are none:
               SEEN after the first call, else the reason
    passed     by direction: why a call was last launched step by step although the direction can be captured
    """

    def __init__(self, name: str, bounds: Sequence[BoundSpec], why: Mapping[str, str], x: Tensor) -> None:
        missing = "" if captured.possible(x) else f"no kernels run on {x.device.type}"
        self.name, self.bounds, self.sessions = name, bounds, {bound.session for bound in bounds}
        self.communicates = any(bound.spec.group is not None for bound in bounds)
        self.why = {direction: missing or said for direction, said in why.items()}
        self.possible = {direction: not why for direction, why in self.why.items()}
        self.ranges = {direction: named_range(f"{name}.{direction}") for direction in DIRECTIONS}
        self.found: dict[Key, CapturedLaunches | str] = {}
        self.passed: dict[str, str] = {}

    def forward(
        self, key: Key, run: RunForward, reads: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Call `run`, a `run_forward` with `count` y_i, or its captured launches. `key`: all that they depend on, but
        for addresses and what is the same for all calls of this object; `reads`: the tensors that they read."""

        def flat() -> list[Tensor]:
            ys, kept = run()
            return [*ys, *kept]

        results = self.run((FORWARD, *key), reads, flat)
        return results[:count], results[count:]

    def backward(self, key: Key, run: Run, reads: Sequence[Tensor]) -> list[Tensor]:
        """Call `run`, a `run_backward`, or its captured launches; `key` and `reads` as in `forward`."""
        return self.run((BACKWARD, *key), reads, run)

    def run(self, key: Key, given: Sequence[Tensor], run: Run) -> list[Tensor]:
        """Call `run`, which reads `given`, or its captured launches. `key`: a direction, and what they depend on."""
        direction, why = key[0], self.obstacle()
        if why:
            return self._launched(direction, why, run)
        found = self.found.get(key)
        if isinstance(found, CapturedLaunches):  # a third call, or a later one
            with self.ranges[direction]:
                return found(given)
        if not self.possible[direction]:
            return run()
        if found is None and len(self.found) >= LIMIT:
            return self._launched(direction, VARIES, run)
        if found is None:  # the first call
            self.found[key] = SEEN
        if found is not SEEN:  # the first call, or one that could not be recorded
            return run()
        if not captured.disjoint(given):  # the second call
            return self._launched(direction, SHARED, run)
        try:
            launches = captured.record(run, given, self._kept_memory())
        except NotPlain as why:
            self.found[key] = str(why)
            return run()
        self.found[key] = launches
        return launches(given)

    def obstacle(self) -> str:
        """Why captured launches may not run now; empty: they may."""
        for session in self.sessions:  # captured launches read scales from the session's table
            if session.scales is not None and session.scales.values is not None:
                return REGION
        if self.communicates and observer.counting():  # the observer counts transfers that Python issues
            return WATCHED
        return ""

    def _kept_memory(self) -> list[Tensor]:
        kept = [memory for bound in self.bounds for memory in bound.kept_memory()]
        return list({memory.data_ptr(): memory for memory in kept}.values())

    def _launched(self, direction: str, why: str, run: Run) -> list[Tensor]:
        self.passed[direction] = why
        return run()

    def states(self, direction: str) -> Iterator[str]:
        """For each kind of inputs that this direction was called with: why it is not captured, empty where it is."""
        if self.why.get(direction):
            yield self.why[direction]
        for key, launches in self.found.items():
            if key[0] == direction:
                yield launches if isinstance(launches, str) else ""
        if direction in self.passed:
            yield self.passed[direction]


def of_layer(bound: BoundSpec, x: Tensor) -> CapturedDirections:
    """The captured directions of one layer, for tensors on the device of x."""
    why = {direction: obstacle(bound, direction) for direction in DIRECTIONS}
    return CapturedDirections(bound.spec.name, (bound,), why, x)


@remembered
def obstacle(bound: BoundSpec, direction: str) -> str:
    """Why this direction is never captured: a quantizer is not pure, a GEMM is not of this package, or something is
    communicated neither by launches nor by collectives. Empty: it can be captured."""
    return bound.spec.recipe.beyond_launches or _sends_otherwise(bound.spec, direction)


def _sends_otherwise(spec: LinearSpec, direction: str) -> str:
    """Why transfers of a direction can be neither launches, through memory that ranks map, nor collectives that are called
    between launches; empty: they can be, or there are none."""
    gemms = ("fprop",) if direction == FORWARD else ("dgrad", "wgrad")
    steps = [getattr(spec.style, gemm) for gemm in gemms]
    communicates = spec.tp > 1 and (
        spec.recipe.amax_scope != "table" or any(step.gather or step.reduce for step in steps)
    )
    for gemm in gemms if communicates else ():
        strategy, mapped = getattr(spec.overlap, gemm), transport_of(spec.tp_group) is not None
        if not (strategy.launches_only if mapped else strategy.calls_only):
            by = "" if mapped else f" by {carrier(spec.tp_group)}, since {why_not(spec.tp_group)}"
            return f"{gemm} is {strategy.name}, which sends step by step{by}"
    return ""


def describe(model: nn.Module) -> list[str]:
    """Lines that say in how many layers each direction is captured, and why it is launched step by step in the others."""
    lines = []
    for direction in DIRECTIONS:
        count, reasons = 0, dict[str, list[str]]()
        for core in cores(model):
            states = list(dict.fromkeys(state for each in _called(core) for state in each.states(direction)))
            count += "" in states
            for why in states if "" not in states else [each for each in states if each not in (*_PASSING, "")]:
                reasons.setdefault(why, []).append(core.spec.name)
        if count:
            lines.append(f"{direction}: captured in {count} layers")
        for why, names in reasons.items():
            some = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            lines.append(f"{direction}: launched step by step in {some}: {why}")
    return lines


_PASSING = (SEEN, WATCHED, REGION)  # reasons that pass by themselves: `describe` leaves them out


def _called(core: Any) -> Iterator[CapturedDirections]:
    """The captured directions of all calls of a layer so far."""
    parts = core.weights.parts
    for bound in core.bounds():
        for call in (*bound.calls.values(), *(parts.calls.values() if parts is not None else ())):
            yield call if isinstance(call, CapturedDirections) else call.captured
