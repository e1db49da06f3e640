"""Import of optional packages, with an error that names the command that installs the package."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackage(ValueError):
    """An optional package is not installed; the message says how it is."""


def need(module: str, package: str, what: str) -> Any:
    """An optional package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingPackage(
            f"{what} needs the package {package}, which is not installed: pip install {package}"
        ) from None
