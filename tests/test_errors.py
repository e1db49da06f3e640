"""Every error that dlp.comm, dlp.parallel, dlp.quant, launch or bench raises for a user names a remedy or has a row in
docs/errors.md, and each message is in a test.

`WAY_OUT` matches messages that name a remedy: by a clause that begins with a verb ("; set overlap = 'serial'"), by the
allowed values ("must be 0 or 1", "the nearest are ..."), or by an inserted text at the end ("; {remedy}"). Each other
message has a row in the page, with cause and remedy. A message that names a remedy has a row only if the row links to a
page with more information. `PARTS` are messages of inner errors, which another message with a remedy quotes.

The message in a row has … in place of values, and may be cut at the end. A message counts as tested if a string in a
test contains at least ENOUGH characters of its fixed text. dlp.kernels is excluded, because its errors are mistakes in
dlp, or higher layers raise errors first.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import nodes_in

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
OURS = ("AssertionError", "NotImplementedError")  # mistakes in dlp, not errors of users
FOLDERS = ("dlp", "launch", "bench")
VERBS = (
    "add ask assign attach begin build call check choose compute construct convert copy correct create cut declare decode "
    "dequantize disable drop encode exclude export fetch get give install leave let load make match merge move name "
    "norm omit pad parametrize pass pip prepare quantize quote register remove rename repeat replace restore resume "
    "return save set shard split start step take untie use wait write"
)
WAY_OUT = re.compile(
    rf"[;:.] (or )?(to [\w ]+, )?({VERBS.replace(' ', '|')})\b"
    r"|\b(expected|must be|nearest|one of|comes before) |comes first|\b(recipes|options|strategies|wires|which) are …|; …$",
    re.IGNORECASE,
)
PARTS = (
    "it names ….…, which no index", "… is no index of tensors", "… does not say in which files", "… and the manifest list",
    "…, as when ranks do not share", "[[groups]] of its config is invalid", "… is no file beside it", "… is of another run: …",
)  # fmt: skip
KINDS = (ast.Constant, ast.JoinedStr, ast.Raise)
ENOUGH = 16  # number of characters by which a message is recognized


def template(node: ast.AST) -> str:
    """The text of a string or f-string, with … for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub("…+", "…", "".join(map(template, node.values)))
    return "…"


def pieces(message: str) -> set[str]:
    """Return every substring of ENOUGH characters of the fixed text between values; if all fixed parts are shorter, the
    longest part."""
    fixed = message.split("…")
    enough = min(ENOUGH, max(map(len, fixed)))
    return {part[i : i + enough] for part in fixed for i in range(len(part) - enough + 1)}


@functools.cache
def strings(folder: str) -> list[str]:
    """Every string of the Python files in a folder, without this file. Adjacent string literals are one string."""
    found = (node for path, node in nodes_in(folder, KINDS) if path != Path(__file__))
    return [text for node in found if len(text := template(node)) > 1]


@functools.cache
def said() -> list[str]:
    """Return every string in the code of FOLDERS."""
    return [text for folder in FOLDERS for text in strings(folder)]


def raised() -> Iterator[tuple[str, str]]:
    """Yield (file and line, message) of every `raise` that reports an error of a user: with a string that has a fixed
    part of more than 10 characters, and an exception that is not in OURS."""
    for folder in ("dlp/comm", "dlp/parallel", "dlp/quant", *FOLDERS[1:]):
        for path, node in nodes_in(folder, KINDS):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = template(node.exc.args[0])
                if ast.unparse(node.exc.func) not in OURS and len(max(message.split("…"), key=len)) > 10:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", message


def table() -> list[tuple[str, str]]:
    """(message, cause and remedy) of each row of the page."""
    return re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


def rows() -> list[str]:
    """The messages of the page: the first cell of each row of its tables."""
    return [message for message, _ in table()]


def test_every_error_says_the_way_out_or_has_a_row():
    found = (*rows(), *PARTS)
    silent = [each for each in raised() if not each[1].startswith(found) and not WAY_OUT.search(each[1])]
    assert not silent, f"these messages name no remedy, and have no row in docs/errors.md: {silent}"


def test_no_row_repeats_what_its_message_says():
    """A row has a message without a remedy, or links to a page with more information."""
    repeated = []
    for message, rest in table():
        full = [text for text in said() if message in text]
        if full and all(WAY_OUT.search(text) for text in full) and "](" not in rest:
            repeated.append(message)
    assert not repeated, f"these messages name a remedy, and their rows have no link: {repeated}"
    assert not re.search(r"\| (the same|likewise) ?[|]", PAGE.read_text()), "merge rows with the same cause"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("…: x is on … and the parameters are on …: move x or the layer", True),
        ("amax_group must be auto or tp; got …", True),
        ("…: it lies in this folder; to continue from it, choose another --run.dir", True),
        ("world size … is not …", False),
        ("…: siblings use one x; style is 'row'", False),
    ],
)
def test_a_way_out_is_a_clause_with_a_verb_or_what_would_be_right(message, says):
    assert bool(WAY_OUT.search(message)) == says


def test_every_row_is_an_error_that_exists():
    gone = [row for row in rows() if not any(row in text for text in said())]
    assert not gone, f"no code has these messages of docs/errors.md: {gone}"


def test_every_error_is_in_a_test():
    known = said()
    messages = {message for _, message in raised()} | {next((t for t in known if row in t), row) for row in rows()}
    in_tests = "\n".join(strings("tests")).replace("\\", "")
    untested = [message for message in sorted(messages) if not any(piece in in_tests for piece in pieces(message))]
    assert not untested, f"no test quotes these messages: {untested}"
