"""Context managers that restore the table of kernels and the list of fusions after tests, and after examples in the
documentation, that register entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlp.kernels import registry
from dlp.ops.fusions import REGISTERED


@contextmanager
def restored_table() -> Iterator[None]:
    """At the end of the context, remove operations and kernels that were registered in the context."""
    before = {operation: list(entries) for operation, entries in registry._ENTRIES.items()}
    try:
        yield
    finally:
        for operation in list(registry._ENTRIES):
            registry._ENTRIES[operation] = before.get(operation, [])
            registry._changed(operation)
            if operation not in before:
                del registry._ENTRIES[operation], registry._ON[operation]


@contextmanager
def restored_fusions(none: bool = False) -> Iterator[None]:
    """At the end of the context, remove fusions that were registered in the context. `none`: begin with an empty list of
    fusions, so that basic ops run one by one."""
    before = REGISTERED.forward[:], REGISTERED.backward[:]
    if none:
        _set([], [])
    try:
        yield
    finally:
        _set(*before)


def _set(forward: list[Any], backward: list[Any]) -> None:
    REGISTERED.forward[:], REGISTERED.backward[:] = forward, backward
    REGISTERED.version += 1
