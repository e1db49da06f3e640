"""Ops one by one, for what traces or watches: torch.compile, dispatch modes, fake tensors.

Each op runs `plain`, code that autograd differentiates by itself, and a linear its two opaque ops. A norm or a gate
right before a linear runs as its prologue, in the cast of it. So a graph holds no fuser, and `fullgraph=True` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.parallel.weight.local import local


def one_by_one(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    """What the fuser returns. Ops that conversion has replicated see this rank's tensors in place of their DTensors."""
    held = [(op, dict(op._parameters)) for op in fuser.basic_ops if not hasattr(op, "core")]
    for op, parameters in held:
        sums = getattr(op, "tp_sums", None)
        before = None if sums is None else sums.check_announced
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                op._parameters[name] = local(parameter, getattr(op, "layer_name", type(op).__name__), before=before)
    try:
        return _run(fuser, x, extra_inputs, kwargs)
    finally:
        for op, parameters in held:
            op._parameters.update(parameters)


def _run(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
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
