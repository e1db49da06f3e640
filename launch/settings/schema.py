"""Typed settings: check, error message, TOML text and documentation of a setting follow from one declaration.

A section of a config file is a frozen dataclass derived from `Section`; each of its fields is declared by
`setting(rule, doc, default)`. A `Rule` consists of a test and of the words for messages and documentation, so that
documentation and check agree. Values are checked when the dataclass is constructed, from a file, from the command line or from
Python. An error is one sentence that begins with section and key.

No settings library is used: the common libraries are large or compiled, and only a few rules are needed.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Section")
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


LONG = 100  # longest value, in characters, that a message shows in full
WORD = re.compile(rf"\S{{{2 * LONG},}}")


class ConfigError(ValueError):
    """Error for an invalid setting. The message is one sentence on one line; very long words are shortened."""

    def __init__(self, sentence: str) -> None:
        line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in sentence)
        super().__init__(WORD.sub(lambda found: brief(found[0]), line))


def brief(text: str) -> str:
    """Return `text`; if it is longer than `LONG` characters, only its beginning and its end."""
    return text if len(text) <= LONG else f"{text[: LONG // 2]}[... {len(text) - LONG} more ...]{text[-LONG // 2 :]}"


@dataclass(frozen=True)
class Rule:
    """Allowed values of a setting.

    words   description of the values for messages ("expected WORDS") and documentation
    kinds   accepted types; values of a subclass are rejected, for example True for kind int
    holds   test of a value of these types
    store   conversion of an accepted value to the stored value
    """

    words: str
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool] = lambda value: True
    store: Callable[[Any], Any] = lambda value: value

    def accepts(self, value: object) -> bool:
        return type(value) in self.kinds and self.holds(value)


def _bounded(bounds: tuple[str, ...]) -> Callable[[Any], bool]:
    limits = [(COMPARE[sign], float(bound)) for sign, bound in map(str.split, bounds)]
    return lambda value: abs(value) <= sys.float_info.max and all(compare(value, bound) for compare, bound in limits)


def integer(*bounds: str, also: tuple[int, ...] = ()) -> Rule:
    """Return a rule that accepts integers, for example integer(">= 1", also=(-1,)). Each bound is an operator, a space and a
    number; messages contain the bounds. `also`: values that are accepted in addition."""
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
    """Declare a field of a `Section`.

    rule: allowed values; doc: description for --help and docs/config.md; default: value if the key is missing. A field without
    default is required. Default None means unset, and `toml_lines` omits unset fields.
    """
    return field(default=default, metadata={"rule": rule, "doc": doc})


def rule_of(setting: Field) -> Rule:
    """Return the rule of a field. Fields that dlp declares (layer options) have no rule, and must be true or false."""
    rule: Rule = setting.metadata.get("rule", SWITCH)
    return rule


def check(setting: Field, value: object, where: str) -> Any:
    """Return the value to store for `value`. Raises ConfigError if the rule of the field rejects it; the message begins with
    `where`."""
    rule = rule_of(setting)
    if not rule.accepts(value):
        raise ConfigError(f"{where}: expected {rule.words}, got {brief(repr(value))}")
    return rule.store(value)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base class of sections of a config; fields are checked and normalized at construction.

    other_forms   section classes that may be used under the same title instead, with other keys
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
    """Return the three known names that are closest to a mistyped name, for an error message."""
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
    """Return the settings of a section as lines of TOML, without unset settings."""
    values = ((each.name, getattr(section, each.name)) for each in fields(section))
    return [f"{name} = {toml_value(value)}" for name, value in values if value is not None]


def _default(each: Field) -> str:
    if each.default is MISSING:
        return "required"
    return "unset" if each.default is None else toml_value(each.default)


def markdown_table(section: type[Section]) -> str:
    """Return a Markdown table with one row per setting: key, default, allowed values, meaning."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for each in fields(section):
        rows.append(f"| `{each.name}` | {_default(each)} | {rule_of(each).words} | {each.metadata['doc']} |")
    return "\n".join(rows)


def help_lines(section: type[Section], prefix: str) -> list[str]:
    """Return two lines per setting for --help: the option with its default, then its meaning and allowed values."""
    lines = []
    for each in fields(section):
        lines.append(f"  --{prefix}.{each.name}  [{_default(each)}]")
        lines.append(f"      {each.metadata['doc']}; {rule_of(each).words}")
    return lines
