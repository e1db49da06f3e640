"""A direction of a linear as captured launches.

A layer that casts and multiplies by kernels of this package, and communicates through memory that ranks map
(`dlp.comm.transport`) or not at all, launches the same for tensors of the same shapes; only addresses differ. Such a direction
is captured (`dlp.kernels.captured`):

    first call      the functions of `linear_fn`, as everywhere else; plans, workspaces and tables come to be
    second call     the same functions are captured, and the captured launches run
    further calls   the captured launches: memory for the results, one call

The bits are the same captured and not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dlp.comm import observer
from dlp.comm.transport import transport_of
from dlp.kernels import captured
from dlp.kernels.captured import CapturedLaunches, NotPlain
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, remembered
from dlp.quant.gemm import own_gemm
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import GEMMS

DIRECTIONS = FORWARD, BACKWARD = "forward", "backward"
LIMIT = 64  # a layer whose shapes vary without end runs without programs
SEEN = "seen once"
Run = Callable[[], list[Tensor]]
RunForward = Callable[[], tuple[list[Tensor], list[Tensor]]]
Key = tuple[Any, ...]


class CapturedDirections:
    """Those of a layer.

    possible   whether a direction can be captured
    found      captured launches by direction and what they depend on beside addresses; a string where there are none: not yet,
               or for the reason that it says
    """

    def __init__(self, bound: BoundSpec, x: Tensor) -> None:
        device = captured.possible(x)
        self.bound, self.communicates = bound, bound.spec.group is not None
        self.possible = {direction: device and can_be_captured(bound, direction) for direction in DIRECTIONS}
        self.found: dict[Key, CapturedLaunches | str] = {}

    def forward(
        self, key: Key, run: RunForward, reads: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What `run`, a `run_forward` of `count` y, returns, which reads these tensors. `key`: what it depends on beside
        addresses, as far as that is not the same for all calls of these."""

        def flat() -> list[Tensor]:
            ys, kept = run()
            return [*ys, *kept]

        made = self._run((FORWARD, *key), reads, flat)
        return made[:count], made[count:]

    def backward(self, key: Key, run: Run, reads: Sequence[Tensor]) -> list[Tensor]:
        """What `run`, a `run_backward`, returns, which reads these tensors."""
        return self._run((BACKWARD, *key), reads, run)

    def _run(self, key: Key, given: Sequence[Tensor], run: Run) -> list[Tensor]:
        """What `run` returns, which reads the tensors given."""
        scales = self.bound.session.scales
        if scales is not None and scales.values is not None:  # captured launches read those in the table
            return run()
        if self.communicates and observer.counting():  # what launches send is seen as it is launched from here
            return run()
        found = self.found.get(key)
        if isinstance(found, CapturedLaunches):
            return found(given)
        if not self.possible[key[0]]:
            return run()
        if found is None and len(self.found) < LIMIT:
            self.found[key] = SEEN
        if found is not SEEN or not captured.disjoint(given):
            return run()
        try:
            made = captured.record(run, given, self.bound.kept_memory())
        except NotPlain as why:
            self.found[key] = str(why)
            return run()
        self.found[key] = made
        return made(given)


@remembered
def can_be_captured(bound: BoundSpec, direction: str) -> bool:
    """What is communicated in this direction is launches, too, nothing waits, quantizers are pure and GEMMs those of this
    package."""
    spec = bound.spec
    recipe, formats = spec.recipe, [[quantizer.format for quantizer in spec.recipe.operands(which)] for which in GEMMS]
    known = all(caps_of(quantizer).pure for quantizer in recipe.quantizers()) and not any(
        own_gemm(*pair) for pair in formats
    )
    return known and not spec.options.delay_wgrad and _communicates_by_launches(spec, direction)


def _communicates_by_launches(spec: LinearSpec, direction: str) -> bool:
    """Whether all transfers of a direction, if there are any, go through memory that ranks map, in the order they start."""
    gemms = ("fprop",) if direction == FORWARD else ("dgrad", "wgrad")
    steps = [getattr(spec.style, gemm) for gemm in gemms]
    communicates = spec.tp > 1 and (
        spec.recipe.amax_scope != "table" or any(step.gather or step.reduce for step in steps)
    )
    groups = [spec.amax_group] if spec.amax_group is not None else []
    groups += [spec.tp_group] if communicates else []
    if any(group.size() > 1 and transport_of(group) is None for group in groups):
        return False
    return not communicates or all(getattr(spec.overlap, gemm).launches_only for gemm in gemms)
