"""Syntax trees of the repository's files. Parsing creates so many objects that Python's garbage collector would take
most of the time, so the collector is off during parsing."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def tree_of(source: str) -> ast.Module:
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@functools.cache
def nodes_in(folder: str, kinds: tuple[type[ast.AST], ...]) -> Sequence[tuple[Path, ast.AST]]:
    """Return (file, node) of each node of these kinds in the Python files of a folder of the repository."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    gc.disable()
    try:
        return [(p, node) for p in paths for node in ast.walk(ast.parse(p.read_text())) if isinstance(node, kinds)]
    finally:
        gc.enable()
