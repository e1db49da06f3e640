"""Public docstrings have the form of torch's: a summary, and the sections Args, Shape, Returns, Raises and Examples that apply.

test_sections     one case for each public name (tools/site.py lists them), without ranks
test_examples     all examples, in one process group of one rank
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import textwrap
from contextlib import chdir
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp import ops
from tests.restored_tables import restored_fusions, restored_table
from tools import site

NAMES = [name for names in site.public_names().values() for name in names]
# Base classes without a Shape section
BASES = ("FusibleOperation", "BasicOperation", "FusedOperation", "OperationFuser")
NO_OPENING = re.compile(r"(Of|What|Where|Whose|Those|Which|The one|A rank's)\b")
SECTION = re.compile(r"^([A-Z]\w+):\n((?:    .*\n|\n)+)", re.MULTILINE)


def public(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def sections(docstring: str) -> dict[str, str]:
    """Text of each section of a docstring, by title."""
    return {title: textwrap.dedent(text) for title, text in SECTION.findall(docstring + "\n")}


def parameters(found: Any) -> set[str]:
    """Return the parameters of a function or class. If there are only `*args` and `**kwargs`, as in nn.Module and
    Protocol, return none."""
    signature = inspect.signature(found).parameters.values()
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = {marks.get(parameter.kind, "") + parameter.name for parameter in signature}
    return set() if names <= {"*args", "**kwargs"} else names


def due(found: Any) -> set[str]:
    """Return the titles of the sections that the docstring of a public class or function needs."""
    plain = inspect.unwrap(found)
    needed = {"Examples"} | ({"Args"} if parameters(found) else set())
    if inspect.isclass(found):
        if issubclass(found, nn.Module | torch.Tensor) and found.__name__ not in BASES:
            needed.add("Shape")
        raising = vars(found).get("__post_init__") or vars(found).get("__init__")
    else:
        returned = inspect.signature(plain).return_annotation
        if returned not in ("None", None):
            needed.add("Yields" if str(returned).startswith("Iterator") else "Returns")
        raising = plain
    generated = getattr(found, "_is_protocol", False) or (
        is_dataclass(found) and raising is vars(found).get("__init__")
    )
    if (
        inspect.isfunction(raising)
        and not generated
        and re.search(r"^\s*raise ", inspect.getsource(raising), re.MULTILINE)
    ):
        needed.add("Raises")
    return needed


@pytest.mark.parametrize("name", NAMES)
def test_sections(name):
    found = public(name)
    docstring = inspect.getdoc(found) or ""
    summary, have = docstring.partition("\n")[0], sections(docstring)
    assert summary.endswith((".", ":")) or not docstring.partition("\n")[2].startswith("\n"), "the summary is one line"
    assert not NO_OPENING.match(summary), summary
    assert due(found) <= have.keys(), f"{name} lacks {sorted(due(found) - have.keys())}"
    documented = set(re.findall(r"^(\*{0,2}\w+): ", have.get("Args", ""), re.MULTILINE))
    assert documented == parameters(found), f"Args of {name} and its signature differ"
    assert ">>> " in have["Examples"]


def test_a_docstring_without_a_section_is_noticed():
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        """Scale.

        Args:
            x: tensor.
        """
        if not factor:
            raise ValueError
        return factor * x

    have = sections(inspect.getdoc(scale) or "")
    assert due(scale) - have.keys() == {"Examples", "Raises", "Returns"}
    assert parameters(scale) == {"x", "factor"} and "factor:" not in have["Args"]


def failures(names: list[str], directory: str) -> list[str]:
    """Run the examples; return the reports of failures. Each docstring has a separate namespace with dlp, ops, torch and nn."""
    parser, reports = doctest.DocTestParser(), list[str]()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name in names:
        given = {"dlp": dlp, "ops": ops, "torch": torch, "nn": nn, "__name__": "__main__"}
        example = parser.get_doctest(inspect.getdoc(public(name)) or "", given, name, None, 0)
        with chdir(directory), restored_table(), restored_fusions():
            runner.run(example, out=reports.append, clear_globs=False)
    return reports


@pytest.mark.ranks(1)
def test_examples(ranks, tmp_path):
    (reports,) = ranks(1).run(failures, NAMES, str(tmp_path))
    assert not reports, "\n".join(reports)
