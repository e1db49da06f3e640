"""The scripts behind the Makefile: the check of an interpreter, and the help of the Makefile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlp.kernels import loader
from tests.cases import few
from tests.conftest import some_cases, thinned
from tools import check_env, sanitize

ROOT = Path(__file__).parent.parent


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
        "help", "install", "pretrain", "plan", "ledger", "fidelity", "test", "test-all", "test-fast", "multigpu", "lint",
        "docs", "kernels-compile", "gpu-test", "emulate", "sanitize", "bench", "bench-quantize", "bench-gemm", "bench-linear",
        "bench-comm",
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
    """CI passes if something that is needed to compile the kernels is missing (exit code 2), and fails on every other
    error. The test replaces make and the interpreter, and checks that CI compiles the kernels of all architectures."""
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
    assert done.stdout.splitlines() == ["=== 3 tests in 1s ===", f"kernels: exit {code}", "=== 3 tests in 1s ==="]
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["-m", "dlp.kernels.build", "--compile-only", *loader.ARCHITECTURES.values()]


def under_tools(printed: str, code: int = 0) -> str:
    """Return a script that replaces the sanitizer: for the probe with a faulty kernel it exits with 99 (a defect), for
    the clean probe with 0; for pytest it prints `printed` and exits with `code`."""
    return f"""case "$*" in *" clean") ;; *probe*) exit 99 ;; *) printf '{printed}\\n'; exit {code} ;; esac"""


PASSED = "=== 3 passed in 1s ==="
WORKS = under_tools(PASSED)
BLIND = """case "$*" in *probe*) ;; *) echo "3 passed" ;; esac"""
WRONG = """exit 99"""
HAZARDS = "== RACECHECK SUMMARY: 100 hazards displayed (0 errors, 512 warnings)"
WARNINGS = "== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 512 warnings)"
NO_HAZARDS = "== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
NOISY = f"""case "$*" in *" clean") echo "{HAZARDS}" ;; *) exit 99 ;; esac"""
UNKNOWN = "memcheck: no result,"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (WORKS, 0, "=== 3 passed in 1s ===\nmemcheck: clean, 3 passed in 1s"),
        (under_tools(f"{PASSED}\\n{NO_HAZARDS}\\n== ERROR SUMMARY: 0 errors"), 0, "memcheck: clean, 3 passed in 1s"),
        (under_tools(PASSED, 99), 1, "memcheck: exit code 99, 3 passed"),
        (under_tools("1 failed, 3 passed in 1s", 1), 1, "memcheck: exit code 1, 1 failed, 3 passed"),
        (under_tools("4 failed in 1s", 1), 1, "memcheck: exit code 1, 4 failed in 1s"),
        (under_tools(f"{PASSED}\\n{HAZARDS}"), 1, "memcheck: RACECHECK SUMMARY: 100 hazards displayed (0 errors, 512"),
        (under_tools("== ERROR SUMMARY: 2 errors", 99), 1, "memcheck: ERROR SUMMARY: 2 errors, no summary by pytest"),
        (under_tools("", 99), 1, "memcheck: exit code 99, no summary by pytest"),
        (under_tools(f"{PASSED}\\n{WARNINGS}"), 1, "memcheck: RACECHECK SUMMARY: 0 hazards displayed (0 errors, 512"),
        (under_tools("99 skipped in 1s"), 3, f"{UNKNOWN} 99 skipped in 1s"),
        (under_tools("=== 0 passed in 1s ==="), 3, f"{UNKNOWN} 0 passed in 1s"),
        (under_tools("no tests ran in 0.01s", 5), 3, f"{UNKNOWN} no tests ran in 0.01s"),
        (under_tools("3 passed", 139), 3, f"{UNKNOWN} no summary by pytest"),
        (under_tools(""), 3, f"{UNKNOWN} no summary by pytest"),
        (BLIND, 3, "memcheck: does not work on a GPU: it does not find the error of a faulty kernel"),
        (WRONG, 3, "memcheck: does not work on a GPU: it reports an error for a correct kernel, with exit code 99"),
        (NOISY, 3, "memcheck: does not work on a GPU: it reports an error for a correct kernel, with exit code 0"),
    ],
)
def test_a_sanitizer_that_does_not_work_or_runs_nothing_is_never_clean(
    monkeypatch, tmp_path, capsys, script, code, said
):
    for name, text in (("compute-sanitizer", script), ("nvcc", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_name", lambda: "a GPU")
    assert sanitize.main([]) == code
    output = "".join(capsys.readouterr())
    assert said in output and ("clean," in output) == (code == 0)


@pytest.mark.parametrize(("codes", "expected"), [((0, 0, 0), 0), ((0, 3, 0), 3), ((3, 1, 0), 1), ((0, 1, 3), 1)])
def test_a_finding_of_one_tool_is_not_hidden_by_another(monkeypatch, codes, expected):
    left = iter(codes)
    monkeypatch.setattr(sanitize, "missing", lambda: None)
    monkeypatch.setattr(sanitize, "find_program", lambda name: "true")
    monkeypatch.setattr(sanitize, "check", lambda *_: next(left))
    assert sanitize.main([]) == expected


def test_what_the_sanitizer_needs_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(loader, "CUDA", str(tmp_path))
    assert sanitize.main(["memcheck"]) == 2
    assert "needs nvcc, which is not on PATH" in capsys.readouterr().err


def fake_cases(test: str, **parameters: Sequence[object]) -> list[SimpleNamespace]:
    """Return fake test cases in the order in which pytest collects them: the last parameter changes first."""
    made = [dict(zip(parameters, values, strict=True)) for values in product(*parameters.values())]
    return [SimpleNamespace(nodeid=f"{test}[{case}]", callspec=SimpleNamespace(params=case)) for case in made]


def pairs_of(cases: Sequence[SimpleNamespace]) -> set[tuple[tuple[str, object], ...]]:
    return {pair for case in cases for pair in combinations(case.callspec.params.items(), 2)}


def test_some_cases_of_a_test_meet_every_value_of_its_parameters():
    cases = fake_cases("f.py::cast", rule=["ceil", "floor"], data=list("abcde"), tile=[False, True])
    found = some_cases(cases, 2)
    assert len(found) == 5
    for name in ("rule", "data", "tile"):
        assert {case.callspec.params[name] for case in found} == {case.callspec.params[name] for case in cases}
    assert len({(case.callspec.params["rule"], case.callspec.params["tile"]) for case in found}) == 4
    assert found == some_cases(cases, 5), "the choice is the same each time"


def test_more_cases_meet_pairs_of_values_first():
    cases = fake_cases("f.py::cast", rht=[False, True], chance=[False, True], data=list("abcde"))
    assert {("rht", True), ("chance", True)} in map(set, pairs_of(some_cases(cases, 4)))
    assert pairs_of(some_cases(cases, 10)) == pairs_of(cases)
    assert len(some_cases(cases, 10)) == 10 and some_cases(cases, 100) == cases


def test_some_cases_are_chosen_of_each_test():
    one = SimpleNamespace(nodeid="f.py::one")
    many = fake_cases("f.py::many", x=[0, 1, 2]) + fake_cases("f.py::few", x=["a[0]", "b[0]"], y=[0])
    assert some_cases([one, *many], 1) == [one, *many]
    assert some_cases(fake_cases("f.py::same", x=[0, 0]), 1) == fake_cases("f.py::same", x=[0])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("programs", "extras"),
    [(["nvidia-smi"], "dev,gpu"), (["nvidia-smi", "nvcc"], "dev"), (["nvidia-smi", "bin/nvcc"], "dev"), ([], "dev")],
)
def test_make_installs_the_compiler_where_there_is_a_gpu_and_no_toolkit(programs, extras, tmp_path):
    for name in programs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path)}
    command = [str(shutil.which("make")), "--dry-run", "--always-make", ".venv/.installed"]
    made = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=True)
    assert f'--editable ".[{extras}]"' in made.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("verb", ["pretrain", "ledger", "bench-comm", "emulate", "plan"])
def test_a_verb_leaves_no_shell_between_make_and_its_program(verb, tmp_path):
    """make must run the program without a shell between make and the program. Otherwise SIGTERM would end only the
    shell, and the run would continue as an orphan."""
    fake, parent = tmp_path / "python", tmp_path / "parent"
    fake.write_text(f'#!/bin/sh\ncase "$1" in tools/*) exit 0;; esac\necho $PPID >{parent}\n')
    fake.chmod(0o755)
    made = subprocess.Popen(["make", verb, f"PYTHON={fake}", "DEVICE=cpu"], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert made.wait(60) == 0 and int(parent.read_text()) == made.pid


def test_a_plain_install_brings_what_compiles_the_kernels():
    """A plain `pip install` installs ninja and pybind11, and the extra `gpu` installs the CUDA compiler. Without
    these, a machine with a GPU would run casts in plain torch, with only a warning."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"ninja", "pybind11"} <= set(project["dependencies"])
    compiler = [each.partition(">")[0] for each in project["optional-dependencies"]["gpu"]]
    assert compiler == ["nvidia-cuda-nvcc", *loader.PARTS]
    listed = (ROOT / "docs" / "dependencies.md").read_text().partition("## Optional")[0]
    for needed in project["dependencies"]:
        assert f"`{needed.split('>')[0].split('<')[0]}`" in listed, needed


