"""Refusal of a command line before torch is imported, which takes seconds: the file, all settings, and the number of ranks.

Recipes and patterns of layers are checked by `run_config`, because `dlp` knows them.
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
    """Parser that leaves its errors to the parser of the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def refuse_early(arguments: Sequence[str], *, ranks: bool) -> None:
    """End a program whose arguments contain settings that cannot be used, with the sentence of `run_config`.

    Args:
        arguments: The command line.
        ranks: Whether this process is a rank, or stands for all ranks, so that mesh and batch must fit their number.
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
    """Return the options and the settings of a command line. Raises ConfigError."""
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
    """Raise ConfigError for a mesh or a batch that does not fit the number of ranks: the planned ranks, the ranks of
    torchrun, or the single rank of this process."""
    if options.plan:
        rules.validate_world(settings, int(options.world or 8))
    elif "RANK" in os.environ:
        rules.validate_world(settings, int(os.environ["WORLD_SIZE"]))
    else:
        rules.on_one_rank(settings, arguments)
