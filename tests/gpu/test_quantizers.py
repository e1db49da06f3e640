"""Quantizers on a GPU give the bits they give on the CPU, through the kernels, whatever view of a matrix they get."""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import loader, ops
from dlp.quant.quantizer import ScaleSlot, cast_op, one_read
from dlp.quant.recipe import load
from dlp.quant.tensor import QuantizedTensor
from tests.gpu.inputs import values, views
from tests.gpu.trained import trained
from tests.metrics import assert_bit_equal

RECIPES = [
    load("fp8_current"), load("fp8_current", power_of_two=True, epsilon=1e-3), load("fp8_delayed", margin=1),
    load("fp8_block"), load("fp8_block", power_of_two=False, fp8_format="HYBRID"),
]  # fmt: skip
QUANTIZERS = list(dict.fromkeys(operand.rowwise for recipe in RECIPES for operand in (recipe.x, recipe.w, recipe.dy)))


def assert_same(made: QuantizedTensor, expected: QuantizedTensor, what: str) -> None:
    for part, left, right in zip(expected.format.parts, made.parts, expected.parts, strict=True):
        assert_bit_equal(left.cpu(), right, f"{part.name}, {what}")


def slot(device: str) -> ScaleSlot:
    return ScaleSlot(torch.tensor(3.0, device=device), torch.zeros((), device=device))


def test_there_are_kernels(device):
    assert loader.missing() == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("data", ["gauss", "specials"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_a_cast_on_the_gpu_is_the_one_on_the_cpu(device, quantizer, dtype, data):
    assert cast_op(quantizer), "a quantizer of this list has a kernel"
    matrix = values(data, 200, 300, dtype)
    theirs = views(matrix.to(device))
    for how, x in views(matrix).items():
        mine, slots = theirs[how], (slot("cpu"), slot(device), slot(device))
        one = quantizer.cast(x, quantizer.observe(x), slot=slots[0])
        other = quantizer.cast(x.t(), quantizer.observe(x), slot=slot("cpu"))
        assert_same(quantizer.cast(mine, quantizer.observe(mine), slot=slots[1]), one, how)
        row, col = one_read(quantizer)(mine, quantizer.observe(mine), slot=slots[2])
        assert_same(row, one, f"row of both, {how}")
        assert_same(col, other, f"column of both, {how}")
        for recorded in slots[1:]:
            assert_bit_equal(recorded.staging.cpu(), slots[0].staging, f"staging, {how}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_amax_on_the_gpu_is_the_one_on_the_cpu(device, dtype):
    matrix = values("specials", 70, 90, dtype)
    theirs = views(matrix.to(device))
    for how, x in views(matrix).items():
        assert_bit_equal(ops.amax(theirs[how]).cpu(), ops.amax(x), how)
        assert_bit_equal(ops.amax(theirs[how], 1).cpu(), ops.amax(x, 1), f"rows, {how}")


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_cast_reads_nothing_back(device, recipe):
    """No cast waits for the device: it can be captured in a CUDA graph and replayed on other values."""
    x, quantizer = values("gauss", 256, 512, torch.bfloat16), recipe.x.rowwise
    mine = x.to(device)
    one_read(quantizer)(mine, quantizer.observe(mine), slot=slot(device))  # loads the kernels
    torch.cuda.synchronize()
    captured, graph = slot(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row, col = one_read(quantizer)(mine, quantizer.observe(mine), slot=captured)
    mine.mul_(-4)
    graph.replay()
    assert_same(row, quantizer.cast(-4 * x, quantizer.observe(-4 * x), slot=slot("cpu")), "replayed")
    assert_same(col, quantizer.cast(-4 * x.t(), quantizer.observe(-4 * x), slot=slot("cpu")), "replayed, transposed")


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_weights_cast_together_are_those_cast_alone(device, recipe, monkeypatch):
    losses, runtime = trained(recipe, device=device)
    monkeypatch.setattr(ops, "has_batches", lambda x: False)
    expected, alone = trained(recipe, device=device)
    assert_bit_equal(losses, expected, recipe)
    assert len(expected.unique()) == len(expected), "the weights change"
    assert runtime.weight_batch._launches and not alone.weight_batch._launches
