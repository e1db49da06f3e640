"""The closure of `optimizer.step(closure)`, in the arguments that hooks of optimizers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """The closure that `step` is called with; `args` begin with the optimizer."""
    closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> Arguments:
    """The same arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}
