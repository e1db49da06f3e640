"""Tests of refusals: the exceptions that calls raise, and the messages of the exceptions.

    with refuses("expected a folder"):                                  # pytest.raises(ValueError, match=...)
        plan(model)
    assert must_raise(ValueError, plan, model).startswith("...")        # fails if plan(model) returns
    assert may_raise(ValueError, plan, model) == ""                     # plan(model) returned

The kind of the exception is ValueError unless `refuses` gets another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Kinds = type[BaseException] | tuple[type[BaseException], ...]


def refuses(message: str, kind: type[BaseException] = ValueError) -> pytest.RaisesExc[BaseException]:
    """Return the context that fails unless an exception of `kind` is raised whose text contains the pattern `message`."""
    return pytest.raises(kind, match=message)


def must_raise(kinds: Kinds, call: Callable[..., Any], /, *args: Any, **options: Any) -> str:
    """Return the message of the exception that `call(*args, **options)` raises; fail unless the exception is one of
    `kinds`."""
    with pytest.raises(kinds) as raised:
        call(*args, **options)
    return str(raised.value)


def may_raise(kinds: Kinds, call: Callable[..., Any], /, *args: Any, **options: Any) -> str:
    """Return the message of the exception of `kinds` that `call(*args, **options)` raises, or "" if the call returns."""
    try:
        call(*args, **options)
    except kinds as error:
        return str(error)
    return ""
