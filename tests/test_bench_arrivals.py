"""bench.arrivals on the played device, with events and streams that stand in: it comes to its end, and judges."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import arrivals
from tests.emulated import OnGpu, emulated  # noqa: F401

TIMES = {
    "whole": 100.0,
    "laid": 104.0,
    "chunks": 110.0,
    "inside": 101.0,
    "stored": 102.0,
    "copied": 40.0,
    "serial": 144.0,
    "chunked": 120.0,
}


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...
    def record(self) -> None: ...
    def wait(self) -> None: ...
    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, priority: int = 0) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...


@pytest.fixture
def standing_in(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def write(words: Tensor, at: int, value: int) -> None:
        words.view(torch.int32)[at] = value

    generator, found = torch.Generator, SimpleNamespace(multi_processor_count=132)
    stands: dict[str, Any] = {
        "Event": Event, "Stream": Stream, "current_stream": Stream, "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None, "is_available": lambda: True, "get_device_capability": lambda: (9, 0),
        "get_device_name": lambda: "a GPU that is played", "get_device_properties": lambda device: found,
    }  # fmt: skip
    for name, value in stands.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(arrivals, "_SymmetricMemory", SimpleNamespace(stream_write_value32=write))
    for name in ("ROUNDS", "CALLS"):
        monkeypatch.setattr(arrivals, name, 1)
    monkeypatch.setattr(arrivals, "STEADY", 0.0)


def test_it_runs_to_its_end(
    standing_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with OnGpu():
        assert arrivals.main(["--shapes", "512x512x136", "1024x1024x128", "--json", str(tmp_path / "found.json")]) == 0
    said, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["512x512x136", "1024x1024x128"] and {*found["512x512x136"]} == {*TIMES, "fused"}
    assert said.count("of chunked 1.000") == 6 and "does not pay beside chunked (0.97)" in said


@pytest.mark.parametrize(
    ("fused", "says"),
    [(116.0, "less a tile 1.060  of chunked 0.967  ok (1.10)  pays beside chunked (0.97)"),
     (121.0, "less a tile 1.110  of chunked 1.008  MISSED (1.10)  does not pay beside chunked (0.97)")],
)  # fmt: skip
def test_it_judges_what_waits_inside(fused: float, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A GEMM of 100 in ten waves, its last tile 10."""
    arrivals.show("8192x4096x7168", {**TIMES, "fused": fused}, 10)
    whole, serial, chunked, last = capsys.readouterr().out.splitlines()
    assert whole.startswith(
        "8192x4096x7168     whole 100.0  laid 104.0  chunks 110.0  inside 101.0  stored 102.0  copied 40.0  serial 144.0"
    )
    assert "less a tile 1.340  of chunked 1.200" in serial and "less a tile 1.100  of chunked 1.000" in chunked
    assert last.split() == ["fused", *says.split()]


def test_a_shape_that_no_such_gemm_takes_is_refused(standing_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, code: int) -> None:
        raise SystemExit(said, code)

    monkeypatch.setattr(arrivals, "refuse", refused)
    with pytest.raises(SystemExit, match=r"512x384x136: M of both ranks and K must be multiples of 512 .*2"):
        arrivals.main(["--shapes", "512x384x136"])


def test_its_help_says_what_it_does_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arrivals.main(["--help"])
    said = capsys.readouterr().out
    assert "A shape takes some ten seconds" in said and "one GEMM that may wait" in said
