"""Tables of a plan as text: aligned columns, and one row for blocks that are equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Row = tuple[str, ...]  # the first cell is a dotted name
_Path = tuple[tuple[str, ...], Row]  # components of the name, the other cells


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: header, rule, rows; columns as wide as their longest cell."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Children 3, 4, 5 of a container as "name.3:6", Python's slice and a pattern of layer groups, where all rows below
    them are equal but for that number; other rows as they are, in their order."""
    paths = [(tuple(row[0].split(".")), tuple(row[1:])) for row in rows]
    return [(".".join(parts), *cells) for parts, cells in _fold(paths)]


def _fold(paths: Sequence[_Path]) -> list[_Path]:
    runs: list[tuple[str, int, list[_Path]]] = []  # a component, how many children it stands for, what is below it
    for head, group in groupby(paths, key=lambda path: path[0][0]):
        below = [(parts[1:], cells) for parts, cells in group]
        folded = [path for path in below if not path[0]] + _fold([path for path in below if path[0]])
        first, count, before = runs[-1] if runs else ("", 0, [])
        if first.isdecimal() and head == str(int(first) + count) and folded == before:
            runs[-1] = first, count + 1, before
        else:
            runs.append((head, 1, folded))
    return [
        ((head if count == 1 else f"{head}:{int(head) + count}", *parts), cells)
        for head, count, folded in runs
        for parts, cells in folded
    ]
