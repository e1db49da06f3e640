"""Initial values of delayed scales: before the first step, forward and backward run without an update, to record amaxes.

Without amaxes a delayed scale is 1. With this scale most gradients are below the smallest code and become 0, and so do the
gradients of earlier layers; weights are cast to only a few codes. Runs that start with such scales end at a higher loss
(bench/results/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import dlp
from dlp.parallel.model.session import session_of
from launch.ranks import rank_objects

# Number of times that forward and backward run. The first run records valid amaxes of weights and of the inputs of early
# layers; later tensors become valid in the second run, and the third run refines them. Further runs hardly change the scales.
PASSES = 3


def find(model: nn.Module, forward_backward: Callable[[], object]) -> int:
    """Run `forward_backward` `PASSES` times if delayed scales without amaxes exist: in a new model, after a recipe change, and
    after resuming with other recipes. `forward_backward` must leave no gradients. Collective. Returns the number of these
    scales."""
    new = frozenset[str]().union(*rank_objects.from_all(without_amax(model)))
    for _ in range(PASSES if new else 0):
        forward_backward()
        dlp.end_step(model)
    return len(new)


def without_amax(model: nn.Module) -> frozenset[str]:
    """Return the names of the delayed scales on this rank that have no recorded amax."""
    session = session_of(model)
    if not session.has_slots():
        return frozenset()
    slots = session.scaling.table.state_dict()
    untouched = [(slot["history"] == 0).all() & (slot["scale"] == 1) for slot in slots.values()]
    return frozenset(name for name, is_new in zip(slots, torch.stack(untouched).tolist(), strict=True) if is_new)
