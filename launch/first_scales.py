"""Where delayed scales come from before there was a step: passes forward and backward whose amaxes count, without an update.

A delayed scale starts at 1. With it most gradients are below the smallest code and become 0, and those of the layers before
with them; weights are cast to a few codes. A run of 1,526 steps whose first step cast so ended 1.9 % above bf16; one whose
amaxes were known, 0.1 % (bench/results/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import dlp
from dlp.parallel.model.session import Session

# The first pass finds the amaxes of x, of w and of what the residual stream brings, the second those behind them. In a model
# of six blocks the third moved no scale by more than 0.15 octaves, and the next ones none by more than 0.06.
PASSES = 3


class FirstScales:
    """Which delayed scales follow from no amax yet. `resumed`: those of now do, since a checkpoint brought them."""

    def __init__(self, session: Session) -> None:
        self._session, self._known = session, frozenset[str]()

    def resumed(self) -> None:
        self._known = self._names()

    def find(self, model: nn.Module, forward_backward: Callable[[], object]) -> int:
        """Run `forward_backward`, which leaves no gradients, where scales are new since the last call; how many that are."""
        names = self._names()
        new, self._known = names - self._known, names
        for _ in range(PASSES if new else 0):
            forward_backward()
            dlp.end_step(model)
        return len(new)

    def _names(self) -> frozenset[str]:
        return frozenset(self._session.scaling.table.names) if self._session.has_slots() else frozenset()
