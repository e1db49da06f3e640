"""Quantizers on a GPU give the bits of the CPU for every view of a matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlp.kernels import loader, ops
from dlp.quant.quantizer import Origin, ScaleSlot, caps_of, one_read
from dlp.quant.recipe import load
from dlp.quant.tensor import QuantizedTensor
from tests.gpu.batched import BATCHED, check_batch
from tests.gpu.inputs import values, views
from tests.gpu.trained import trained
from tests.metrics import assert_bit_equal

RECIPES = [
    load("fp8_current"), load("fp8_current", power_of_two=True, epsilon=1e-3), load("fp8_delayed", margin=1),
    load("fp8_rowwise"), load("fp8_rowwise", power_of_two=False, fp8_format="HYBRID"),
    load("fp8_block"), load("fp8_block", power_of_two=False, fp8_format="HYBRID"),
    load("mxfp8"), load("mxfp8", scale_rounding="floor", fp8_format="HYBRID", enable_2d_quantization=True),
    load("nvfp4"), load("nvfp4", disable_rht=True), load("nvfp4", disable_stochastic_rounding=True),
    load("nvfp4", disable_2d_quantization=True),
]  # fmt: skip
PAIRS = list(dict.fromkeys((q.rowwise, q.columnwise) for recipe in RECIPES for q in (recipe.x, recipe.w, recipe.dy)))


def assert_same(made: QuantizedTensor, expected: QuantizedTensor, what: str) -> None:
    for part, left, right in zip(expected.format.parts, made.parts, expected.parts, strict=True):
        assert_bit_equal(left.cpu(), right, f"{part.name}, {what}")


def slot(device: str) -> ScaleSlot:
    return ScaleSlot(torch.tensor(3.0, device=device), torch.zeros((), device=device))


def at(x: Tensor, device: str) -> tuple[Origin, Origin]:
    """Return two fixed origins (position in the unsharded matrix, random state), for the casts of x and of x.t()."""
    counter = torch.tensor(11, device=device)
    return Origin(7, 32, 900, 999, 1, 2, counter), Origin(5, 48, 999, 900, 1, 2, counter, 1)


def fitting(pair, matrix: Tensor) -> dict[str, Tensor]:
    """Return the views of a matrix whose sizes both formats support."""
    unit = max(max(quantizer.format.multiple) for quantizer in pair)
    return {how: x for how, x in views(matrix).items() if all(size % unit == 0 for size in x.shape)}


def test_there_are_kernels(device):
    assert loader.missing() == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("data", ["gauss", "specials"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_cast_on_the_gpu_is_the_one_on_the_cpu(device, pair, dtype, data):
    assert all(caps_of(quantizer).op for quantizer in pair), "quantizers of this list have kernels"
    block = max(max(quantizer.format.multiple) for quantizer in pair) > 1
    matrix = values(data, *((192, 288) if block else (200, 300)), dtype)
    theirs, (rowwise, columnwise), both = views(matrix.to(device)), pair, one_read(*pair)
    for how, x in fitting(pair, matrix).items():
        mine, slots = theirs[how], (slot("cpu"), slot(device), slot(device))
        one = rowwise.cast(x, rowwise.observe(x), slot=slots[0], at=at(x, "cpu")[0])
        other = columnwise.cast(x.t(), columnwise.observe(x.t()), slot=slot("cpu"), at=at(x, "cpu")[1])
        assert_same(rowwise.cast(mine, rowwise.observe(mine), slot=slots[1], at=at(x, device)[0]), one, how)
        turned = columnwise.cast(mine.t(), columnwise.observe(mine.t()), slot=slot(device), at=at(x, device)[1])
        assert_same(turned, other, f"columns, {how}")
        row, col = both.cast(mine, both.observe(mine), slot=slots[2], at=at(x, device))
        assert_same(row, one, f"row of both, {how}")
        assert_same(col, other, f"column of both, {how}")
        for recorded in slots[1:]:
            assert_bit_equal(recorded.staging.cpu(), slots[0].staging, f"staging, {how}")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_casts_of_matrices_of_any_size(device, pair):
    """Casts of matrices with random sizes that the formats support, for both orientations at once."""
    generator, both = torch.Generator().manual_seed(7), one_read(*pair)
    unit = max(max(quantizer.format.multiple) for quantizer in pair)
    for turn in range(12):
        rows, cols = ((1 + torch.randint(700 // unit, (2,), generator=generator)) * unit).tolist()
        x = values("specials", rows, cols, [torch.bfloat16, torch.float32][turn % 2], seed=turn)
        mine, slots = x.to(device), (slot("cpu"), slot(device))
        expected = both.cast(x, both.observe(x), slot=slots[0], at=at(x, "cpu"))
        made = both.cast(mine, both.observe(mine), slot=slots[1], at=at(x, device))
        for q, wanted, what in zip(made, expected, ("row", "column"), strict=True):
            assert_same(q, wanted, f"{what} of [{rows}, {cols}]")
        assert_bit_equal(slots[1].staging.cpu(), slots[0].staging, f"staging of [{rows}, {cols}]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_amax_on_the_gpu_is_the_one_on_the_cpu(device, dtype):
    matrix = values("specials", 70, 90, dtype)
    theirs = views(matrix.to(device))
    for how, x in views(matrix).items():
        assert_bit_equal(ops.amax(theirs[how]).cpu(), ops.amax(x), how)
        assert_bit_equal(ops.amax(theirs[how], 1).cpu(), ops.amax(x, 1), f"rows, {how}")


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_cast_reads_nothing_back(device, recipe):
    """A cast never waits for the device, so it can be captured in a CUDA graph and replayed with other values."""
    x, both = values("gauss", 256, 512, torch.bfloat16), one_read(recipe.dy.rowwise, recipe.dy.columnwise)
    mine, where = x.to(device), at(x, device)
    both.cast(mine, both.observe(mine), slot=slot(device), at=where)  # the first call loads the kernels
    torch.cuda.synchronize()
    captured, graph = slot(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = both.cast(mine, both.observe(mine), slot=captured, at=where)
    mine.mul_(-4)
    graph.replay()
    for q, quantizer, values_of, place in zip(
        made, (recipe.dy.rowwise, recipe.dy.columnwise), (-4 * x, -4 * x.t()), at(x, "cpu"), strict=True
    ):
        assert_same(q, quantizer.cast(values_of, quantizer.observe(values_of), slot=slot("cpu"), at=place), "replayed")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_casts_write_where_they_are_told(device, pair):
    """Casts write into the given output, such as a rank's segment of a gathered buffer."""
    x, both = values("gauss", 192, 288, torch.bfloat16).to(device), one_read(*pair)
    expected = both.cast(x, both.observe(x), slot=slot(device), at=at(x, device))

    def leased(q: QuantizedTensor) -> QuantizedTensor:
        whole = [torch.zeros(3, *part.shape, device=device).to(part.dtype) for part in q.parts]
        return q.format.wrap([part[1] for part in whole])

    outs = leased(expected[0]), leased(expected[1])
    both.cast(x, both.observe(x), slot=slot(device), at=at(x, device), outs=outs)
    for out, q, quantizer, values_of, where in zip(outs, expected, pair, (x, x.t()), at(x, device), strict=True):
        assert_same(out, q.format.wrap([part.cpu() for part in q.parts]), "both")
        alone = leased(q)
        quantizer.cast(values_of, quantizer.observe(values_of), slot=slot(device), at=where, out=alone)
        assert_same(alone, q.format.wrap([part.cpu() for part in q.parts]), "alone")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantizer", BATCHED, ids=str)
def test_a_batch_makes_what_casts_make_alone(device, quantizer, dtype):
    check_batch(quantizer, dtype, device)


@pytest.mark.parametrize(("dtype", "features"), [(torch.bfloat16, 160), (torch.float32, 160), (torch.bfloat16, 150)])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_weights_cast_together_are_those_cast_alone(device, recipe, dtype, features, monkeypatch):
    losses, runtime = trained(recipe, device=device, dtype=dtype, features=features)
    monkeypatch.setattr(ops, "has_batches", lambda x: False)
    expected, alone = trained(recipe, device=device, dtype=dtype, features=features)
    assert_bit_equal(losses, expected, recipe)
    assert len(expected.unique()) == len(expected), "the weights change"
    assert runtime.weight_batch.casts._prepared.launches and not alone.weight_batch.casts._prepared.launches
