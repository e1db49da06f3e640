"""QuantizedParameter over two ranks: as a DTensor, and sharded by torch's FSDP2."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.kernels import ops
from dlp.quant import recipe as recipes
from dlp.quant.fp8 import CurrentScaling, static
from dlp.quant.integers import IntScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.parameter import QuantizedParameter
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_bit_equal, relative_error
from tests.refusals import must_raise
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
        decoded = whole.dequantize() if isinstance(whole, QuantizedParameter) else whole  # values if shards cut tiles
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


@torch.no_grad()
def checkpointed(folder: str, factor: float, saves: bool) -> torch.Tensor:
    """Quantize a model, under FSDP if there are several ranks, and save a checkpoint (`saves`) or load it; return y.
    `factor` changes values and scales, so that a load must replace both."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), torch.randn(8, 64)
    for parameter in model.parameters():
        parameter.mul_(factor)
    with dlp.calibrate(model):
        model(factor * x)
    dlp.quantize_(model.to(worker.device()), "fp8_current", mode="static")
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=worker.mesh()["dp_shard"])
    state = {"model": model.state_dict()}
    (dcp.save if saves else dcp.load)(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return model(x.to(worker.device()))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.ranks(2)
def test_torchs_checkpoints_of_codes_go_to_another_mesh(ranks, tmp_path, before, after):
    (expected, *_) = ranks(before).run(checkpointed, str(tmp_path), 1.0, True)
    for found in ranks(after).run(checkpointed, str(tmp_path), 3.0, False):
        assert_bit_equal(found, expected)


class Adapted(nn.Module):
    """A linear with codes, and a trainable low-rank update. Backward recomputes activations."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(*size, bias=False) for size in ((k, n), (k, 8), (8, n)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.base(x) + self.up(self.down(x)), x, use_reentrant=False)


def adapters(recipe: str, spread: bool) -> list[torch.Tensor]:
    """Return y and dx of three training steps with adapters. `spread`: shard the model by FSDP."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(128, 256), nn.SiLU(), Adapted(256, 128)).to(worker.device())
    dlp.quantize_(model, recipe, lambda module, name: name.endswith("base"), mode="dynamic")
    for each in (model[0], model[2], model) if spread else ():
        fully_shard(each, mesh=worker.mesh()["dp_shard"])
    optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), []
    for _ in range(3):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).to(worker.device()).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [y, x.grad]
    return found


@pytest.mark.ranks(2)
def test_adapters_of_codes_train_under_fsdp(ranks):
    for recipe in ("fp8_current", "mxfp8"):
        expected, *sharded = ranks(1).run(adapters, recipe, False) + ranks(2).run(adapters, recipe, True)
        assert not torch.equal(expected[-2], expected[0]), "they learn"
        for found in sharded:
            for ours, alone in zip(found, expected, strict=True):
                assert_bit_equal(ours, alone)


@torch.no_grad()
def as_torch_sends(quantizer: Any) -> bool:
    """Return whether torch sends the weight of rank 0 as codes, in a broadcast and in `parallelize_module`; also check
    that an all-reduce of codes is refused."""
    torch.manual_seed(dist.get_rank())
    tp, cast = worker.mesh(tp=2)["tp"], static()

    def made() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)).to(worker.device())
        for layer in model:
            scale = torch.rand((), device=worker.device())
            quantized = QuantizedParameter.from_float(layer.weight, quantizer, cast, x_scale=scale)
            layer.weight = nn.Parameter(quantized, requires_grad=False)
        return model

    model, other, same = made(), made(), True
    dist.broadcast(model[0].weight, 0)
    scales = [torch.zeros_like(model[0].weight.x_scale) for _ in range(2)]
    dist.all_gather(scales, model[0].weight.x_scale)
    values = model[0].weight.dequantize()
    sums = values.clone()
    dist.all_reduce(sums)
    same = torch.equal(sums, 2 * values) and torch.equal(*scales)
    with pytest.raises(ValueError, match="c10d.allreduce_.default would write to a weight that is stored as"):
        dist.all_reduce(model[0].weight)
    expected = [layer.weight.dequantize() for layer in other]
    for each in expected:
        dist.broadcast(each, 0)
    parallelize_module(other, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer, values in zip(other, expected, strict=True):
        assert isinstance(layer.weight.to_local(), QuantizedParameter)
        same &= torch.equal(layer.weight.full_tensor().dequantize(), values)
    return same


@pytest.mark.parametrize("quantizer", [CurrentScaling(), MxScaling(), IntScaling(4, 32, symmetric=False)], ids=str)
@pytest.mark.ranks(2)
def test_torchs_own_collectives_send_codes(ranks, quantizer):
    assert ranks(2).run(as_torch_sends, quantizer) == [True, True]


def by_torchs_tp(recipe: str, compiled: bool) -> tuple[float, float]:
    """Return the errors of y and dx of a quantized model under torch's tensor parallelism, compared with one rank."""
    model, x = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)), torch.randn(16, 128)
    model, x = dlp.quantize_(model.to(worker.device()), recipe, mode="dynamic"), x.to(worker.device())
    for each in (*model.parameters(), x):
        dist.broadcast(each, 0)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        y = model(given)
        return y.detach(), torch.autograd.grad(y.square().sum(), given)[0]

    expected = results()
    parallelize_module(model, worker.mesh(tp=2)["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if compiled:
        torch.compiler.reset()
        model.compile(backend="aot_eager", fullgraph=True)
    y, dx = (relative_error(*each) for each in zip(results(), expected, strict=True))
    torch.compiler.reset()
    return y, dx


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, nightly(True)])
@pytest.mark.ranks(2)
def test_torchs_tensor_parallelism_multiplies_codes(ranks, compiled):
    """With mxfp8 each scaling block is on one rank, so scales equal the unsharded scales, and results differ only by the
    order of sums."""
    for y, dx in ranks(2).run(by_torchs_tp, "mxfp8", compiled):
        assert y < 1e-6 and dx < 1e-5


