"""What a Sequential says of itself: groups, the ops of each direction, and what is not fused and why."""

from __future__ import annotations

from typing import Any

from dlp.ops.fuser import OperationFuser
from dlp.ops.fusions import fuse


class SequencePlan:
    """Printed, a line each."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def group_plan(fuser: OperationFuser) -> str:
    """The ops of a fuser as they last ran, or would, before the first call."""
    notes: list[str]
    if fuser.last is not None:
        directions: Any = [[placed.op for placed in its] for its in (fuser.last.forward, fuser.last.backward)]
        notes = list(fuser.last.notes)
        notes += [line for direction in fuser.last.captured for line in direction.said()]
    else:
        notes = []
        directions = [fuse(which, fuser.basic_ops, None, notes) for which in ("forward", "backward")]
    said = [f"ops {', '.join(fuser.names)}"]
    for which, ops in zip(("forward", "backward"), directions, strict=True):
        said.append(f"  {which:9}{' | '.join(_said(op) for op in ops)}")
    notes += [fuser.autocast] if fuser.autocast else []
    traced = zip(fuser.names, fuser.basic_ops, strict=True)
    notes += [f"compiled or watched, {name} {op.traced_otherwise}" for name, op in traced if op.traced_otherwise]
    return "\n".join([*said, *[f"  {note}" for note in dict.fromkeys(notes)]])


def _said(op: Any) -> str:
    name = type(op).__name__
    return name if len(op.basic_ops) == 1 else f"{name}[{', '.join(type(basic).__name__ for basic in op.basic_ops)}]"
