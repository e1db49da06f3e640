"""Delayed scales before the first step: forward and backward passes that record amaxes, without an update.

A delayed scale starts at 1. With this scale most gradients are below the smallest code and become 0, as do gradients of the
layers before; weights are cast to a few codes. A run of 1,526 steps that started so ended 1.9 % above bf16; a run with
initial amaxes 0.1 % (bench/results/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import dlp
from dlp.parallel.model.session import session_of
from launch.ranks import rank_objects

# Number of passes. The first pass finds the amaxes of x and w and of the residual stream, the second pass the amaxes of
# later tensors. In a model of six blocks the third pass moved no scale by more than 0.15 octaves, and later passes
# moved none by more than 0.06.
PASSES = 3


def find(model: nn.Module, forward_backward: Callable[[], object]) -> int:
    """Run `forward_backward`, which must leave no gradients, for scales without an amax: in a new model, after a recipe
    change, and after resuming with other recipes. All ranks call it together. Returns the number of scales."""
    new = frozenset[str]().union(*rank_objects.from_all(without_amax(model)))
    for _ in range(PASSES if new else 0):
        forward_backward()
        dlp.end_step(model)
    return len(new)


def without_amax(model: nn.Module) -> frozenset[str]:
    """Return the names of delayed scales of this rank that still have their initial value."""
    session = session_of(model)
    if not session.has_slots():
        return frozenset()
    slots = session.scaling.table.state_dict()
    untouched = [(slot["history"] == 0).all() & (slot["scale"] == 1) for slot in slots.values()]
    return frozenset(name for name, is_new in zip(slots, torch.stack(untouched).tolist(), strict=True) if is_new)
