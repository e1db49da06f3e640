"""Fusions: functions that replace some ops of a sequence by fused ones, in one direction or in both.

    func(ops, *, recipe) -> ops     `recipe`: that of the first linear, None where there is none

What comes back must expand to the same basic ops in order. Those of `dlp.ops.fused`, one file each, come first; then
registered ones, in order, `prepend=True` before all. A plan is made when a fuser first runs in a state (`dlp.ops.fuser`), so
registering reaches plans that are made afterwards.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

Ops = Sequence[Any]
Fusion = Callable[..., Ops]
Match = Sequence[Any]


@dataclass
class Fusions:
    """The registered ones, by direction. `version`: plans of another one are old."""

    forward: list[Fusion] = field(default_factory=list)
    backward: list[Fusion] = field(default_factory=list)
    version: int = 0

    def add(self, which: str, func: Fusion, prepend: bool) -> None:
        if not callable(func):
            raise TypeError(f"a fusion is a function of ops; got {type(func).__name__}")
        found: list[Fusion] = getattr(self, which)
        found.insert(0 if prepend else len(found), func)
        self.version += 1


REGISTERED = Fusions()


def load_shipped() -> None:
    """Register those that dlp ships, by listing their folder: with `dlp.ops`, before anyone registers others."""
    folder = Path(__file__).parent / "fused"
    for name in sorted(module.name for module in pkgutil.iter_modules([str(folder)])):
        importlib.import_module(f"dlp.ops.fused.{name}")


def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Apply `func` to the ops of forward passes."""
    REGISTERED.add("forward", func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Apply `func` to the ops of backward passes, which it is given in the order of forward."""
    REGISTERED.add("backward", func, prepend)


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Apply `func` to the ops of both."""
    for which in ("forward", "backward"):
        REGISTERED.add(which, func, prepend)


def fuse(which: str, basic_ops: Ops, recipe: Any, notes: list[str]) -> Ops:
    """The ops of one direction. RuntimeError where a fusion loses, adds or moves a basic op. `notes`: takes what was not
    fused, and why."""
    ops: Ops = list(basic_ops)
    for func in getattr(REGISTERED, which):
        name = f"{which} fusion {getattr(func, '__name__', func)}"
        try:
            its = func(ops, recipe=recipe, notes=notes) if isinstance(func, Pattern) else func(ops, recipe=recipe)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
        due = f"{name} must return ops that expand to [{_names(basic_ops)}]"
        if not isinstance(its, Sequence) or any(isinstance(op, type) or not hasattr(op, "basic_ops") for op in its):
            raise RuntimeError(f"{due}; it returned {its!r}")
        ops = list(its)
        found = [basic for op in ops for basic in op.basic_ops]
        pairs = enumerate(zip_longest(found, basic_ops))
        other = next((place for place, (mine, its) in pairs if mine is not its), None)
        if other is not None:
            raise RuntimeError(
                f"{due}; it returned [{_names(ops)}], which expand to [{_names(found)}]: op {other} is lost, added or moved"
            )
    return ops


def _names(ops: Ops) -> str:
    return ", ".join(type(op).__name__ for op in ops)


@dataclass(frozen=True)
class Step:
    """An op of a pattern: of this class exactly, or of a subclass."""

    kind: type
    optional: bool = False


def maybe(kind: type) -> Step:
    return Step(kind, optional=True)


class Pattern:
    """A fusion of neighbours: the longest run of ops of these classes becomes `make(*ops)`, an op of dlp's own.

    obstacle   of matched ops: why they are not fused, None: they are
    """

    def __init__(
        self, make: Callable[..., Any], *steps: type | Step, obstacle: Callable[..., str | None] = lambda *ops: None
    ) -> None:
        self.make, self.obstacle, self.__name__ = make, obstacle, getattr(make, "__name__", "fusion")
        self.steps = [step if isinstance(step, Step) else Step(step) for step in steps]

    def __call__(self, ops: Ops, *, recipe: Any = None, notes: list[str] | None = None) -> Ops:
        made, at = [], 0
        while at < len(ops):
            match = self._match(ops[at:])
            why = self.obstacle(*match) if match else None
            if match and why is None:
                made.append(self.make(*match))
                at += len(match)
                continue
            if why and notes is not None:
                notes.append(f"{_names(match)}: {why}")
            made.append(ops[at])
            at += 1
        return made

    def _match(self, ops: Ops) -> Match:
        found: list[Any] = []
        for step in self.steps:
            if len(found) < len(ops) and isinstance(ops[len(found)], step.kind):
                found.append(ops[len(found)])
            elif not step.optional:
                return ()
        return found
