"""A direction of a linear as captured launches.

A layer that casts and multiplies by kernels of this package, and communicates through memory that ranks map
(`dlp.comm.mapped`) or not at all, launches the same for tensors of the same shapes; only addresses differ. So does one that
communicates by collectives, which are called between its launches. Such a direction is captured (`dlp.kernels.captured`):

    first call      the functions of `linear_fn`, as everywhere else; plans, workspaces and tables come to be
    second call     the same functions are captured, and the captured launches run
    further calls   the captured launches: memory for the results, one call; with collectives, one for each stretch of launches

The bits are the same captured and not. What is not captured is launched step by step, and `describe` says why.
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
LIMIT = 64  # a layer whose shapes vary without end runs without programs
SEEN = "called once with such tensors"
REGION = "its forward ran under scales of an autocast region, or before a step boundary changed them"
WATCHED = "an observer counts what it sends"
SHARED = "tensors that it is given share memory"
VARIES = f"more than {LIMIT} shapes, strides and alignments came"
Run = Callable[[], list[Tensor]]
RunForward = Callable[[], tuple[list[Tensor], list[Tensor]]]
Key = tuple[Any, ...]


class CapturedDirections:
    """Those of a layer, or of several with what is between them (`dlp.ops.captured`).

    why        why a direction is not captured, whatever comes; empty: it can be. `possible`: whether it can
    found      captured launches by direction and what they depend on beside addresses; a string where there are none: not yet,
               or for the reason that it says
    passed     why a call of a direction was launched step by step last
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
        """What `run`, a `run_forward` of `count` y, returns, which reads these tensors. `key`: what it depends on beside
        addresses, as far as that is not the same for all calls of these."""

        def flat() -> list[Tensor]:
            ys, kept = run()
            return [*ys, *kept]

        made = self.run((FORWARD, *key), reads, flat)
        return made[:count], made[count:]

    def backward(self, key: Key, run: Run, reads: Sequence[Tensor]) -> list[Tensor]:
        """What `run`, a `run_backward`, returns, which reads these tensors."""
        return self.run((BACKWARD, *key), reads, run)

    def run(self, key: Key, given: Sequence[Tensor], run: Run) -> list[Tensor]:
        """What `run` returns, which reads the tensors given. `key`: a direction, and what it depends on."""
        direction, why = key[0], self.obstacle()
        if why:
            return self._launched(direction, why, run)
        found = self.found.get(key)
        if isinstance(found, CapturedLaunches):
            with self.ranges[direction]:
                return found(given)
        if not self.possible[direction]:
            return run()
        if found is None and len(self.found) >= LIMIT:
            return self._launched(direction, VARIES, run)
        if found is None:
            self.found[key] = SEEN
        if found is not SEEN:
            return run()
        if not captured.disjoint(given):
            return self._launched(direction, SHARED, run)
        try:
            made = captured.record(run, given, self._kept_memory())
        except NotPlain as why:
            self.found[key] = str(why)
            return run()
        self.found[key] = made
        return made(given)

    def obstacle(self) -> str:
        """Why nothing that is captured may run now; empty: it may."""
        for session in self.sessions:  # captured launches read the scales in the table
            if session.scales is not None and session.scales.values is not None:
                return REGION
        if self.communicates and observer.counting():  # what launches send is seen as it is launched from here
            return WATCHED
        return ""

    def _kept_memory(self) -> list[Tensor]:
        kept = [memory for bound in self.bounds for memory in bound.kept_memory()]
        return list({memory.data_ptr(): memory for memory in kept}.values())

    def _launched(self, direction: str, why: str, run: Run) -> list[Tensor]:
        self.passed[direction] = why
        return run()

    def states(self, direction: str) -> Iterator[str]:
        """Of each kind of tensors that this direction was called with: why it is not captured, empty where it is."""
        if self.why.get(direction):
            yield self.why[direction]
        for key, made in self.found.items():
            if key[0] == direction:
                yield made if isinstance(made, str) else ""
        if direction in self.passed:
            yield self.passed[direction]


def of_layer(bound: BoundSpec, x: Tensor) -> CapturedDirections:
    """Those of one layer, for tensors that lie where x does."""
    why = {direction: obstacle(bound, direction) for direction in DIRECTIONS}
    return CapturedDirections(bound.spec.name, (bound,), why, x)


@remembered
def obstacle(bound: BoundSpec, direction: str) -> str:
    """Why this direction is not captured: quantizers are not pure, GEMMs are not those of this package, or something is
    communicated otherwise than by launches. Empty: it can be."""
    return bound.spec.recipe.beyond_launches or _sends_otherwise(bound.spec, direction)


def _sends_otherwise(spec: LinearSpec, direction: str) -> str:
    """Why transfers of a direction, if there are any, are neither launches, through memory that ranks map, in the order they
    start, nor collectives that are called between launches."""
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
    """Which directions of the layers that have run are captured, in lines, and which are launched step by step, by reason."""
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


_PASSING = (SEEN, WATCHED, REGION)  # nothing to tell of a direction that is captured for other calls


def _called(core: Any) -> Iterator[CapturedDirections]:
    """Those of all calls of a layer, whatever they read."""
    parts = core.weights.parts
    for bound in core.bounds():
        for call in (*bound.calls.values(), *(parts.calls.values() if parts is not None else ())):
            yield call if isinstance(call, CapturedDirections) else call.captured
