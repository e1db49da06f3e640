"""The printed plan of a Sequential: groups, the ops of each pass, and the reasons against fusions that do not apply."""

from __future__ import annotations

from typing import Any

from dlp.ops.basic.quantize import DENSE_DY
from dlp.ops.fuser import OperationFuser
from dlp.ops.fusions import fuse


class SequencePlan:
    """The printable plan of a Sequential. lines: for each group a text, which may have several lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def group_plan(fuser: OperationFuser) -> str:
    """Return the text of one fuser: the ops of each pass, as in the last call, and notes. Before the first call the fusions are
    applied without knowledge of recipes and gradients."""
    notes: list[str]
    if fuser.last is not None:
        passes: Any = [[placed.op for placed in ops] for ops in (fuser.last.forward, fuser.last.backward)]
        notes = list(fuser.last.notes)
        notes += [line for captured in fuser.last.captured for line in captured.describe()]
    else:
        notes = []
        passes = [fuse(which, fuser.basic_ops, None, notes) for which in ("forward", "backward")]
    lines = [f"ops {', '.join(fuser.names)}"]
    for which, ops in zip(("forward", "backward"), passes, strict=True):
        lines.append(f"  {which:9}{' | '.join(_name_of(op) for op in ops)}")
    cores = [op.core for _, _, op in fuser.linears]
    notes += [note for core in cores for note in sorted(core.session.noted) if note.startswith(f"{core.spec.name}: ")]
    notes += [fuser.autocast] if fuser.autocast else []
    named = list(zip(fuser.names, fuser.basic_ops, strict=True))
    notes += [f"{name} {note}" for name, op in named for note in op.plan_notes]
    notes += [
        f"under torch.compile or a dispatch mode, {name} {op.traced_note}" for name, op in named if op.traced_note
    ]
    notes += _without_quantizers(fuser)
    return "\n".join([*lines, *[f"  {note}" for note in dict.fromkeys(notes)]])


def _without_quantizers(fuser: OperationFuser) -> list[str]:
    """Return a line for each user-defined op that in eager calls receives quantizers (for `quantize_for`) which it does not
    receive under torch.compile or a dispatch mode. Before the first eager call, all user-defined ops are assumed to receive
    quantizers, if a linear of the fuser quantizes x."""
    if fuser.last is None:
        quantizes = any(not op.core.spec.recipe.x.keeps_source for _, _, op in fuser.linears)
        receives = [(quantizes, quantizes)] * len(fuser.basic_ops)
    else:
        receives = [
            (dx is not None and not dx.keeps_source, y is not None and not y.keeps_source)
            for dx, y in fuser.last.quantizers
        ]
    lines = []
    for name, op, (dx, y) in zip(fuser.names, fuser.basic_ops, receives, strict=True):
        if op.takes_keywords and op.overrides("plain") and (dx or y):
            lines.append(f"{name} receives no quantizers: traced calls run plain, and the next linear casts")
        elif op.takes_keywords and dx:
            lines.append(f"{name} {DENSE_DY}")
    return [f"under torch.compile or a dispatch mode, {line}" for line in lines]


def _name_of(op: Any) -> str:
    """Return the class name of an op and, for a fused op, the class names of its basic ops."""
    name = type(op).__name__
    return name if len(op.basic_ops) == 1 else f"{name}[{', '.join(type(basic).__name__ for basic in op.basic_ops)}]"
