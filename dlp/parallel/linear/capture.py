"""Captured launches (`dlp.runtime.capture`) of the passes of a linear, and the reasons why a pass is not captured.

For inputs of equal shapes, strides and alignment a pass launches the same kernels; only addresses differ. A pass is captured if
casts and GEMMs are kernels of dlp, and if all transfers go through mapped memory (`dlp.comm.mapped`) or are collectives, which
are called between native calls. Results are bitwise equal with and without capture. The kernels of other passes are launched
one by one, and `describe` states the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dlp.comm import observer
from dlp.comm.transport import carrier, transport_of, why_not
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, cores, remembered
from dlp.runtime.capture import FORWARD, PASSES, SEEN, CapturedPasses

REGION = "the forward used scales of an autocast region, or scales from before a step boundary"
WATCHED = "an observer counts the transfers"


def captured_passes(name: str, bounds: Sequence[BoundSpec], why: Mapping[str, str], x: Tensor) -> CapturedPasses:
    """Create the captured passes of layers that run as one autograd function.

    bounds   the bound specs of the layers
    why      for each pass, the reason why the pass is never captured; "": the pass can be captured
    x        a tensor on the device of the layers
    """
    sessions = {bound.session for bound in bounds}
    communicates = any(bound.spec.group is not None for bound in bounds)

    def obstacle() -> str:
        for session in sessions:  # captured launches read only scales of the session's table
            if session.scales is not None and session.scales.values is not None:
                return REGION
        if communicates and observer.counting():  # the observer cannot count transfers of captured launches
            return WATCHED
        return ""

    def memory() -> list[Tensor]:
        kept = [memory for bound in bounds for memory in bound.kept_memory()]
        return list({memory.data_ptr(): memory for memory in kept}.values())

    passes = CapturedPasses(name, why, x, obstacle, memory)
    for session in sessions:
        session.passes.add(passes)
    return passes


def of_layer(bound: BoundSpec, x: Tensor) -> CapturedPasses:
    """Create the captured passes of one layer, for tensors on the device of x."""
    why = {pass_name: obstacle(bound, pass_name) for pass_name in PASSES}
    return captured_passes(bound.spec.name, (bound,), why, x)


@remembered
def obstacle(bound: BoundSpec, pass_name: str) -> str:
    """Return the reason why a pass of this layer is never captured: the layer is invariant, a cast or GEMM is not a kernel of
    dlp, or a transfer is neither a launch nor a collective. "": the pass can be captured."""
    if bound.spec.invariant:
        return "invariant = true: a sum over segments runs several torch operations"
    return bound.spec.recipe.beyond_launches or _sends_otherwise(bound.spec, pass_name)


def _sends_otherwise(spec: LinearSpec, pass_name: str) -> str:
    """Return the reason if a transfer of the pass is neither a launch (through mapped memory) nor a collective between
    launches. "": there is no such transfer."""
    gemms = ("fprop",) if pass_name == FORWARD else ("dgrad", "wgrad")
    steps = [getattr(spec.style, gemm) for gemm in gemms]
    communicates = spec.tp > 1 and (
        spec.recipe.amax_scope != "table" or any(step.gather or step.reduce for step in steps)
    )
    for gemm in gemms if communicates else ():
        strategy, mapped = getattr(spec.overlap, gemm), transport_of(spec.tp_group) is not None
        if not (strategy.launches_only if mapped else strategy.calls_only):
            by = "" if mapped else f" by {carrier(spec.tp_group)}, since {why_not(spec.tp_group)}"
            return f"{gemm} is {strategy.name}, whose transfers are issued one by one{by}"
    return ""


def describe(model: nn.Module) -> list[str]:
    """Return lines of text: the number of layers in which each pass is captured, and the reasons why other layers are not
    captured, without temporary reasons."""
    lines = []
    for pass_name in PASSES:
        count, reasons = 0, dict[str, list[str]]()
        for core in cores(model):
            states = list(dict.fromkeys(state for each in _called(core) for state in each.states(pass_name)))
            count += "" in states
            for why in states if "" not in states else [each for each in states if each not in (*_PASSING, "")]:
                reasons.setdefault(why, []).append(core.spec.name)
        if count:
            lines.append(f"{pass_name}: captured in {count} layers")
        for why, names in reasons.items():
            some = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            lines.append(f"{pass_name}: launched one by one in {some}: {why}")
    return lines


_PASSING = (SEEN, WATCHED, REGION)  # temporary reasons, which `describe` leaves out


def _called(core: Any) -> Iterator[CapturedPasses]:
    """Yield the captured passes of all calls of a layer so far."""
    parts = core.weights.parts
    for bound in core.bounds():
        for call in (*bound.calls.values(), *(parts.calls.values() if parts is not None else ())):
            yield call if isinstance(call, CapturedPasses) else call.captured
