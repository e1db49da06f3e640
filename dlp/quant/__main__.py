"""`python -m dlp.quant`: which recipe runs natively, which emulated and which not, on which device."""

from __future__ import annotations

import argparse
from pathlib import Path

from dlp.quant.gemm import DEVICES, Support, support
from dlp.quant.recipe import GEMMS, Recipe, load, names


def supports(recipe: Recipe, device: str) -> dict[str, Support]:
    """What `device`, one of DEVICES, does for each GEMM of the recipe."""
    pairs = {which: recipe.operands(which) for which in GEMMS}
    return {which: support(a.format, b.format, device) for which, (a, b) in pairs.items()}


def table(recipes_path: str | Path | None = None) -> str:
    """The support table as text, a row a recipe. "native": the device's own unit for the format; "emulated": decoded
    values or the plain-torch reference, with the same numerics. A cell lists its GEMMs where they differ."""
    rows = [["recipe", *DEVICES]]
    for name in names(recipes_path):
        recipe = load(name, recipes_path=recipes_path)
        rows.append([name, *(_cell(supports(recipe, device)) for device in DEVICES)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(by_gemm: dict[str, Support]) -> str:
    texts = {which: f"{support.status} ({support.kernel})" for which, support in by_gemm.items()}
    if len(set(texts.values())) == 1:
        return texts["fprop"]
    return ", ".join(f"{which} {text}" for which, text in texts.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dlp.quant", description=__doc__)
    parser.add_argument("--recipes-path", help="a folder with more recipes")
    print(table(parser.parse_args().recipes_path))
