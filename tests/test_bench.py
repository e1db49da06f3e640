"""`bench` runs every part, whatever becomes of one, and hands shapes to those that take them. No device: parts are
stood in for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import tensor_parallel
from dlp.kernels import loader

SHAPES = ["8192x4096x4096", "512x128x64"]
Calls = dict[str, list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Arguments of the parts that ran, in order; gemm raises, and linear returns 3."""
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
        (["host", "--shapes", *SHAPES], "--shapes: none of host takes shapes; leave it away, or add gemm or linear"),
        (["--shapes", "8192x4096"], "argument --shapes: invalid shape value: '8192x4096'"),
        (["linears"], "unknown part linears: the parts are host, quantize, producers, gemm, linear, boundary"),
    ],
)
def test_what_no_part_can_do(arguments: list[str], says: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2 and says in capsys.readouterr().err and not calls


def test_linears_over_gpus_say_that_they_need_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tensor_parallel.main([]) == 2
    assert "needs GPUs: torchrun" in capsys.readouterr().err
