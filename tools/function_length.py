"""Reports how long the functions of a package are, and fails when the 95th percentile reaches a screen (60 lines).

    python tools/function_length.py dlp [...]

A function's length is its lines from `def` to its end, docstring and nested functions included. The 95th percentile is
watched rather than the median, because a code base becomes unreadable by its few longest functions.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCREEN = 60


class Function(NamedTuple):
    length: int
    place: str


def functions_in(source: str, path: str) -> list[Function]:
    return [
        Function(node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]


def percentile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that at least `share` of `lengths` do not exceed (nearest rank)."""
    return sorted(lengths)[math.ceil(share * len(lengths)) - 1]


def report(functions: Sequence[Function]) -> tuple[str, bool]:
    """One line about `functions`, and whether their p95 is under a screen."""
    lengths = [function.length for function in functions]
    p95 = percentile(lengths, 0.95)
    longest = max(functions)
    line = (
        f"{len(lengths)} functions: median {percentile(lengths, 0.5)} lines, p95 {p95} (limit: under {SCREEN}), "
        f"longest {longest.length} ({longest.place})"
    )
    return line, p95 < SCREEN


def main(folders: Sequence[str]) -> int:
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    functions = [function for file in files for function in functions_in(file.read_text(), str(file))]
    if not functions:
        print(f"no functions in {', '.join(folders)}", file=sys.stderr)
        return 1
    line, short_enough = report(functions)
    print(line)
    return 0 if short_enough else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
