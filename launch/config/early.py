"""Check config file, settings and number of ranks of a command line before torch is imported: the import takes seconds.

Recipes and layer patterns are checked later by `run_config`, because these checks import `dlp`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from launch.config import files, rules
from launch.config.sections import SECTIONS, PlainGroup
from launch.ranks.process_exit import refuse
from launch.settings import overrides
from launch.settings.schema import ConfigError

FLAGS, OPTIONS = ("--plan", "--print-config"), ("--world", "--device", "--timeline", "--ranks")
SCHEMA = {**SECTIONS, "groups": PlainGroup}


class _Parser(argparse.ArgumentParser):
    """Parser that raises ValueError for a wrong option, so that the parser of the program reports the error."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def refuse_early(arguments: Sequence[str], *, ranks: bool) -> None:
    """End the program with an error message if a setting on the command line or in the config is invalid.

    Args:
        arguments: The command line.
        ranks: Also check that mesh and global batch fit the number of ranks.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        return
    try:
        options, settings = check(arguments)
        if ranks and not options.print_config:
            _check_ranks(options, settings, arguments)
    except ConfigError as error:
        refuse(str(error))
    except (OSError, ValueError):
        return  # the program reports this error itself


def check(arguments: Sequence[str]) -> tuple[argparse.Namespace, rules.Settings]:
    """Return the options and the settings of a command line. Raises ConfigError for an invalid setting."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("config", nargs="?", default=files.DEFAULT)
    for flag in FLAGS:
        parser.add_argument(flag, action="store_true")
    for option in OPTIONS:
        parser.add_argument(option)
    options, changes = overrides.parse(parser, arguments, SCHEMA)
    path = files.find(files.chosen(options.config, arguments, changes))
    tables = files.parse(files.read_text(path), path.name)
    rules.check_shape(tables, path.name)
    overrides.apply(tables, changes, SCHEMA)
    return options, rules.build(rules.Settings, PlainGroup, tables, path.name)


def _check_ranks(options: argparse.Namespace, settings: rules.Settings, arguments: Sequence[str]) -> None:
    """Raise ConfigError if mesh or global batch do not fit the number of ranks. The number of ranks is `--world` (default 8)
    with `--plan`, WORLD_SIZE under torchrun, and otherwise 1."""
    if options.plan:
        rules.validate_world(settings, int(options.world or 8))
    elif "RANK" in os.environ:
        rules.validate_world(settings, int(os.environ["WORLD_SIZE"]))
    else:
        rules.on_one_rank(settings, arguments)
