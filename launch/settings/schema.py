"""Typed settings: one declaration gives the check, the error, the TOML text and the documentation.

A section of a config file is a frozen dataclass derived from `Section`; each of its fields is made by
`setting(rule, doc, default)`. The rule holds both the words of an error and the test, so that documentation and check cannot
disagree. Values are checked when the dataclass is built, whether they came from a file, from the command line or from Python,
and every error is one sentence that starts with the section and key.

No settings library is used: the common libraries are large or compiled, and only a few rules are needed.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Section")
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


LONG = 100  # characters of a value that a message shows
WORD = re.compile(rf"\S{{{2 * LONG},}}")


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one sentence on one line; long words are shortened."""

    def __init__(self, sentence: str) -> None:
        line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in sentence)
        super().__init__(WORD.sub(lambda found: brief(found[0]), line))


def brief(text: str) -> str:
    """Return a text, or both ends of a long text."""
    return text if len(text) <= LONG else f"{text[: LONG // 2]}[... {len(text) - LONG} more ...]{text[-LONG // 2 :]}"


@dataclass(frozen=True)
class Rule:
    """Allowed values of a setting."""

    words: str
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool] = lambda value: True
    store: Callable[[Any], Any] = lambda value: value

    def accepts(self, value: object) -> bool:
        return type(value) in self.kinds and self.holds(value)


def _bounded(bounds: tuple[str, ...]) -> Callable[[Any], bool]:
    limits = [(COMPARE[sign], float(bound)) for sign, bound in map(str.split, bounds)]
    return lambda value: math.isfinite(value) and all(compare(value, bound) for compare, bound in limits)


def integer(*bounds: str, also: tuple[int, ...] = ()) -> Rule:
    """integer(">= 1", also=(-1,)): bounds are "SIGN NUMBER" strings and are printed as they stand."""
    inside = _bounded(bounds)
    words = "an integer " + " and ".join(bounds) + "".join(f", or {value}" for value in also)
    return Rule(words, (int,), lambda value: value in also or inside(value))


def number(*bounds: str) -> Rule:
    return Rule("a number " + " and ".join(bounds), (int, float), _bounded(bounds), float)


def numbers(count: int, *bounds: str) -> Rule:
    one = number(*bounds)
    return Rule(
        f"a list of {count} numbers " + " and ".join(bounds),
        (list, tuple),
        lambda value: len(value) == count and all(map(one.accepts, value)),
        lambda value: tuple(map(float, value)),
    )


def choice(*values: str) -> Rule:
    return Rule(" or ".join(f'"{value}"' for value in values), (str,), values.__contains__)


def flag() -> Rule:
    return Rule("true or false", (bool,))


SWITCH = flag()


def text(words: str = "a string that is not empty") -> Rule:
    return Rule(words, (str,), bool)


def texts() -> Rule:
    one = text()
    return Rule(
        "a list of strings that is not empty",
        (list, tuple),
        lambda value: len(value) > 0 and all(map(one.accepts, value)),
        tuple,
    )


def setting(rule: Rule, doc: str, default: Any = MISSING) -> Any:
    """Declare a field of a Section. A field without a default is required; default None means unset, and is not written
    out."""
    return field(default=default, metadata={"rule": rule, "doc": doc})


def rule_of(setting: Field) -> Rule:
    """Return the rule of a field. Fields that dlp declares (options of layers) have no rule and are checked by SWITCH."""
    rule: Rule = setting.metadata.get("rule", SWITCH)
    return rule


def check(setting: Field, value: object, where: str) -> Any:
    """Check a value and return the value to store. Raises ConfigError, beginning with `where`, if the rule rejects the
    value."""
    rule = rule_of(setting)
    if not rule.accepts(value):
        raise ConfigError(f"{where}: expected {rule.words}, got {brief(repr(value))}")
    return rule.store(value)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of every section: fields are checked and normalized at construction.

    other_forms  sections with other keys that may stand under the same title
    """

    other_forms: ClassVar[tuple[type[Section], ...]] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                object.__setattr__(self, each.name, check(each, value, f"{self.title()} {each.name}"))

    def title(self) -> str:
        return f"[{type(self).__name__.lower()}]"


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The three known names closest to a mistyped name, for an error message."""
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.0)


def read(section: type[S], table: dict[str, Any], title: str) -> S:
    """Read a section from a TOML table. Raises ConfigError for unknown, missing or rejected keys."""
    known = {each.name: each for each in fields(section)}
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{title} {brief(key)}: unknown key, the nearest are {', '.join(nearest(key[:LONG], known))}"
            )
    for key, each in known.items():
        if key not in table and each.default is MISSING:
            raise ConfigError(f"{title} {key}: missing, expected {rule_of(each).words}")
    return section(**table)


def toml_value(value: object) -> str:
    """Format one value as TOML. JSON and TOML agree on numbers, booleans and strings, but not on tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_lines(section: Section) -> list[str]:
    """The section's settings as TOML lines, without unset settings."""
    values = ((each.name, getattr(section, each.name)) for each in fields(section))
    return [f"{name} = {toml_value(value)}" for name, value in values if value is not None]


def _default(each: Field) -> str:
    if each.default is MISSING:
        return "required"
    return "unset" if each.default is None else toml_value(each.default)


def markdown_table(section: type[Section]) -> str:
    """A table with one row per setting: key, default, allowed values, meaning."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for each in fields(section):
        rows.append(f"| `{each.name}` | {_default(each)} | {rule_of(each).words} | {each.metadata['doc']} |")
    return "\n".join(rows)


def help_lines(section: type[Section], prefix: str) -> list[str]:
    """Two lines per setting for --help: the option with its default, then the meaning."""
    lines = []
    for each in fields(section):
        lines.append(f"  --{prefix}.{each.name}  [{_default(each)}]")
        lines.append(f"      {each.metadata['doc']}; {rule_of(each).words}")
    return lines
