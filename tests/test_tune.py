"""Measured choices of cuBLASLt algorithms: how they are measured, stored and used, with a stub in place of cuBLASLt. No
device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.shapes import of_config
from dlp.kernels import gemms, loader, registry, table, tune
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, load
from launch.config.run_config import load as load_config
from tests.command import Done, command
from tests.emulated import OnGpu
from tests.quantizers import matrix, quantize

pytestmark = pytest.mark.slow


class Plan:
    def __init__(self, candidates: int = 0) -> None:
        self.choice, self.candidates = 0, candidates

    def choose(self, candidate: int) -> None:
        self.choice = candidate


def test_candidates_are_timed_in_turn_after_a_first_time_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[tuple[tuple[int, ...], int, bool], Plan] = {((7,), 0, True): Plan()}
    kept, timed = dict(table), list[int]()
    monkeypatch.setattr(gemms, "plans", lambda: table)
    monkeypatch.setattr(gemms, "new_plan", lambda *_: Plan(candidates=3))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def time_it(call: Callable[[], Tensor]) -> float:
        timed.append(table[(1,), 0, True].choice)
        return [3.0, 2.0, 1.0, 4.0][len(timed) - 1]

    found = tune.fastest(lambda: (table.setdefault(((1,), 0, True), Plan()), torch.zeros(()))[1], time_it)
    assert timed == [0, 0, 1, 2] and table == kept
    assert (found.problem, found.times_ms, found.choice, found.best_ms) == ((1,), [2.0, 1.0, 4.0], 1, 1.0)


def test_calls_run_by_the_chosen_candidates_and_others_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = ((number,) for number in range(3))
    table = {(first, 0, True): Plan(), (other, 0, True): Plan()}
    monkeypatch.setattr(gemms, "plans", lambda: table)
    monkeypatch.setattr(gemms, "new_plan", lambda *_: Plan())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    kept = dict(table)
    with tune.by_candidates({first: 1, second: 2}):
        assert {words: plan.choice for (words, _, _), plan in table.items()} == {first: 1, second: 2}
    assert table == kept and all(plan.choice == 0 for plan in kept.values())
    with pytest.raises(RuntimeError, match=r"no candidate was chosen for \(2,\)"), tune.by_candidates({first: 1}):
        table[other, 0, True] = Plan()
    assert table == kept


class Ran:
    """Record, in `words`, the arguments of the GEMMs that were requested from cuBLASLt, without the alignment, which
    depends on the allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        self.words: list[gemms.GemmProblem] = []
        monkeypatch.setitem(table.DEVICE_AT, -1, device)
        for operation in registry._ON.keys() - {table.GEMM}:
            monkeypatch.setitem(registry._ON[operation], device, table.entries(operation, "cpu"))
        monkeypatch.setattr(gemms, "launch", self._launch)
        monkeypatch.setattr(loader, "missing", lambda: "casts run the reference")

    def _launch(self, job: gemms.Job, *_: Any) -> Tensor:
        self.words.append(job.problem._replace(alignment=0))
        return job.out

    def by(self, call: Callable[[], Any]) -> list[gemms.GemmProblem]:
        self.words = []
        with OnGpu():
            call()
        return self.words


