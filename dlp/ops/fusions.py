"""Fusions: functions that replace ops of a sequence by fused ops, in forward, in backward or in both.

    func(ops, *, recipe) -> ops     recipe: the recipe of the first linear; None: there is no linear, or the plan is printed
                                    before the first call

The ops that a fusion returns must expand to the same basic ops in the same order. The fusions of `dlp.ops.fused` (one file per
fusion) are applied first, then the fusions of users in the order of their registration. A fusion that is registered with
`prepend=True` is applied before all fusions registered so far. After a registration all fusers make new plans.
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
    """The registered fusions of each pass, in the order in which they are applied.

    version: number of registrations so far; fusers do not use plans that were made at another version.
    """

    forward: list[Fusion] = field(default_factory=list)
    backward: list[Fusion] = field(default_factory=list)
    version: int = 0

    def add(self, which: str, func: Fusion, prepend: bool) -> None:
        if not callable(func):
            raise TypeError(f"a fusion is a function of ops; got {type(func).__name__}")
        fusions: list[Fusion] = getattr(self, which)
        fusions.insert(0 if prepend else len(fusions), func)
        self.version += 1


REGISTERED = Fusions()


def load_shipped() -> None:
    """Import the modules in `dlp/ops/fused`; each module registers its fusions."""
    folder = Path(__file__).parent / "fused"
    for name in sorted(module.name for module in pkgutil.iter_modules([str(folder)])):
        importlib.import_module(f"dlp.ops.fused.{name}")


def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses operations in forward.

    After a registration all sequences make new plans.

    Args:
        func: `func(ops, *, recipe)` returns operations that expand to the same basic operations in the same order; `recipe` is
            the recipe of the first linear; None if there is no linear, or if the plan is printed before the first call.
        prepend: apply `func` before all fusions that are registered so far.

    Examples:
        >>> ops.register_forward_fusion(lambda operations, *, recipe: operations)
    """
    REGISTERED.add("forward", func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses operations in backward. The function gets the operations in the order of forward.

    After a registration all sequences make new plans.

    Args:
        func: `func(ops, *, recipe)` returns operations that expand to the same basic operations in the same order; `recipe` is
            the recipe of the first linear; None if there is no linear, or if the plan is printed before the first call.
        prepend: apply `func` before all fusions that are registered so far.

    Examples:
        >>> ops.register_backward_fusion(lambda operations, *, recipe: operations)
    """
    REGISTERED.add("backward", func, prepend)


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Register a function that fuses operations in forward and in backward.

    Args:
        func: as for `ops.register_forward_fusion`.
        prepend: as for `ops.register_forward_fusion`.

    Examples:
        >>> ops.register_forward_backward_fusion(lambda operations, *, recipe: operations)
    """
    for which in ("forward", "backward"):
        REGISTERED.add(which, func, prepend)


def fuse(which: str, basic_ops: Ops, recipe: Any, notes: list[str]) -> Ops:
    """Apply all fusions of pass `which` ("forward" or "backward") to basic ops, and return the resulting ops.

    notes: gets a line for each pattern that matches but is not fused, with the reason. Raises RuntimeError if a fusion loses,
    adds or reorders a basic op, or does not return a sequence of ops.
    """
    ops: Ops = list(basic_ops)
    for func in getattr(REGISTERED, which):
        name = f"{which} fusion {getattr(func, '__name__', func)}"
        try:
            fused = func(ops, recipe=recipe, notes=notes) if isinstance(func, Pattern) else func(ops, recipe=recipe)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
        due = f"{name} must return ops that expand to [{_names(basic_ops)}]"
        if not isinstance(fused, Sequence) or any(isinstance(op, type) or not hasattr(op, "basic_ops") for op in fused):
            raise RuntimeError(f"{due}; it returned {fused!r}")
        ops = list(fused)
        expanded = [basic for op in ops for basic in op.basic_ops]
        pairs = enumerate(zip_longest(expanded, basic_ops))
        moved = next((i for i, (op, expected) in pairs if op is not expected), None)
        if moved is not None:
            raise RuntimeError(
                f"{due}; it returned [{_names(ops)}], which expand to [{_names(expanded)}]: op {moved} is lost, added or "
                f"moved"
            )
    return ops


def _names(ops: Ops) -> str:
    return ", ".join(type(op).__name__ for op in ops)


@dataclass(frozen=True)
class Step:
    """Element of a `Pattern`. It matches one op that is an instance of `kind`; if `optional`, the op may be absent."""

    kind: type
    optional: bool = False


def maybe(kind: type) -> Step:
    """Return an optional element of a `Pattern`."""
    return Step(kind, optional=True)


class Pattern:
    """A fusion that replaces consecutive ops of given classes by a fused op.

    make       creates the fused op: `make(*ops)`
    steps      for each op its class, or a `Step`
    obstacle   `obstacle(*ops)` returns the reason why the matched ops cannot be fused; None: they can be fused
    """

    def __init__(
        self, make: Callable[..., Any], *steps: type | Step, obstacle: Callable[..., str | None] = lambda *ops: None
    ) -> None:
        self.make, self.obstacle, self.__name__ = make, obstacle, getattr(make, "__name__", "fusion")
        self.steps = [step if isinstance(step, Step) else Step(step) for step in steps]

    def __call__(self, ops: Ops, *, recipe: Any = None, notes: list[str] | None = None) -> Ops:
        fused, at = [], 0
        while at < len(ops):
            match = self._match(ops[at:])
            why = self.obstacle(*match) if match else None
            if match and why is None:
                fused.append(self.make(*match))
                at += len(match)
                continue
            if why and notes is not None:
                notes.append(f"{_names(match)}: {why}")
            fused.append(ops[at])
            at += 1
        return fused

    def _match(self, ops: Ops) -> Match:
        """Return the leading ops that match the pattern, including the optional ops that are present; (): no match."""
        matched: list[Any] = []
        for step in self.steps:
            if len(matched) < len(ops) and isinstance(ops[len(matched)], step.kind):
                matched.append(ops[len(matched)])
            elif not step.optional:
                return ()
        return matched
