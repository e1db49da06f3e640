"""Ops one by one, for what traces or watches: torch.compile, dispatch modes, fake tensors.

Each op runs `plain`, code that autograd differentiates by itself, and a linear its two opaque ops. A norm or an activation
right before a linear runs as its prologue, in the cast of it. So a graph holds no fuser, and `fullgraph=True` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def one_by_one(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    """What the fuser returns."""
    ops, at, place = fuser.basic_ops, 0, 0
    outputs: list[Tensor] = []
    while place < len(ops):
        op = ops[place]
        taken = extra_inputs[at : at + op.num_extra_inputs]
        at += op.num_extra_inputs
        if op.part_of is not None:  # that linear has done it
            place += 1
            continue
        behind = ops[place + 1] if place + 1 < len(ops) else None
        asked = None if behind is None else op.as_prologue(x, behind)
        if asked is not None:
            assert behind is not None
            x = behind.with_prologue(*asked)
            place += 2
            continue
        x = op.plain(x, *taken, **kwargs[place])
        if op.num_extra_outputs:
            x, *more = x
            outputs += more
        place += 1
    return (x, *outputs) if outputs else x