def cut_unevenly(rows: int) -> list[str]:
    """Messages of a rank about unequal shards of codes, in the first forward and in a save."""
    layer = dlp.quantize_(nn.Sequential(nn.Linear(32, rows)), "fp8_rowwise")
    fully_shard(layer, mesh=worker.mesh(dp_shard=dist.get_world_size())["dp_shard"])
    assert isinstance(layer[0].weight.to_local(), QuantizedParameter)
    said = []
    for refused in (lambda: layer(torch.randn(4, 32)), lambda: dlp.quantized_state_dict(layer)):
        said.append(must_raise(ValueError, refused))
    return said


@pytest.mark.parametrize(("world", "rows"), [(2, 49), (4, 3)])
def test_uneven_shards_are_refused_by_all_ranks(ranks, world, rows):
    """Without the refusal, ranks with fewer rows would send less than other ranks expect. With 3 rows on 4 ranks, the
    last rank has no row."""
    expected = [
        f"a quantized weight ({rows}, 32) has {rows} rows, which FSDP cannot shard evenly over {world} ranks: exclude the "
        "layer",
        f"0.weight: {rows} along dimension 0 cannot be divided evenly into {world} shards: save on a mesh whose "
        f"size divides this dimension",
    ]
    for said in ranks(world).run(cut_unevenly, rows):
        assert [each[: len(start)] for each, start in zip(said, expected, strict=True)] == expected


def strided_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the expected y of a frozen fp8_block linear under FSDP, whose scales are stored column by column, in
    the layout of Hopper's GEMMs."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(256, 512)).to(worker.device()), torch.randn(4, 256, device=worker.device())
    dlp.quantize_(layer, "fp8_block", mode="weight_only")
    expected = layer(x)
    with mock.patch.object(ops, "empty_block_scales", lambda shape, tile, device: torch.empty(2, 2, device=device).t()):
        fully_shard(layer, mesh=worker.mesh()["dp_shard"])
    assert not layer[0].weight.to_local().parts[1].is_contiguous()
    return layer(x), expected


@pytest.mark.ranks(2)
def test_fsdp_gathers_scales_in_any_layout(ranks):
    for y, expected in ranks(2).run(strided_scales):
        assert_bit_equal(y, expected)


def cut_blocks() -> None:
    quantizer = recipes.load("nvfp4").w.rowwise
    layer, x = nn.Linear(32, 48, bias=False).to(worker.device()), torch.randn(4, 32, device=worker.device())
    layer.weight = nn.Parameter(QuantizedParameter.from_float(layer.weight, quantizer), requires_grad=False)
    values = layer.weight.dequantize()
    fully_shard(layer, mesh=worker.mesh()["dp_shard"])
    assert type(layer.weight.to_local()) is torch.Tensor
    assert_bit_equal(layer(x), torch.nn.functional.linear(x, values))


@pytest.mark.ranks(2)
def test_shards_that_cut_blocks_are_of_values(ranks):
    """Shards of 24 rows cut a tile of 16 rows, so FSDP gathers values: a note says so, and results are right."""
    ranks(2).run(cut_blocks)
