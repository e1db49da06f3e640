"""`bench.quantize` judges the bandwidth of kernels on large inputs relative to a copy, with the same threshold for both
dtypes. No device: launches are simulated."""

from __future__ import annotations

import pytest
import torch

from bench import quantize as bench_quantize
from bench.quantize import TARGETS, Launch, Line


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(lambda: None, (torch.empty(1024),))
    monkeypatch.setattr(bench_quantize, "rotation", lambda make: [launch])
    monkeypatch.setattr(bench_quantize, "graph_of", lambda launches: ())
    monkeypatch.setattr(bench_quantize, "replay", lambda *graph: 1.0)
    monkeypatch.setattr(bench_quantize, "host_us", lambda run: 1.0)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: ones(*shape, dtype=dtype))


def line(name: str, dtype: torch.dtype, megabytes: float) -> Line:
    return bench_quantize.measure(name, lambda x: Launch(lambda: None, (x,)), dtype, megabytes)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in bench_quantize.DTYPES], ids=str)
def test_large_inputs_are_judged_and_small_ones_are_not(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    for name, target in TARGETS.items():
        assert [line(name, dtype, megabytes).target for megabytes in (64, 256, 512)] == [None, target, target]
    assert line("decode mxfp8", dtype, 256).target is None
    bench_quantize.show(line("amax", dtype, 256))
    assert capsys.readouterr().out.endswith("  ok (0.9)\n")
