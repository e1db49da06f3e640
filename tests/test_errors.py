"""docs/errors.md has every error there is, with the message the source has, and each is in a test.

A row's message has … where a value stands, and may end before the message does. "In a test": some string of a test holds
a piece of the message's fixed parts, for which only a test that provokes it has a use. Kernels are left out: what they
refuse is refused above them first, or is a mistake of ours.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
OURS = ("AssertionError", "NotImplementedError")  # mistakes in dlp, not of its users
FOLDERS = ("dlp", "launch", "bench")
ENOUGH = 16  # characters that tell a message from others


def template(node: ast.AST) -> str:
    """The text of a string or f-string, with … for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub("…+", "…", "".join(map(template, node.values)))
    return "…"


def pieces(message: str) -> set[str]:
    """Every stretch of ENOUGH characters without values; the longest there is, if that is shorter."""
    fixed = message.split("…")
    enough = min(ENOUGH, max(map(len, fixed)))
    return {part[i : i + enough] for part in fixed for i in range(len(part) - enough + 1)}


@functools.cache
def strings(folder: str) -> list[str]:
    """Every string of the Python files in a folder; a string in pieces is one."""
    sources = (path.read_text() for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__))
    return [text for source in sources for node in ast.walk(ast.parse(source)) if len(text := template(node)) > 1]


def said() -> list[str]:
    """Every string of what users run."""
    return [text for folder in FOLDERS for text in strings(folder)]


def raised() -> Iterator[tuple[str, str]]:
    """(place, message) of every raise that says something of its own."""
    for folder in ("dlp/comm", "dlp/parallel", "dlp/quant", *FOLDERS[1:]):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    message = template(node.exc.args[0])
                    if ast.unparse(node.exc.func) not in OURS and len(max(message.split("…"), key=len)) > 10:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", message


def rows() -> list[str]:
    """The messages of the page: the first cell of each row of its tables."""
    return re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", [pytest.param(message, id=place) for place, message in raised()])
def test_every_error_has_a_row(message):
    assert any(message.startswith(row) for row in rows()), f"docs/errors.md lacks: {message}"


@pytest.mark.parametrize("row", rows())
def test_every_row_is_an_error_that_exists(row):
    assert any(row in text for text in said())


@pytest.mark.parametrize("row", rows())
def test_every_row_is_in_a_test(row):
    message = next(text for text in said() if row in text)
    in_tests = "\n".join(strings("tests")).replace("\\", "")
    assert any(piece in in_tests for piece in pieces(message)), f"no test has a piece of: {message}"
