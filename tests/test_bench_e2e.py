"""`bench.e2e` refuses settings that it cannot measure before it runs anything, and keeps earlier results if a subject
(a measured configuration) fails. No ranks: meshes and measurements are replaced."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import e2e as bench_e2e
from bench.e2e import Result
from bench.e2e_subjects import Subject, subjects_of
from launch.ranks import process_exit
from launch.settings.schema import ConfigError


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process_exit, "leave", leave)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_e2e, "make_mesh", lambda config: None)
    monkeypatch.setattr(bench_e2e, "shutdown", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def test_names_in_parts() -> None:
    found = subjects_of("peer_bf16:graph,fp8_block:hp_gather,nvfp4:eager", "cuda")
    assert found == [
        Subject("peer_bf16", (":graph",)), Subject("fp8_block", (":hp_gather",)), Subject("nvfp4", (":eager",)),
    ]  # fmt: skip
    assert [subject.name for subject in found] == ["peer_bf16:graph", "fp8_block:hp_gather", "nvfp4:eager"]


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        (
            "fp8_nope",
            "cuda",
            "'fp8_nope' is neither a peer nor a recipe; choose a peer .peer_bf16, .* or a recipe .bf16, ",
        ),
        ("peer_x", "cuda", "'peer_x' is neither a peer nor a recipe; choose a peer "),
        ("", "cuda", "'' is neither a peer nor a recipe; choose a peer "),
        ("fp8_current:grph", "cuda", "unknown suffix :grph; a recipe takes :hp_gather, :eager, a peer :graph"),
        ("bf16:graph", "cuda", "unknown suffix :graph; a recipe takes :hp_gather, :eager, a peer :graph"),
        ("peer_bf16:graph", "cpu", "a CUDA graph needs GPUs, and the ranks are on CPUs; leave :graph out"),
        ("peer_tensorwise", "cuda", "torchao is not installed; install torchao, or leave this subject out"),
        ("peer_rowwise", "cuda", "torchao is not installed; install torchao, or leave this subject out"),
    ],
)
def test_what_cannot_be_measured(name: str, device: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"^--subjects {name}: {says}"):
        subjects_of(f"bf16,{name}", device)


def test_torchao_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package == "torchao")
    assert len(subjects_of("peer_tensorwise,peer_rowwise", "cuda")) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--subjects", "bf16,fp8_current:grph"], "--subjects fp8_current:grph: unknown suffix :grph"),
        (["--steps", "0"], "--steps: expected an integer >= 1, got 0\n"),
        (["--warmup", "-1"], "--warmup: expected an integer >= 0, got -1\n"),
        (["--where"], "--where lists the kernels of GPUs, and this program runs on the CPU: leave --where out\n"),
    ],
)
def test_a_refusal_is_a_sentence_and_nothing_runs(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_e2e, "make_mesh", lambda config: pytest.fail("a mesh was made"))
    with pytest.raises(SystemExit) as left:
        bench_e2e.main(["tiny", *arguments])
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    assert said.err.startswith(says) and said.err.count("\n") == 1


def test_a_subject_that_fails_leaves_the_results_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(subject: Subject, **options: Any) -> Result:
        assert (options["warmup"], options["steps"], options["where"]) == (4, 2, False)
        if subject.base == "nvfp4":
            raise RuntimeError("out of memory")
        return Result(subject.name, 10.0, 1.0, [3.0])

    monkeypatch.setattr(bench_e2e, "measure", measure)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    files = ["--json", str(out), "--plot", str(picture)]
    with pytest.raises(RuntimeError, match="out of memory"):
        bench_e2e.main(["tiny", "--steps", "2", "--subjects", "peer_bf16,bf16,nvfp4,fp8_block", *files])
    assert [found["subject"] for found in json.loads(out.read_text())] == ["peer_bf16", "bf16"] and picture.exists()


def test_losses_that_differ_between_gathers_are_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(subject: Subject, **_: Any) -> Result:
        return Result(subject.name, 10.0, 1.0, [float(subject.base == "bf16" and bool(subject.suffixes))])

    monkeypatch.setattr(bench_e2e, "measure", measure)
    for recipe, code in (("bf16", 1), ("fp8_block", 0)):
        with pytest.raises(SystemExit) as left:
            bench_e2e.main(["tiny", "--subjects", f"{recipe},{recipe}:hp_gather"])
        assert left.value.code == code


def test_subjects_must_train_alike_and_begin_without_memory_of_others() -> None:
    alike = [Result("peer_bf16", 1.0, 1.0, [10.0, 9.0]), Result("bf16", 1.0, 1.0, [10.0, 9.17], before=0.05)]
    assert bench_e2e.unlike(alike) == []
    apart, kept = replace(alike[1], losses=[8.7]), replace(alike[1], before=6.0)
    assert "last loss 8.7000, peer_bf16 has 9.0000: more than 2% apart" in bench_e2e.unlike([alike[0], apart])[0]
    assert "6.00 GiB were still allocated before it" in bench_e2e.unlike([alike[0], kept])[0]
    assert len(bench_e2e.unlike([alike[0], replace(apart, losses=[float("nan")])])) == 1


def test_the_learning_rate_is_small_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    def measure(subject: Subject, **options: Any) -> Result:
        rates.append(options["config"].train.lr)
        return Result(subject.name, 10.0, 1.0, [3.0])

    monkeypatch.setattr(bench_e2e, "measure", measure)
    for more in ([], ["--train.lr", "0.5"]):
        with pytest.raises(SystemExit):
            bench_e2e.main(["tiny", "--subjects", "bf16", *more])
    assert rates == [1e-7, 0.5]


def test_suffixes_say_how_a_step_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(bench_e2e, "build", lambda config, mesh, device: built.append(config) or Namespace(graph=False))
    config, device = (
        bench_e2e.command_line(bench_e2e.overrides.make_parser("", "", "tiny", {}), [])[1],
        torch.device("cpu"),
    )
    for subject in subjects_of("nvfp4,nvfp4:hp_gather,nvfp4:eager", "cuda"):
        bench_e2e.make_step(subject, config, None, device)  # type: ignore[arg-type]
    assert [each.groups[0].recipe for each in built] == ["nvfp4"] * 3
    assert [each.mesh.quantized_gather for each in built] == [True, False, True]
    assert [each.train.cuda_graph for each in built] == ["auto", "auto", False]
