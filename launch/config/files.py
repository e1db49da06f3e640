"""Find config files by name or path, and read them as TOML. This module does not import torch."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.settings.overrides import split
from launch.settings.schema import ConfigError, brief

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT = "tiny"
FOR_FOLDERS = "transformers"  # default config with --model FOLDER


def find(name_or_path: str | Path) -> Path:
    """Return the file of a config, given as a name under launch/configs or as a path. Raises ConfigError if no file exists."""
    path = Path(name_or_path)
    with contextlib.suppress(OSError, ValueError):  # raised by is_file() for invalid file names
        for candidate in (CONFIGS / f"{name_or_path}.toml", path):
            if candidate.is_file():
                return candidate
    names = ", ".join(sorted(each.stem for each in CONFIGS.glob("*.toml")))
    raise ConfigError(f"{brief(str(name_or_path))}: no such config, expected a path to a TOML file or one of {names}")


def chosen(config: str, arguments: Sequence[str], changes: Sequence[tuple[str, str]]) -> str:
    """Return `config`, the name or path on the command line; if the command line names none, `FOR_FOLDERS` with --model, else
    `DEFAULT`."""
    if config == DEFAULT and DEFAULT not in split(arguments)[0] and "model.folder" in dict(changes):
        return FOR_FOLDERS
    return config


def read_text(path: Path) -> str:
    """Return the text of a config file. Raises ConfigError if the file is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not a TOML file: {error}; correct this place") from None


def parse(text: str, name: str) -> dict[str, Any]:
    """Parse the TOML text of a config. Raises ConfigError if it is not TOML. `name`: name of the file in messages."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not a TOML file: {error}; correct this place") from None
