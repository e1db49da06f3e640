"""`bench.linear` measures each shape in a separate process and reports every failure. No device: processes and
measurements are replaced."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from bench import linear as bench_linear
from bench import linear_shape as bench_linear_shape
from bench.linear import BASE, Line, Times
from bench.linear_subjects import ALL_FAST, ALL_TUNED, Shape, own_name, recipe_of
from dlp.kernels import gemms, loader, tune
from dlp.parallel.model.boundary import end_step
from dlp.quant import gemm as quant_gemm
from dlp.quant.recipe import GEMMS
from tests.emulated import OnGpu, emulation

SHAPES = ["256x128x64", "512x128x64"]
DIES = "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"
KILLED = "import os, sys; print('working', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"


def line(recipe: str, shape: Shape, device: float = 2.0) -> Line:
    return Line(
        recipe, *shape, Times(device, 0.7, 1.3, None, 2.5), Times(1.0, 1.0, 1.0, None, 1.0), 1.5, 1.7, 900.0, None
    )


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", lambda: None)
    monkeypatch.setattr(quant_gemm, "device_kind", lambda kind: "sm_90")
    bench_linear_shape.cast_bytes.cache_clear()
    bench_linear_shape.tuned_choices.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no device")
    monkeypatch.setattr(bench_linear, "installed_peers", lambda: ["torchao"])
    monkeypatch.setattr(bench_linear_shape, "installed_peers", lambda: ["torchao"])


def test_every_shape_has_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def command_of(shape: str, options: Namespace, file: Path) -> Sequence[str]:
        tokens, k, n = bench_linear.shape_of(shape)
        found = bench_linear.written([line(BASE, (tokens, k, n))], [])
        return [sys.executable, "-c", f"import os, pathlib; assert input() == 'go'; print('row by', os.getpid()); "
                f"pathlib.Path({str(file)!r}).write_text({json.dumps(found)!r})"]  # fmt: skip

    monkeypatch.setattr(bench_linear, "command_of", command_of)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert bench_linear.main(["--shapes", *SHAPES, "--json", str(out), "--plot", str(picture)]) == 0
    assert picture.exists()
    rows = [row for row in capfd.readouterr().out.splitlines() if row.startswith("row by")]
    assert len(set(rows)) == 2
    found = json.loads(out.read_text())
    assert [row["tokens"] for row in found["lines"]] == [256, 512] and found["failures"] == []
    assert found["lines"][0]["ms"] == {"device": 2.0, "fwd": 0.7, "bwd": 1.3, "sustained": None, "host": 2.5}


@pytest.mark.parametrize(("program", "why"), [(DIES, "ended with 3: out of luck"), (KILLED, "ended with -9: working")])
def test_a_process_that_dies_has_its_words_in_every_row(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_linear, "command_of", lambda *_: [sys.executable, "-c", program])
    out = tmp_path / "out.json"
    assert bench_linear.main(["--shapes", *SHAPES, "--recipes", "fp8_block", "--json", str(out)]) == 1
    said = capfd.readouterr()
    assert why.split(": ")[1] in said.err
    for shape in SHAPES:
        for recipe in (BASE, "fp8_block", "torchao"):
            wanted = bench_linear.SUBJECT.format(recipe, *bench_linear.shape_of(shape)) + f" FAILED: the process {why}"
            assert wanted in said.out.splitlines()
    assert len(json.loads(out.read_text())["failures"]) == 6


def test_the_command_measures_one_shape() -> None:
    command = bench_linear.command_of("8x8x8", Namespace(where=True, recipes=["bf16"]), Path("f"))
    assert command[1:] == [
        "-m",
        "bench.linear_shape",
        "8x8x8",
        "--wait",
        "--json",
        "f",
        "--where",
        "--recipes",
        "bf16",
    ]


def test_a_subject_that_fails_has_a_row_and_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(recipe: str, shape: Shape, base: Line | None) -> Line:
        if recipe == "torchao":
            raise RuntimeError("no kernel for this\nand more")
        assert (base is None) == (recipe == BASE)
        return line(recipe, shape)

    monkeypatch.setattr(bench_linear_shape, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    out = tmp_path / "out.json"
    assert bench_linear_shape.main(["256x128x64", "--recipes", "fp8_block", "--json", str(out)]) == 1
    said = capsys.readouterr()
    assert [row.split()[0] for row in said.out.splitlines()] == [BASE, "fp8_block", "torchao"]
    assert "FAILED: RuntimeError: no kernel for this" in said.out and "and more" in said.err
    found = json.loads(out.read_text())
    assert [row["recipe"] for row in found["lines"]] == [BASE, "fp8_block"]
    (failure,) = found["failures"]
    assert (failure["recipe"], failure["why"]) == ("torchao", "RuntimeError: no kernel for this")


def test_a_process_whose_parent_is_gone_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_linear_shape, "measure_all", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert bench_linear_shape.main(["256x128x64", "--wait"]) == 1


def test_without_nn_linear_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(recipe: str, shape: Shape, base: Line | None) -> Line:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_linear_shape, "measure", measure)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench_linear_shape.main(["256x128x64"])


def test_shares_are_those_of_nn_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"device_ms": 2.0, "sustained_ms": 3.0, "host_ms": 3.5}
    parts = Namespace(iteration=None, forward=None, backward=None, boundary=None)
    monkeypatch.setattr(bench_linear_shape, "Subject", lambda recipe, shape: parts)
    for name, ms in times.items():
        monkeypatch.setattr(bench_linear_shape, name, lambda run, ms=ms, **_: ms)
    monkeypatch.setattr(bench_linear_shape, "parts_ms", lambda runs, **_: [0.5, 1.5, 0.0])
    alone = {"bf16": 1.9, "fp8_current": 1.0, "fp8_current:fast": 0.7}
    monkeypatch.setattr(bench_linear_shape, "gemms_ms", lambda recipe, shape: alone[recipe])
    monkeypatch.setattr(bench_linear_shape, "copied_in_ms", lambda: 1e9)
    shape = (8192, 4096, 4096)
    base = bench_linear_shape.measure(BASE, shape, None)
    assert base.shares == Times(1.0, 1.0, 1.0, 1.0, 1.0) and (base.gemms, base.floor, base.target) == (1.9, 1.9, None)
    assert base.verdicts() == {}
    monkeypatch.setattr(bench_linear_shape, "device_ms", lambda run: 1.2)
    monkeypatch.setattr(bench_linear_shape, "parts_ms", lambda runs, **_: [0.4, 0.75, 0.05])
    monkeypatch.setattr(bench_linear_shape, "sustained_ms", lambda run, **_: None)
    ours = bench_linear_shape.measure("fp8_delayed", shape, base)
    assert ours.ms == Times(1.2, 0.4, 0.75, None, 3.5) and ours.shares == Times(0.6, 0.8, 0.5, None, 1.0)
    assert ours.floor == pytest.approx(1.0 + 1.15 * 4 * (8192 * 8192 + 4096 * 4096) / 1e9) and ours.target == 0.82
    assert ours.of_floor == pytest.approx(1.2 / ours.floor) and ours.verdicts() == {"target": True, "floor": True}
    fast = bench_linear_shape.measure("fp8_delayed:fast", shape, base)
    assert (fast.gemms, fast.target) == (0.7, None) and fast.floor == pytest.approx(ours.floor - 0.3)
    assert fast.of_floor == pytest.approx(1.2 / fast.floor) and fast.verdicts() == {"floor": False}
    chosen: list[dict[Any, int]] = []
    found = tune.Fastest((7,), [2.0, 1.0])
    monkeypatch.setattr(bench_linear_shape, "gemms_of", lambda recipe, shape: [recipe])
    monkeypatch.setattr(bench_linear_shape, "fastest", lambda call, timed: found._replace(problem=(call,)))
    monkeypatch.setattr(bench_linear_shape, "by_candidates", lambda given: chosen.append(given) or nullcontext())
    tuned = bench_linear_shape.measure("fp8_delayed:tuned", shape, base)
    assert chosen == [{("fp8_current",): 1}], "the GEMMs of both recipes are the same"
    assert (tuned.gemms, tuned.floor, tuned.target) == (1.0, ours.floor, 0.82)
    assert bench_linear_shape.measure("bf16", shape, base).verdicts() == {"floor": True} and len(chosen) == 1
    peer = bench_linear_shape.measure("torchao", shape, base)
    assert peer.gemms == 0.0 and peer.verdicts() == {}


@pytest.mark.parametrize(
    ("recipe", "per_token", "per_weight"),
    [
        ("bf16", 0, 0),
        ("fp8_current", 2 * 2 + 2, 2 * 2 + 2),
        ("fp8_delayed", 2 + 2, 2 + 2),
        ("fp8_rowwise", 2 * 2 + 2 * (1 + 4 / 4096), 2 * 2 + 2 * (1 + 4 / 4096)),
        ("fp8_block", 2 + 2 * (1 + 4 / 128), 2 + 2 * (1 + 4 / 128**2)),
        ("mxfp8", 2 + 4 * (1 + 1 / 32) + 4, 2 + 4 * (1 + 1 / 32) + 4),  # 10.125
        ("nvfp4", 10.25, 2 * 2 + 4 * (1 / 2 + 1 / 16**2) + 4),
    ],
)
def test_bytes_of_casts_are_those_of_their_formats(recipe: str, per_token: float, per_weight: float) -> None:
    assert bench_linear_shape.cast_bytes(recipe) == pytest.approx((per_token, per_weight), rel=1e-6)


@pytest.mark.parametrize("recipe", ALL_TUNED)
def test_what_is_tuned_is_what_a_linear_runs(recipe: str) -> None:
    """The arguments of a GEMM are the key of a measured choice, so both must be equal. The comparison omits the alignment
    of operands, which depends on the allocator."""
    tokens, k, n = 256, 128, 384

    def ran() -> set[gemms.GemmProblem]:
        found = {problem._replace(alignment=0) for problem, *_ in gemms.plans()}
        gemms.plans().clear()
        return found

    with emulation(), OnGpu():
        linear = nn.Sequential(dlp.Linear(k, n, recipe=recipe_of(recipe), dtype=torch.bfloat16))
        dlp.attach(linear, torch.optim.SGD(linear.parameters()))
        end_step(linear)
        x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
        linear(x).backward(torch.randn(tokens, n, dtype=torch.bfloat16))
        of_linear = ran()
        for call in bench_linear_shape.gemms_of(recipe, (tokens, k, n)):
            call()
        assert ran() == of_linear and len(of_linear) == 3


def test_fast_accumulates_fast_in_every_gemm() -> None:
    for name in ALL_FAST:
        fast, own = recipe_of(name), recipe_of(own_name(name))
        assert [getattr(fast, which).fast_accumulation for which in GEMMS] == [True, True, True]
        assert [getattr(own, which).fast_accumulation for which in GEMMS] == [True, False, False]


def test_columns_stand_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    bench_linear.show(line("fp8_delayed:fast", (16384, 8192, 28672)))
    (row,) = capsys.readouterr().out.splitlines()
    assert len(row) == len(bench_linear.head())
    assert row.split()[4:] == "2.000 1.000 0.700 1.000 1.300 1.000 - - 2.500 1.000 1.500 1.700 900".split()


@pytest.mark.parametrize(
    ("target", "of_floor", "says"),
    [
        (0.87, 0.99, "900  MISSED (0.87)  floor ok"),
        (1.0, 1.01, "900  ok (1.0)  above floor by 1.0 %"),
        (None, 1.0, "900  floor ok"),
        (None, None, "900"),
    ],
)
def test_a_row_ends_with_its_verdicts(
    target: float | None, of_floor: float | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_linear.show(replace(line("fp8_current", (8192, 4096, 4096)), target=target, of_floor=of_floor))
    (row,) = capsys.readouterr().out.splitlines()
    assert row.endswith(f" {says}") and len(row) < len(bench_linear.head()) + 40


def test_a_recipe_is_judged_by_the_fastest_peer_of_its_kind() -> None:
    """A recipe, with or without tuned GEMMs, is compared with the fastest of the peers in PEERS_OF. With fast
    accumulation, or without peers, it is not compared."""
    shape = (8192, 4096, 4096)
    times = {BASE: 4.0, "fp8_current": 2.0, "fp8_delayed": 1.8, "fp8_current:fast": 1.0, "fp8_delayed:tuned": 1.7,
             "fp8_rowwise": 3.0, "fp8_block": 2.5, "mxfp8": 5.0, "torchao": 1.9, "torchao rowwise": 1.5, "te current": 1.6,
             "te delayed": 2.0}  # fmt: skip
    found = {
        each.recipe: each for each in bench_linear.beside_peers([line(name, shape, ms) for name, ms in times.items()])
    }
    assert {name: (each.peer, each.of_peer) for name, each in found.items() if each.peer} == {
        "fp8_current": ("te current", 2.0 / 1.6),
        "fp8_delayed": ("torchao", 1.8 / 1.9),
        "fp8_delayed:tuned": ("torchao", 1.7 / 1.9),
        "fp8_rowwise": ("torchao rowwise", 2.0),
    }
    judged = [found[name].verdicts() for name in ("fp8_current", "fp8_delayed", "mxfp8")]
    assert judged == [{"peer": False}, {"peer": True}, {}]


def test_verdicts_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {BASE: 4.0, "fp8_current": 1.9, "torchao": 2.0}
    monkeypatch.setattr(bench_linear_shape, "measure", lambda recipe, shape, base: line(recipe, shape, device[recipe]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    out = tmp_path / "out.json"
    assert bench_linear_shape.main(["256x128x64", "--recipes", "fp8_current", "--json", str(out)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == bench_linear.SUBJECT.format("fp8_current", 256, 128, 64) + " 0.950 of torchao  ok"
    _, ours, peer = json.loads(out.read_text())["lines"]
    assert (ours["peer"], ours["of_peer"], ours["verdicts"]) == ("torchao", 0.95, {"peer": True})
    assert (peer["peer"], peer["of_peer"], peer["verdicts"]) == (None, None, {})
    assert bench_linear._line(ours) == replace(line("fp8_current", (256, 128, 64), 1.9), peer="torchao", of_peer=0.95)
