"""Check of the options of a recipe, which come from configuration files, against the annotations of the function `recipe`.

The signature of `recipe` defines names, defaults and allowed values of options. Annotations may be bool, int, float, str,
Literal, Callable, Sequence, Mapping, and unions of these.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def check_option(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError, with the allowed values, if a value does not fit the annotation `hint`. `name`: name of the option, for
    the message."""
    if not _fits(value, hint):
        raise ValueError(f"{name} must be {_describe(hint)}; got {value!r}")


def freeze(value: Any) -> Any:
    """Return a hashable form of a value: lists become tuples, and tables become sorted tuples of pairs."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, freeze(entry)) for key, entry in value.items()))
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if origin is collections.abc.Sequence:
        return isinstance(value, list | tuple) and all(_fits(entry, args[0]) for entry in value)
    if origin is collections.abc.Callable:
        return callable(value)
    return type(value) is origin or (origin is float and type(value) is int)


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, args))
    if origin is collections.abc.Mapping:
        return f"a table whose keys are {_describe(args[0])} and whose values are {_describe(args[1])}"
    if origin is collections.abc.Sequence:
        return f"a list, each {_describe(args[0])}"
    return PLAIN.get(origin, "a function")
