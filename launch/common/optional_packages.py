"""Import of optional packages, with an error that names the command that installs the package."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackage(ValueError):
    """Error for an optional package that is not installed; the message names the command that installs the package."""


def need(module: str, package: str, what: str) -> Any:
    """Import and return `module` of an optional package. Raises MissingPackage if the package is not installed.

    what: feature or program that needs the package, the subject of the message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingPackage(
            f"{what} needs the package {package}, which is not installed: pip install {package}"
        ) from None
