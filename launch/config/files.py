"""Files of configs: found by name or path, and read as TOML, without importing torch."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.settings.schema import ConfigError, brief

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT = "tiny"
FOR_FOLDERS = "transformers"  # default with --model FOLDER


def find(name_or_path: str | Path) -> Path:
    """Return the file of a config. Raises ConfigError if there is none."""
    path = Path(name_or_path)
    with contextlib.suppress(OSError, ValueError):  # names that no file can have raise these errors
        for candidate in (CONFIGS / f"{name_or_path}.toml", path):
            if candidate.is_file():
                return candidate
    names = ", ".join(sorted(each.stem for each in CONFIGS.glob("*.toml")))
    raise ConfigError(f"{brief(str(name_or_path))}: no such config, expected a path to a TOML file or one of {names}")


def chosen(config: str, arguments: Sequence[str], changes: Sequence[tuple[str, str]]) -> str:
    """Return the name or path of the config of a command line. Without a config, the default depends on whether --model
    is given."""
    if config == DEFAULT and DEFAULT not in arguments and "model.folder" in dict(changes):
        return FOR_FOLDERS
    return config


def read_text(path: Path) -> str:
    """Return the text of a config. Raises ConfigError if the file is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not a TOML file: {error}; correct this place") from None


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a config. Raises ConfigError for text that is not TOML. `name`: name of the file in
    messages."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not a TOML file: {error}; correct this place") from None
