"""Report packages that are missing or have the wrong version in this interpreter, before a target of the Makefile runs.

    python tools/check_env.py [PACKAGE ...]      check the runtime dependencies of pyproject.toml, and these packages

The program imports only the standard library, so it takes milliseconds, and works even if importing torch fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.11.0+cu130" -> (2, 11, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def problem(requirement: str) -> str | None:
    """Describe why this interpreter does not satisfy `requirement`, a package name with optional >= and < bounds. Returns None
    if it does."""
    name = re.split("[<>]", requirement)[0]
    bounds = requirement.removeprefix(name)
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    for operator, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
        version = importlib.metadata.version(name)
        if (release(version) >= release(bound)) != (operator == ">="):
            return f"{name} {version} is not {bounds}"
    return None


def main(extra: list[str]) -> int:
    required = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"] + extra
    problems = [found for requirement in required if (found := problem(requirement))]
    if problems:
        print(
            f"{sys.executable}: {'; '.join(problems)}. "
            "Install the packages there, name another interpreter (PYTHON=...), or leave PYTHON out: make then uses .venv.",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
