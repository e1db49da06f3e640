"""Patterns of layer names, for layer groups and recipe changes.

A pattern consists of dotted components, from the root of the model:

    *              any one component; inside a component, shell wildcards: q_*, layer?, [qk]_proj
    **             any number of components, including zero
    {a,b}          alternatives, at any position: {q,k,v}_proj, layers.{0,-1}.**
    -1  2:5  -8:   a child, or a slice of children, of the container (ModuleList, Sequential) at this position

Regular expressions are not used: they cannot count from the end of a container, dots need escapes, and an expression that is
right for 4 layers may silently be wrong for 40 layers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_INDEX = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?")


def match_names(names: Iterable[str], lengths: Mapping[str, int], pattern: str, prefix: str = "") -> list[str]:
    """Return the names that `pattern` matches, in order. Raises ValueError for a malformed pattern.

    names    dotted names of layers
    lengths  dotted name of each container (ModuleList, Sequential; "" is the model) -> number of children
    prefix   Hugging Face's `base_model_prefix`, or "": a name also matches if it matches without the prefix
    """
    alternatives = parse(pattern)
    return [
        name
        for name in names
        if any(
            _matches(name.split("."), start, alternative, lengths)
            for start in _starts(name, prefix)
            for alternative in alternatives
        )
    ]


def must_match(
    names: Sequence[str], lengths: Mapping[str, int], pattern: str, prefix: str = "", *, asked_by: str
) -> list[str]:
    """Return the names that `pattern` matches, as `match_names`. Raises ValueError, with the nearest names, if no name matches.

    asked_by   beginning of the message: the setting or function that has the pattern"""
    found = match_names(names, lengths, pattern, prefix)
    if not found:
        near = ", ".join(map(repr, _nearest(pattern, names, prefix))) or "none, the model has no layer to match"
        raise ValueError(
            f"{asked_by}: pattern {pattern!r} matches no layer; nearest: {near}{_ranges(pattern, lengths)}"
        )
    return found


def parse(pattern: str) -> list[list[str]]:
    """Return the alternatives of `pattern` without braces, each as a list of components. Raises ValueError for a malformed
    pattern."""
    alternatives = [expanded.split(".") for expanded in _expand(pattern)]
    for component in (component for alternative in alternatives for component in alternative):
        if not component:
            raise ValueError(f"pattern {pattern!r} has an empty component: write the dots between names only")
        if "**" in component and component != "**":
            raise ValueError(f"pattern {pattern!r}: '**' matches whole components only; inside {component!r} write '*'")
    return alternatives


def _expand(pattern: str) -> list[str]:
    """Expand `a.{b,c}` to `a.b` and `a.c`, innermost braces first."""
    braces = _ALTERNATIVES.search(pattern)
    if braces is None:
        if "{" in pattern or "}" in pattern:
            raise ValueError(f"pattern {pattern!r} has an unpaired brace: alternatives are written {{a,b}}")
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [full for option in braces[1].split(",") for full in _expand(before + option.strip() + after)]


def _starts(name: str, prefix: str) -> list[int]:
    """Return the positions of components of `name` at which a pattern may begin."""
    return [0, prefix.count(".") + 1] if prefix and name.startswith(prefix + ".") else [0]


def _matches(parts: Sequence[str], at: int, pattern: Sequence[str], lengths: Mapping[str, int]) -> bool:
    """Return whether the components `pattern` match all of parts[at:]. parts[:at] is the path of the container to which an
    index in `pattern` refers."""
    if not pattern:
        return at == len(parts)
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(parts, end, rest, lengths) for end in range(at, len(parts) + 1))
    return at < len(parts) and _component_matches(parts, at, head, lengths) and _matches(parts, at + 1, rest, lengths)


def _component_matches(parts: Sequence[str], at: int, head: str, lengths: Mapping[str, int]) -> bool:
    if not _INDEX.fullmatch(head):
        return fnmatchcase(parts[at], head)
    length = lengths.get(".".join(parts[:at]))
    if length is None or not parts[at].isdigit():
        return parts[at] == head
    return int(parts[at]) in _indices(head, length)


def _indices(index: str, length: int) -> Sequence[int]:
    """Return the indices of the children that `0`, `-1`, `2:5` or `-8:` selects in a container with `length` children, by
    Python's rules."""
    if ":" in index:
        start, stop = (int(bound) if bound else None for bound in index.split(":"))
        return range(length)[start:stop]
    return (int(index) + length if index.startswith("-") else int(index),)


def indices_in(pattern: str, length: int) -> list[int] | None:
    """Return the numbers in the indices and slices of `pattern`. None: a shell wildcard of the pattern, such as `[0-3]`,
    matches only some of the indices of a container with `length` children."""
    components = [component for alternative in parse(pattern) for component in alternative]
    for component in components:
        if not _INDEX.fullmatch(component) and len({fnmatchcase(str(i), component) for i in range(length)}) > 1:
            return None
    return [int(number) for each in components if _INDEX.fullmatch(each) for number in each.split(":") if number]


def _nearest(pattern: str, names: Sequence[str], prefix: str) -> list[str]:
    """Return up to three names that resemble `pattern`. Of names that differ only in indices, only the first is returned."""

    def shape(name: str) -> str:
        dropped = name.removeprefix(prefix + ".") if prefix else name
        return ".".join("*" if _INDEX.fullmatch(part) else part for part in dropped.split("."))

    first_of_shape = {shape(name): name for name in reversed(names)}
    return [first_of_shape[near] for near in difflib.get_close_matches(shape(pattern), first_of_shape, n=3, cutoff=0.0)]


def _ranges(pattern: str, lengths: Mapping[str, int]) -> str:
    """Return text for the message: the index range of each container, if `pattern` has an index, because the index
    is then the most likely mistake; else ""."""
    if not any(_INDEX.fullmatch(component) for alternative in parse(pattern) for component in alternative):
        return ""
    return "".join(
        f"; {name or 'the model'!r} has children 0..{length - 1}" for name, length in lengths.items() if length
    )
