"""Checks of a folder with config.json and *.safetensors of transformers. This module imports neither torch nor transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from launch.settings.schema import ConfigError


def check_folder(folder: str) -> dict[str, Any]:
    """Return the parsed config.json of `--model FOLDER`. Raises ConfigError if transformers, safetensors, config.json or
    *.safetensors is missing."""
    path = Path(folder) / "config.json"
    missing = [name for name in ("transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--model {folder}: needs {' and '.join(missing)}, not installed: pip install 'dlp[hf]' transformers"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--model {folder}: {path}: {error.strerror}; name a folder of transformers with config.json and *.safetensors"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--model {folder}: {path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ConfigError(f"--model {folder}: {path} has no model_type; name a folder that save_pretrained wrote")
    if not next(Path(folder).glob("*.safetensors"), None):
        raise ConfigError(
            f"--model {folder}: no *.safetensors in the folder; weights are read from safetensors alone: save them with "
            f"transformers"
        )
    return found
