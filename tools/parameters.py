"""Find functions with more than eight parameters, except for bindings of kernels (dlp/kernels).

    python tools/parameters.py dlp launch bench [...]

`self`, `cls`, *args and **kwargs do not count. Parameters that belong together should become a record (a dataclass or named
tuple). A function with a prescribed signature, for example a copy of a signature of torch or the flat schema of a custom op,
has a mark:

    def f(...):  # many parameters: REASON

The check also fails for a mark on a function with at most eight parameters.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT = 8
EXEMPT = Path("dlp/kernels")
MARK = re.compile(r"# many parameters: \S")

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """Definition of a function.

    name          name, with the class for a method: "Class.method"
    place         "FILE:LINE"
    parameters    number of parameters that count
    marked        whether its signature has a MARK
    """

    name: str
    place: str
    parameters: int
    marked: bool


def functions_in(source: str, path: str) -> Iterator[Function]:
    lines = source.splitlines()

    def walk(node: ast.AST, owner: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                head = lines[child.lineno - 1 : child.body[0].lineno - 1] or lines[child.lineno - 1 : child.lineno]
                marked = any(MARK.search(line) for line in head)
                yield Function(owner + child.name, f"{path}:{child.lineno}", _count(child, bool(owner)), marked)
                yield from walk(child, "")
            else:
                yield from walk(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)

    yield from walk(ast.parse(source), "")


def _count(function: Definition, in_class: bool) -> int:
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    given = function.args
    return len(given.posonlyargs + given.args + given.kwonlyargs) - (in_class and not static)


def problems(functions: Sequence[Function]) -> list[str]:
    """Return a message for each function with too many parameters, and for each mark that is not needed."""
    found = []
    for name, place, parameters, marked in functions:
        if marked and parameters <= LIMIT:
            found.append(f"{place} {name} takes {parameters} parameters: remove its mark")
        elif parameters > LIMIT and not marked:
            found.append(f"{place} {name} takes {parameters} parameters; at most {LIMIT}: make a record")
    return found


def main(folders: Sequence[str]) -> int:
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py")) if EXEMPT not in file.parents]
    functions = [function for file in files for function in functions_in(file.read_text(), str(file))]
    if not functions:
        print(f"no functions in {', '.join(folders)}", file=sys.stderr)
        return 1
    found = problems(functions)
    print("\n".join(found) or f"{len(functions)} functions: at most {LIMIT} parameters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
