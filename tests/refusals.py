"""Messages of the exceptions that calls raise.

assert must_raise(ValueError, plan, model).startswith("...")         # fails if `plan(model)` returns
assert may_raise(ValueError, plan, model) == ""                      # `plan(model)` returned
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Kinds = type[BaseException] | tuple[type[BaseException], ...]


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