@functools.cache
def listed(recipe: str, device: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Return the description of fprop, dgrad and wgrad of a layer of the recipe, as `bench.shapes` prints them."""
    recipes = [part for name in ("default", "edges") for part in (f"--groups.{name}.recipe", recipe)]
    config = load_config("tiny", ["--mesh.tp", "1", "--train.dtype", dtype, "--train.sequence", "32", *recipes])
    found = {each["gemm"]: each for each in map(json.loads, of_config(config, 1, device)[0])}
    assert found.keys() == set(GEMMS)
    return found


def real_call(recipe: str, problem: dict[str, Any], source: torch.dtype) -> Callable[[], Tensor]:
    """Return a call of the GEMM that `problem` describes, on operands that the quantizers of the recipe cast from
    values of dtype `source`."""
    loaded, which, contraction = load(recipe), problem["gemm"], problem["contraction"]
    operands = []
    for lines, quantizer, way in zip(
        (problem["rows"], problem["cols"]), loaded.operands(which), GEMM_OPERANDS[which][1::2], strict=True
    ):
        x = matrix(lines, lines, contraction, dtype=source)
        operands.append(quantize(quantizer, x if way == "rowwise" else x.t().contiguous().t()))
    out_dtype = getattr(torch, problem["out_dtype"])
    into = torch.zeros(problem["rows"], problem["cols"], dtype=out_dtype) if problem["accumulate"] else None
    gemm = Gemm(which, operands[1], out_dtype, accumulate=into, options=getattr(loaded, which))
    return lambda: gemm(operands[0])


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "accumulated"])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("device", ["sm_90", "sm_100"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4", "bf16"])
def test_what_is_tuned_is_what_runs(
    recipe: str, device: str, dtype: str, result: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring a problem launches the GEMM with the same arguments as a layer. The arguments must be equal because
    they are the key under which the measured choice is stored."""
    ran, source = Ran(monkeypatch, device), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for which, problem in listed(recipe, device, dtype).items():
        asked = {**problem, "out_dtype": result, "accumulate": accumulate}
        real = ran.by(real_call(recipe, asked, source))
        assert len(real) == tune.by_cublaslt(asked), "one GEMM, or none: what torch multiplies is not tuned"
        if real:
            assert (which, ran.by(lambda asked=asked: tune.problem_call(asked)())) == (which, real)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the file of measured choices. The machine appears to have kernels and two GPUs."""
    for where, name, value in (
        (loader, "load_or_explain", lambda: 0), (gemms, "_module", lambda: Version), (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 2), (torch.cuda, "get_device_name", lambda *_: "GPU"),
        (gemms, "_PLANS", {}),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("DLP_CACHE", str(tmp_path / "cache"))
    gemms.choices.cache_clear()
    file = tmp_path / "cache" / "gemms" / "GPU.json"
    file.parent.mkdir(parents=True)
    return file


class Version:
    @staticmethod
    def cublaslt_version() -> int:
        return 130101


PROBLEMS = [dict.fromkeys(tune.READ, 0) | {"gemm": which, "kernel": "cublaslt hp", "a_dtype": "bfloat16",
            "b_dtype": "bfloat16", "out_dtype": "bfloat16"} for which in GEMMS]  # fmt: skip
WORDS = (14,) * 20


def test_what_was_measured_before_a_failure_is_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([tune.Fastest(WORDS, [2.0, 1.0]), tune.Fastest((28, *WORDS[1:]), [1.0, 2.0])])

    def fastest(call: str, timed: Any) -> tune.Fastest:
        if call == "wgrad":
            raise RuntimeError("out of memory")
        return next(found)

    monkeypatch.setattr(tune, "problem_call", lambda problem: problem["gemm"])
    monkeypatch.setattr(tune, "fastest", fastest)
    file = tmp_path / "problems.json"
    file.write_text(json.dumps(PROBLEMS))
    with pytest.raises(RuntimeError, match="out of memory"):
        tune.main([str(file)])
    kept = {gemms.key_of(WORDS): 1, gemms.key_of((28, *WORDS[1:])): 0}
    assert json.loads(cache.read_text()) == {"130101": kept} and gemms.choices(0) == kept
    assert [path.name for path in cache.parent.iterdir()] == ["GPU.json"], "no incomplete file may remain"
    file.write_text(json.dumps([{**PROBLEMS[0], "kernel": "decode + fp32 mm"}]))
    capsys.readouterr()
    assert tune.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"0 choices stored in {cache}"]


@pytest.mark.parametrize("text", ['{"130101": {"1 2', "[]", '{"130101": 3}'])
def test_a_file_of_choices_that_cannot_be_read(cache: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cache.write_text(text)
    for use in (lambda: gemms.choices(0), lambda: gemms.save_choices(0, {})):
        with pytest.raises(ValueError, match="GPU.json cannot be read as measured choices of GEMMs; remove the file"):
            use()
    assert tune.main(["tiny"]) == 2 and cache.read_text() == text
    said = capsys.readouterr()
    assert said.err.startswith(f"{cache} cannot be read") and said.err.count("\n") == 1 and said.out == ""


def test_choices_that_cannot_be_kept_are_not_measured(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problems.json"
    file.write_text(json.dumps(PROBLEMS))
    monkeypatch.setenv("DLP_CACHE", str(file))
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured"))
    assert tune.main([str(file)]) == 2
    said = capsys.readouterr()
    assert "Not a directory" in said.err and said.err.count("\n") == 1


def test_a_write_that_fails_leaves_the_choices(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemms.save_choices(0, {"1 2": 3})
    before, write = cache.read_text(), Path.write_text

    def full(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Path, "write_text", full)
        gemms.save_choices(0, {"4 5": 6})
    assert cache.read_text() == before and gemms.choices(0) == {"1 2": 3}


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["tiny", "--train.lr", "1e-3", "--help"]])
def test_help_is_its_own_without_a_gpu(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        tune.main(arguments)
    said = capsys.readouterr()
    assert left.value.code == 0 and said.err == ""
    assert said.out.startswith("usage: python -m dlp.kernels.tune") and "the fastest algorithm of cuBLASLt" in said.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read as JSON ("), ("[{", "cannot be read as JSON ("), ("{}", "is not a list of GEMMs with the keys"),
        ('[{"gemm": "fprop"}]', "is not a list of GEMMs with the keys gemm, kernel, rows,"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_problems(
    text: str | None, says: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problems.json"
    if text is not None:
        file.write_text(text)
    assert tune.main([str(file)]) == 2 and not cache.exists()
    said = capsys.readouterr()
    assert said.err.startswith(f"{file}: {says}") and said.err.count("\n") == 1 and said.out == ""
    assert said.err.endswith("write one with python -m bench.shapes CONFIG --json\n")


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["tiny"], "2"), (["tiny", "--world", "8"], "8"), (["tiny", "--world=8", "--train.lr", "1e-3"], "8"),
        (["--train.lr", "1e-3", "tiny", "--world=4"], "4"),
    ],
)  # fmt: skip
def test_the_number_of_ranks_is_what_was_said(
    arguments: list[str], ranks: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command[1:])
        return type("Done", (), {"returncode": 0, "stdout": b"[]"})

    monkeypatch.setattr(tune.subprocess, "run", run)
    assert tune.main(arguments) == 0
    rest = [each for each in arguments if "world" not in each and each != "8"]
    assert commands == [["-m", "bench.shapes", *rest, "--world", ranks, "--json"]]


def test_a_config_that_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals: list[Done] = []

    def run(command_line: list[str], **_: Any) -> Any:
        refusals.append(command(*command_line[2:]))
        return type("Done", (), {"returncode": refusals[0].code})

    monkeypatch.setattr(tune.subprocess, "run", run)
    with pytest.raises(SystemExit) as left:
        tune.main(["tiny", "--world=3"])
    (refused,), said = refusals, capsys.readouterr()
    assert left.value.code == 2 and "world size 3" in refused.err and refused.err.count("\n") == 1
    assert refused.out == said.out == said.err == ""
