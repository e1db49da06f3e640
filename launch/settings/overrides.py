"""Settings from the command line: `--section.key value`, `--groups.NAME.key value`, `--recipe X` and `--model FOLDER`.

An override is written into the TOML tables before the sections are constructed, so all later checks see the final settings. A
value is read as TOML (`0.1`, `true`, `["layers.**"]`); if the setting does not accept the TOML value, the text itself is used,
so that `--recipe bf16` and `--run.dir 2024` need no quotes. argparse parses only the other options (`make_parser`). argparse
cannot parse overrides, because the options of a parser are fixed before the config file is read, and because argparse would
treat the value of an unknown option as CONFIG.
"""

import argparse
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from launch.settings.schema import ConfigError, Section, brief, check, help_lines, nearest, rule_of

Schema = Mapping[str, type[Section]]  # section name -> dataclass; "groups" -> dataclass of one entry of the list
ALIASES = {"recipe": "groups.default.recipe", "model": "model.folder"}
ANY_GROUP = {"groups": [{"name": "NAME"}]}


def split(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split arguments into those for argparse and the overrides, (dotted name, text) each. Raises ConfigError for an override
    without a value."""
    rest, overrides = [], []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not ("." in name or name in ALIASES):
            rest.append(argument)
            continue
        text = value if equals else next(remaining, None)
        if text is None or (text.startswith("--") and not equals):
            raise ConfigError(f"--{name}: expected a value after it, got {'nothing' if text is None else text}")
        overrides.append((ALIASES.get(name, name), text))
    return rest, overrides


def _places(schema: Schema, tables: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], type[Section]]]:
    """Yield (prefix of the option, table, dataclass of the table) for each table that may hold settings."""
    for section, cls in schema.items():
        if section == "groups":
            yield from ((f"groups.{group.get('name')}", group, cls) for group in tables["groups"])
        else:
            yield from ((section, tables.setdefault(section, {}), form) for form in (cls, *cls.other_forms))


def apply(tables: dict[str, Any], overrides: Sequence[tuple[str, str]], schema: Schema) -> None:
    """Write overrides into the tables of a TOML file, in order. Raises ConfigError for an unknown option or invalid value."""
    targets = {
        f"{prefix}.{key.name}": (table, key) for prefix, table, cls in _places(schema, tables) for key in fields(cls)
    }
    for name, text in overrides:
        if name not in targets:
            raise _unknown(name, targets)
        table, key = targets[name]
        table[key.name] = _value(key, text, f"--{name}")


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"--{brief(name)}: unknown option, the nearest are --{', --'.join(nearest(name[:100], known))}")


def _value(setting: Field, text: str, option: str) -> Any:
    """Parse `text` as TOML; use the text itself if the setting accepts the text but not the TOML value. Raises ConfigError if
    the setting accepts neither."""
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    accepts = rule_of(setting).accepts
    if not isinstance(value, dict | list) and not accepts(value) and accepts(text):
        value = text
    check(setting, value, option)
    return value


def make_parser(program: str, description: str, default: str, schema: Schema) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all programs that read a config; --help lists every setting."""
    lines = ["settings (values are TOML; strings need no quotes) [default]:"]
    for prefix, _, cls in _places(schema, dict(ANY_GROUP)):
        lines += help_lines(cls, prefix)
    lines += [f"  --{alias} X\n      short for --{name} X" for alias, name in ALIASES.items()]
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [CONFIG] [--section.key value ...] [options]",
        description=description,
        epilog="\n".join(lines).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", default=default, help="name under launch/configs, or path to a file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], schema: Schema
) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Return the options of `parser`, and the overrides, (dotted name, text) each. Raises ConfigError for an unknown option."""
    rest, overrides = split(arguments)
    known, unknown = parser.parse_known_args(rest)
    settings = [f"{prefix}.{key.name}" for prefix, _, cls in _places(schema, dict(ANY_GROUP)) for key in fields(cls)]
    for argument in unknown:
        if argument.startswith("-"):
            raise _unknown(argument.lstrip("-").partition("=")[0], [*ALIASES, *settings])
        raise ConfigError(
            f"{brief(argument)}: only one config can be given, and {known.config!r} is given already; quote values "
            f"with spaces"
        )
    return known, overrides
