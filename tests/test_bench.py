"""`bench` runs every part (benchmark) even if another part fails, and passes shapes to the parts that accept them. No
device: the parts are replaced by stubs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import operators, ranks, tensor_parallel
from bench.host_parallel import PLAIN
from bench.parallel_subjects import shape_of
from dlp.kernels import loader
from tests.command import command

SHAPES = ["8192x4096x4096", "512x128x64"]
Calls = dict[str, list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Arguments of the parts that ran, in order. The part gemm raises, and linear returns 3."""
    found: Calls = {}

    def standing_in(name: str, part: bench.Part) -> bench.Part:
        def main(arguments: Sequence[str]) -> int:
            found[name] = list(arguments)
            if name == "gemm":
                raise RuntimeError("out of memory")
            return 3 if name == "linear" else 0

        return part._replace(main=main)

    monkeypatch.setattr(loader, "load", lambda: None)
    monkeypatch.setattr(bench, "PARTS", {name: standing_in(name, part) for name, part in bench.PARTS.items()})
    return found


def test_a_part_that_fails_does_not_stop_the_others(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--out", str(tmp_path)]) == 3
    assert list(calls) == ["host", "quantize", "producers", "gemm", "linear", "boundary"]
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"results in {tmp_path}; failed: gemm (1), linear (3)"
    assert "out of memory" in said.err
    assert bench.main(["host", "boundary", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"results in {tmp_path}"


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_shapes_are_for_parts_that_take_them(quick: list[str], calls: Calls, tmp_path: Path) -> None:
    bench.main(["--out", str(tmp_path), "--shapes", *SHAPES, *quick])
    for name in ("gemm", "linear"):
        assert calls[name] == [
            "--json", str(tmp_path / f"{name}.json"), "--plot", str(tmp_path / f"{name}.png"), "--shapes", *SHAPES,
        ]  # fmt: skip
    assert calls["host"] == ["--json", str(tmp_path / "host.json"), *(["--recipes", "fp8_current"] if quick else [])]
    assert not any("--shapes" in calls[name] for name in ("host", "quantize", "boundary"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["host", "--shapes", *SHAPES],
            "--shapes: none of host takes shapes; leave --shapes out, or add gemm or linear",
        ),
        (["--shapes", "8192x4096"], "argument --shapes: invalid shape value: '8192x4096'"),
        (["linears"], "unknown part linears: the parts are host, quantize, producers, gemm, linear, boundary"),
    ],
)
def test_what_no_part_can_do(arguments: list[str], says: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2 and says in capsys.readouterr().err and not calls


def test_shares_are_of_plain_torch_and_of_serial() -> None:
    times = {(PLAIN, ""): [4.0, 2.0, 1.0], ("bf16", "serial"): [3.0, 2.5, 1.0], ("bf16", "auto"): [2.4, 2.0, 0.5]}
    plain, serial, chosen = tensor_parallel.lines_of("8x8", times, {})
    assert (plain.alone_share, plain.queued_share, plain.of_serial) == (1.0, 1.0, None)
    assert (serial.subject, serial.alone_share, serial.queued_share, serial.of_serial) == (
        "bf16 serial",
        0.75,
        1.25,
        None,
    )
    assert chosen.of_serial == pytest.approx((0.8, 0.8)) and chosen.alone_share == pytest.approx(0.6)
    slower = replace(chosen, of_serial=(0.9, 1.04))
    said = [tensor_parallel.beside_serial(line) for line in (plain, serial, chosen, slower)]
    assert [each.strip() for each in said] == ["", "", "never slower than serial", "SLOWER than serial"]


def test_auto_is_judged_alone_and_queued() -> None:
    def line(shape: str, name: str, alone: float, queued: float) -> tensor_parallel.Line:
        return tensor_parallel.Line(shape, name, 1.0, alone, 1.0, queued, 1.0)

    verdicts = [
        tensor_parallel.verdict(line(*given)) for given in (
            ("4096x14336", "fp8_block auto", 0.78, 0.7), ("4096x14336", "fp8_block auto", 0.7, 0.79),
            ("8192x28672x64x8", "bf16 auto", 0.9, 0.94), ("8192x28672", "fp8_block auto", 2.0, 2.0),
            ("4096x14336", "fp8_block serial", 2.0, 2.0), ("64x128", "bf16 auto", 2.0, 2.0), ("4096x14336", PLAIN, 1.0, 1.0),
        )
    ]  # fmt: skip
    assert verdicts == ["  ok (0.78)", "  MISSED (0.78)", "  ok (0.95)", "", "", "", ""]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("64x128", [("COLUMN_SP", 64, (128,)), ("ROW_SP", 128, (64,))]),
        ("64x128x4x2", [("COLUMN_SP", 64, (128, 128)), ("COLUMN_SP", 64, (64, 32, 32)), ("ROW_SP", 128, (64,)),
                        ("ROW_SP", 64, (64,))]),
    ],
)  # fmt: skip
def test_a_shape_has_its_linears(text: str, problems: list[object]) -> None:
    shape = shape_of(text)
    found = shape.problems(32, "bf16")
    assert str(shape) == text and [(p.style.name, p.in_features, p.out_features) for p in found] == problems
    with pytest.raises(ValueError, match="64: give 2 sizes for a pair, 4 for a layer"):
        shape_of("64")


def test_what_is_hidden_of_what_could_be() -> None:
    """A GEMM of 100 us and a transfer of 40 us take 144 us in sequence. If both together take 110 us, then 34 of 40 us
    are hidden, and 10 us are exposed."""
    found = operators.line("gather", (8, 8, 8), "bf16", "chunked", 110.0, (100.0, 40.0, 144.0))
    assert found.hidden == pytest.approx(34 / 40) and found.exposed == pytest.approx(10)
    assert found.of_ideal == pytest.approx(100 / 110) and found.of_sequential == pytest.approx(110 / 144)


def test_gathers_and_sums_of_fp8_have_bars() -> None:
    """The limit (a ratio) applies to the time without the last wave of output tiles, which takes 10 us in a GEMM of 100 us
    with ten waves."""

    def said(operator: str, recipe: str, strategy: str, time: float) -> str:
        parts = (100.0, 40.0, 144.0)
        return operators.verdict(operators.line(operator, (8, 8, 8), recipe, strategy, time, parts, 10)).strip()

    assert said("gather", "fp8_block", "serial", 120.0) == "ok (1.10)"
    assert said("gather", "fp8_current", "chunked", 120.5) == "MISSED (1.10)"
    assert said("sum", "fp8_block", "chunked", 124.0) == "ok (1.15)"
    assert said("sum", "fp8_block", "chunked", 125.5) == "MISSED (1.15)"
    assert said("gather", "bf16", "serial", 200.0) == ""


def test_operators_take_less_than_a_minute_by_default() -> None:
    """The repetitions may take 40 s, because starting the ranks takes up to 20 s."""
    count = operators.repetitions(len(operators.MODELS), len(operators.RECIPES), len(operators.STRATEGIES))
    assert count == 484 and f"{count} repetitions" in operators.__doc__ and count * operators.REPETITION <= 40


def test_waves_are_those_of_the_kernel_that_runs() -> None:
    """dlp's kernel divides the output into 32 x 75 pairs of tiles, and runs 66 pairs at once on 132 SMs. cuBLASLt divides
    the output into 64 x 56 tiles, and runs 132 tiles at once. cuBLASLt also runs the problems that are too small for dlp's
    kernel."""
    large = (8192, 8192, 14336)
    assert operators.waves_of(large, "fp8_block", 132) == 37 and operators.waves_of(large, "fp8_current", 132) == 28
    assert (
        operators.waves_of((64, 64, 64), "fp8_block", 132) == 1
        and operators.waves_of((64, 64, 64), "fp8_block", 1) == 1
    )


@pytest.mark.parametrize("judged", [True, False])
def test_a_line_of_an_operator_is_printed(judged: bool, capsys: pytest.CaptureFixture[str]) -> None:
    operators.show(operators.line("gather", (8, 8, 8), "fp8_block", "chunked", 116.0, (100.0, 40.0, 144.0), 10), judged)
    (said,) = capsys.readouterr().out.splitlines()
    assert ("ok (1.10)" in said) == judged and said.split()[-1 - 2 * judged] == "1.060"


@pytest.mark.parametrize("program", [tensor_parallel, operators])
def test_one_rank_has_nobody_to_send_to(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, code: int) -> None:
        raise SystemExit(f"{code}: {said}")

    monkeypatch.setattr(ranks, "refuse", refused)
    monkeypatch.setattr(ranks, "world_size", lambda: 1)
    with pytest.raises(SystemExit, match="^2: one rank has nothing to .*; start 2 or more"):
        program.main([])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench.inference", "--config", "nope"], "nope: no such config"),
        (["bench.predict", "--runs", "nope.json"], "[Errno 2] No such file or directory: 'nope.json'"),
    ],
)
def test_a_benchmark_that_cannot_start_is_one_sentence(arguments, told):
    done = command(*arguments)
    assert done.code > 0 and done.err.startswith(told) and done.err.count("\n") == 1