def marked(
    items: Sequence[SimpleNamespace], *decorators: str, full: Sequence[int] = (), ranks: bool = False
) -> list[Any]:
    """Return fake test cases as `thinned` reads them. `decorators`: parameter names of each parametrize decorator;
    `full`: indices of the cases with the mark `full`; `ranks`: whether the cases use the fixture `ranks`."""
    marks = [SimpleNamespace(args=(names,)) for names in decorators]
    for number, item in enumerate(items):
        own = {*(["ranks"] if ranks else []), *(["full"] if number in full else [])}
        item.iter_markers = lambda name: marks
        item.get_closest_marker = lambda name, own=own: (
            SimpleNamespace(args=(2,)) if name in own or name == "ranks" else None
        )
        item.fixturenames = ["ranks"] if ranks else []
    return list(items)


def test_a_run_covers_pairs_of_rows_and_on_ranks_rows():
    cases = marked(fake_cases("f.py::cast", a=[0, 1, 2], b=list("xyz"), c=[False, True]), "a", "b", "c")
    found = thinned(cases)
    assert pairs_of(found) == pairs_of(cases) and 9 <= len(found) < 18 and found == thinned(cases)
    found = thinned(marked(fake_cases("f.py::sum", a=[0, 1, 2], b=list("xyz")), "a", "b", ranks=True))
    assert sorted(tuple(case.callspec.params.values()) for case in found) == [(0, "x"), (1, "y"), (2, "z")]


def test_the_cases_of_one_decorator_run_but_for_those_that_others_stand_for():
    cases = marked(fake_cases("f.py::one", a=[0, 1], b=[0, 1]), "a, b", full=[2], ranks=True)
    assert thinned(cases) == [cases[0], cases[1], cases[3]]
    values = few(["bf16", ("fp8_rowwise", 2), ("nvfp4", 2), "of mine"])
    assert [[mark.name for mark in value.marks] for value in values] == [[], ["full"], [], []]
