"""The scripts behind the Makefile: function length, the check of an interpreter, and the Makefile's own help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlp.kernels import loader
from tests.conftest import some_cases
from tools import check_env, function_length, sanitize
from tools.function_length import Function

ROOT = Path(__file__).parent.parent


def test_length_counts_decorated_nested_and_async_functions():
    source = "@property\ndef a():\n    def b():\n        pass\n    return b\n\nclass C:\n    async def d(self): ...\n"
    assert sorted(function_length.functions_in(source, "f.py")) == [
        Function(1, "f.py:8 d"),
        Function(2, "f.py:3 b"),
        Function(4, "f.py:2 a"),
    ]


@pytest.mark.parametrize(("long", "passes"), [(5, True), (6, False)])
def test_length_fails_when_the_95th_percentile_reaches_a_screen(long, passes):
    functions = [Function(10, "short")] * (100 - long) + [Function(60, "long")] * long
    line, short_enough = function_length.report(functions)
    assert short_enough is passes
    assert line == f"100 functions: median 10 lines, p95 {10 if passes else 60} (limit: under 60), longest 60 (long)"


def test_length_fails_where_there_is_nothing_to_measure(tmp_path, capsys):
    assert function_length.main([str(tmp_path)]) == 1
    assert "no functions in" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys):
    assert check_env.main([]) == 0
    assert check_env.main(["pytest", "no_such_package"]) == 1
    assert capsys.readouterr().err.startswith(f"{sys.executable}: no_such_package is not installed. ")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0+cu130", None),
        ("2.13.2", None),
        ("2.10.1", "torch 2.10.1 is not >=2.11,<2.14"),
        ("2.14.0a0+git1", "torch 2.14.0a0+git1 is not >=2.11,<2.14"),
    ],
)
def test_the_version_of_torch_is_checked(monkeypatch, version, expected):
    monkeypatch.setattr(check_env.importlib.metadata, "version", lambda name: version)
    assert check_env.problem("torch>=2.11,<2.14") == expected


def test_help_lists_every_verb():
    run = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    verbs = [line.split()[0] for line in run.stdout.splitlines()[1:]]
    assert verbs == [
        "help", "pretrain", "plan", "ledger", "test", "multigpu", "lint", "kernels-compile", "gpu-test", "sanitize", "bench",
        "bench-quantize", "bench-gemm", "bench-linear", "bench-comm",
    ]  # fmt: skip


CI_PYTHON = """#!/bin/sh
echo "$@" >asked
echo "kernels: exit $CODE"
exit $CODE
"""
CI_MAKE = """#!/bin/sh
case "$2" in
    lint) exit $LINT ;;
    test) echo "=== 3 tests in 1s ==="; exit $TESTS ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "lint", "tests", "expected"),
    [(0, 0, 0, 0), (2, 0, 0, 0), (1, 0, 0, 1), (3, 0, 0, 1), (127, 0, 0, 1), (0, 1, 0, 1), (2, 1, 0, 1), (2, 0, 1, 1)],
)
def test_continuous_integration_passes_over_a_missing_compiler_alone(tmp_path, code, lint, tests, expected):
    """With stand-ins for make and the interpreter: kernels of all architectures are compiled, whatever is on PATH."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name, text in (("make", CI_MAKE), ("python", CI_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.defpath}", "PYTHON": f"{tmp_path}/python", "CODE": str(code), "LINT": str(lint),
        "TESTS": str(tests),
    }  # fmt: skip
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert done.returncode == expected
    printed = done.stdout.splitlines()
    assert printed[0] == f"kernels: exit {code}" and set(printed[1:]) == {"=== 3 tests in 1s ==="}
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["-m", "dlp.kernels.build", "--compile-only", *loader.ARCHITECTURES.values()]


WORKS = """case "$*" in *" clean") ;; *probe*) exit 99 ;; *) echo "=== 3 passed in 1s ===" ;; esac"""
BLIND = """case "$*" in *probe*) ;; *) echo "3 passed" ;; esac"""
WRONG = """exit 99"""
FINDS = """case "$*" in *" clean") ;; *) echo "=== 3 passed in 1s ==="; exit 99 ;; esac"""


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (WORKS, 0, "=== 3 passed in 1s ===\nmemcheck: clean, 3 passed in 1s"),
        (FINDS, 1, "memcheck: exit code 99, 3 passed"),
        (BLIND, 3, "memcheck: does not work on a GPU: it does not find the defect of a bad kernel"),
        (WRONG, 3, "memcheck: does not work on a GPU: it fails on a clean kernel, with exit code 99"),
    ],
    ids=["works", "finds", "blind", "wrong"],
)
def test_a_sanitizer_that_does_not_work_is_never_clean(monkeypatch, tmp_path, capsys, script, code, said):
    for name, text in (("compute-sanitizer", script), ("nvcc", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_name", lambda: "a GPU")
    assert sanitize.main([]) == code
    output = "".join(capsys.readouterr())
    assert said in output and (code == 3) != ("passed" in output)


def test_what_the_sanitizer_needs_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(loader, "CUDA", str(tmp_path))
    assert sanitize.main(["memcheck"]) == 2
    assert "needs nvcc, which is not on PATH" in capsys.readouterr().err


def test_some_cases_of_each_test_are_spread():
    names = [*(f"f.py::many[{i}-a[0]]" for i in range(10)), "f.py::one"]
    found = some_cases([SimpleNamespace(nodeid=name) for name in names], 2)
    assert [item.nodeid for item in found] == ["f.py::many[0-a[0]]", "f.py::many[5-a[0]]", "f.py::one"]
