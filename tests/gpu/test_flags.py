"""Casts on a GPU set the same flags as casts on a CPU: single casts, batches, and casts fused with the op that computes
their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlp.kernels import ops
from dlp.quant.quantizer import flagged, one_read
from dlp.quant.recipe import load
from tests.gpu.batched import BATCHED, SIZES
from tests.gpu.inputs import values, views
from tests.gpu.test_quantizers import PAIRS, at, fitting, slot
from tests.paired_models import values as normal

LARGEST = torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_wherever_the_value_lies(device, pair, dtype):
    """A cast detects a non-finite value at every position, in complete and in partial tiles and in every view. Finite
    values set no flag."""
    block, both = max(max(quantizer.format.multiple) for quantizer in pair) > 1, one_read(*pair)
    shape, largest = (192, 288) if block else (200, 300), min(LARGEST, torch.finfo(dtype).max)
    for row, column, value in (
        (5, 7, torch.inf), (shape[0] - 1, shape[1] - 1, torch.nan), (130, 3, -torch.inf), (3, 200, largest),
        (0, shape[1] - 1, -torch.nan), (77, 77, -largest),
    ):  # fmt: skip
        matrix = values("gauss", *shape, dtype)
        matrix[row, column] = value
        there = views(matrix.to(device))
        for how, same in fitting(pair, matrix).items():
            x, expected = there[how], not bool(same.isfinite().all())
            found = torch.zeros(3, device=device)
            one = flagged(pair[0], x, found[0]), flagged(pair[1], x, found[1]), flagged(pair[0], x, found[2])
            pair[0].cast(x, pair[0].observe(x), slot=slot(device), at=at(x, device)[0], **one[0])
            pair[1].cast(x.t(), pair[1].observe(x.t()), slot=slot(device), at=at(x, device)[1], **one[1])
            both.cast(x, both.observe(x), slot=slot(device), at=at(x, device), **one[2])
            assert found.isnan().tolist() == [expected] * 3, f"{value} at {row}, {column}, {how}"
            assert expected or not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantizer", BATCHED, ids=str)
def test_each_matrix_of_a_batch_has_its_own(device, quantizer: Any, dtype: torch.dtype):
    xs = [values("gauss", *size, dtype, seed).to(device) for seed, size in enumerate(SIZES)]
    both = one_read(quantizer, quantizer)
    assert both is not None
    outs: Any = [both.cast(x, both.observe(x), slot=slot(device)) for x in xs]
    flags = torch.zeros(len(xs), device=device)
    launches = quantizer.batch(xs, outs, [slot(device) for _ in xs], flags.unbind())  # type: ignore[misc]
    for bad in (None, 1, 2, 0):
        flags.zero_()
        if bad is not None:
            xs[bad][-1, -1] = -torch.inf
        for launch in (*launches.observe, *launches.cast):
            launch()
        assert flags.isnan().tolist() == [i == bad for i in range(len(xs))]
        if bad is not None:
            xs[bad][-1, -1] = 0


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["norm", "layer norm", "gated", "summed"])
def test_what_a_cast_makes_is_looked_at(device, recipe: str, kind: str):
    """A fused cast checks the values that it computes. They can overflow although all inputs are finite; in `summed` an
    input is Inf."""
    operand = getattr(load(recipe), "dy" if kind == "summed" else "x")
    both = one_read(operand.rowwise, operand.columnwise)
    assert both is not None
    for bad in (False, True):
        x, up = (normal(seed, 256, 384).to(device) for seed in (1, 2))
        weight = torch.ones(384, dtype=torch.bfloat16, device=device)
        if bad:
            x[130, 300] = up[130, 300] = torch.inf if kind == "summed" else LARGEST
            weight[300] = LARGEST
        made = {
            "norm": ops.RmsNormed(x, weight, 1e-6), "layer norm": ops.LayerNormed(x, weight, 0 * weight, 1e-6),
            "gated": ops.Gated(x, up), "summed": ops.Summed(x),
        }[kind]  # fmt: skip
        if "norm" in kind and bad:
            x[130] = torch.ones(384, device=device)
            x[130, 300] = 300.0
        flag = torch.zeros((), device=device)
        both.cast(made, both.observe(made), slot=slot(device), at=at(x, device), **flagged(operand.rowwise, made, flag))  # type: ignore[arg-type]
        assert bool(flag.isnan()) == (not bool(ops.stored(made).isfinite().all())) == bad
