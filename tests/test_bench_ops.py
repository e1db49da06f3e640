"""bench.ops: the measured variants compute the same results; output without a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from bench import ops as bench
from dlp.parallel.linear.state import cores
from tests.metrics import assert_close
from tests.ops_models import values


@pytest.mark.parametrize("words", [["--host"], ["--shapes", "64x64", "--only", "mlp"]])
def test_the_benchmark_says_that_it_needs_a_gpu(words: list[str], capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("it would run")
    assert bench.main(words) == 3
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["mlp", "layer"])
def test_the_subjects_of_the_benchmark_compute_the_same(kind: str):
    torch.manual_seed(0)
    make = bench.mlp if kind == "mlp" else bench.layer
    fused = make(1024, 64, "fp8_current", None)
    apart = bench.unfused(copy.deepcopy(fused))
    x, more = values(1, 4, 1024), {} if kind == "mlp" else {"batch": 2}
    assert_close(apart(x, **more), fused(x, **more), 1e-6)
    plain = (bench.PlainMlp if kind == "mlp" else bench.PlainLayer)(1024, 64)
    assert plain(x, **more).shape == fused(x, **more).shape


def test_the_host_is_measured_between_two_steps():
    for name, module in bench.tiny("fp8_current", "cpu").items():
        assert all(each.weights.parts is not None for each in cores(module)), f"{name}: passes cast its weights"
