"""Command `python -m dlp.quant`: print how each device supports each recipe. With `--docs`: print the description of recipes
and options for docs/recipes.md."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dlp.quant.gemm import DEVICES
from dlp.quant.recipe import SHARED_OPTIONS, factory, load, names


def table(recipes_path: str | Path | None = None) -> str:
    """Return the support table as text, with one row for each recipe and one column for each device.

    "native": the GEMM unit of the device reads the format; "emulated": decoded values or the plain-torch reference, with the
    same numerics; "own": the method `gemm` of a user-defined format. A cell lists the GEMMs if their support differs.
    """
    rows = [["recipe", *DEVICES]]
    for name in names(recipes_path):
        recipe = load(name, recipes_path=recipes_path)
        rows.append([name, *(recipe.support(device) for device in DEVICES)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def reference(recipes_path: str | Path | None = None) -> str:
    """Return the description of recipes and options as Markdown, from the docstrings and signatures in the recipe files."""
    parts = []
    for name in names(recipes_path):
        build = factory(name, recipes_path)
        module: ModuleType | None = inspect.getmodule(build) or sys.modules.get(build.__module__)
        about = inspect.cleandoc((module and module.__doc__) or "").removeprefix(f"{name}: ")
        parts.append(f"### {name}\n\n{about}{_options(build)}")
    shared = "\n".join(f"* `{key}`: {inspect.cleandoc(use.__doc__ or '')}" for key, use in SHARED_OPTIONS.items())
    return "\n\n".join([*parts, f"### Options of every recipe\n\n{shared}"])


def _options(build: Any) -> str:
    options = [f"`{each.name} = {each.default!r}`" for each in inspect.signature(build).parameters.values()]
    return f"\n\nOptions: {', '.join(options)}.\n{inspect.cleandoc(build.__doc__ or '')}" if options else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dlp.quant", description=__doc__)
    parser.add_argument("--recipes-path", help="a folder with more recipes")
    parser.add_argument("--docs", action="store_true", help="describe the recipes and their options")
    known = parser.parse_args()
    print(reference(known.recipes_path) if known.docs else table(known.recipes_path))
