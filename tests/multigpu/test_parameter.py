"""QuantizedParameter over two ranks: as a DTensor, and sharded by torch's FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from dlp.quant import recipe as recipes
from dlp.quant.parameter import QuantizedParameter
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.test_parameter import linear

FORMATS = ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]


def as_dtensor(recipe: str) -> None:
    layer, x = linear(recipe, dynamic=False)
    layer, x = layer.to(worker.device()), x.to(worker.device())
    tp, weight = worker.mesh(tp=2)["tp"], layer.weight.detach()
    for dim in (0, 1):
        piece = weight.split(weight.shape[dim] // 2, dim)[tp.get_local_rank()]
        spread = DTensor.from_local(piece, tp, [Shard(dim)], run_check=False)
        assert spread.shape == weight.shape
        whole = spread.full_tensor()
        decoded = whole.dequantize() if isinstance(whole, QuantizedParameter) else whole  # a tile would be cut
        assert isinstance(whole, QuantizedParameter) or recipe == "fp8_block"
        assert_bit_equal(decoded, weight.dequantize())
        given = DTensor.from_local(x, tp, [Replicate()], run_check=False)
        if dim == 1:
            given = given.redistribute(placements=[Shard(1)])
        y = (given @ spread.t()).full_tensor()
        expected = torch.nn.functional.linear(x, weight.dequantize())
        assert (y - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.ranks(2)
def test_a_cut_of_a_matrix_of_parts(ranks, recipe):
    ranks(2).run(as_dtensor, recipe)


def by_fsdp(recipe: str) -> None:
    layer, x = linear(recipe)
    layer, x = layer.to(worker.device()), x.to(worker.device())
    expected = layer(x)
    model = nn.Sequential(layer)
    fully_shard(model, mesh=worker.mesh()["dp_shard"])
    local = layer.weight.to_local()
    assert isinstance(local, QuantizedParameter) and local.shape == (128, 128)
    for _ in range(2):
        assert_bit_equal(model(x), expected)
    model.reshard()
    assert_bit_equal(layer.weight.full_tensor().dequantize(), linear(recipe)[0].weight.dequantize().to(x.device))


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.ranks(2)
def test_fsdp_gathers_codes(ranks, recipe):
    ranks(2).run(by_fsdp, recipe)


def cut_blocks() -> None:
    quantizer = recipes.load("nvfp4").w.rowwise
    layer, x = nn.Linear(32, 48, bias=False), torch.randn(4, 32)
    layer.weight = nn.Parameter(QuantizedParameter.from_float(layer.weight, quantizer), requires_grad=False)
    values = layer.weight.dequantize()
    fully_shard(layer, mesh=worker.mesh()["dp_shard"])
    assert type(layer.weight.to_local()) is torch.Tensor
    assert_bit_equal(layer(x), torch.nn.functional.linear(x, values))


@pytest.mark.ranks(2)
def test_shards_that_cut_blocks_are_of_values(ranks):
    """24 rows of tiles of 16: said, and right."""
    ranks(2).run(cut_blocks)
