"""Sums over ranks in each wire format: in collectives, in reductions of a linear, and in FSDP's reduction of gradients.

tests/test_wires.py bounds the rounding of wire formats without ranks. Here the sum of exchanged tensors is compared bit
for bit with the sum of the same packed contributions on one rank.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dlp
from dlp.comm import collectives
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.overlap import load
from dlp.parallel.weight.fsdp2 import CodecReduceScatter, set_grad_wire
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import KeepHighPrecision
from tests import pool as worker
from tests.cases import EPSILON, LinearCase
from tests.metrics import assert_bit_equal, relative_error
from tests.multigpu.test_linear import make_full
from tests.multigpu.test_overlap import results
from tests.observe import Collectives
from tests.refusals import may_raise, must_raise


def contribution(rank: int, rows: int) -> Tensor:
    """Return [rows, 200] bf16: gaussian values with an outlier in a block, a block of zeros, and on rank 1 a NaN and an
    Inf."""
    x = torch.randn(rows, 200, generator=torch.Generator().manual_seed(rank))
    x[0, 3], x[1, :128] = 1e4, 0
    if rank == 1:
        x[2, 5], x[3, 150] = math.nan, math.inf
    return x.bfloat16()


def sums(wire: str, rows: int) -> tuple[Tensor, Tensor, bool]:
    group = dist.group.WORLD
    x = contribution(dist.get_rank(), rows).to(worker.device())
    scattered = collectives.reduce_scatter(x, group, WIRES[wire]).wait()
    again = collectives.reduce_scatter(x, group, WIRES[wire]).wait()
    whole = collectives.all_reduce(x, group, WIRES[wire]).wait()
    return scattered, whole, torch.equal(scattered.view(torch.int16), again.view(torch.int16))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wire", list(WIRES))
def test_a_sum_is_what_was_packed_summed_in_rank_order(ranks, world, wire):
    rows = 4 * world
    pack, total, _ = WIRES[wire]
    expected = total(pack(torch.stack([contribution(rank, rows) for rank in range(world)])), torch.bfloat16)
    assert expected[2, 5].isnan() and not expected[3, 150].isfinite()
    everywhere = [whole for _, whole, _ in ranks(world).run(sums, wire, rows)]
    for rank, (scattered, whole, same) in enumerate(ranks(world).run(sums, wire, rows)):
        assert same, "two runs give the same bits"
        finite = expected.chunk(world)[rank].isfinite()
        assert torch.equal(scattered.isfinite(), finite)
        assert_bit_equal(scattered[finite], expected.chunk(world)[rank][finite])
        assert torch.equal(whole.nan_to_num(), everywhere[0].nan_to_num()), "equal on all ranks"
        assert not whole[2, 5].isfinite() and not whole[3, 150].isfinite() and whole[1].isfinite().all()


def linear_errors(recipe: str, names: list[str]) -> list[dict[str, float]]:
    """Return, for each case and strategy, the relative difference of each result between the wires fp8 and hp. Assert
    that a repetition has equal bits."""
    found = []
    for key in (("column", True), ("row", True), ("column", False), ("row", False)):
        full = make_full(case := LinearCase(key, recipe, torch.bfloat16, batch=3, sequence=20))
        exact = results(case, full, "serial", "serial", "serial")
        for name in names:
            actual, again = (results(case, full, name, name, name, wire="fp8") for _ in range(2))
            assert all(torch.equal(actual[key], again[key]) for key in actual), "the bits repeat"
            found.append({key: relative_error(actual[key], exact[key]) for key in actual})
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_linear_sums_on_the_wire_of_its_recipe(ranks, world, recipe):
    """Only results that are summed over ranks have the error of the fp8 wire, which is about 2.6 % because the values are
    gaussian and rounded to E4M3."""
    for found in ranks(world).run(linear_errors, recipe, ["serial", "chunked:2"]):
        for i, errors in enumerate(found):
            on_wire, other_order = ("dx", "y0")[(i // 2) % 2], i % 2
            assert 0.01 < errors.pop(on_wire) < 0.05, found
            assert max(errors.values()) <= EPSILON[torch.bfloat16] * other_order, found


def launches(wire: str) -> list[str]:
    full = make_full(case := LinearCase(("row", True), "bf16", torch.bfloat16))
    with Collectives() as seen:
        results(case, full, "serial", "serial", "serial", wire)
    return seen.names


@pytest.mark.ranks(2)
def test_codes_and_scales_are_one_exchange(ranks):
    for wire in ("hp", "fp8"):
        for names in ranks(2).run(launches, wire):
            assert sum("alltoall" in name for name in names) == 1, names


def cut_inside_a_block() -> str:
    x = torch.randn(192 * dist.get_world_size(), 128, device=worker.device())
    tiles, w = BlockScaling(tile=True).cast(x, None), KeepHighPrecision().cast(x[:64], None)
    gemm = Gemm("fprop", w, torch.float32)
    options = {"reduce": "scatter", "dtype": torch.float32, "codec": WIRES["hp"]}
    return may_raise(ValueError, load("chunked").gemm_reduce, tiles, gemm, dist.group.WORLD, **options)


@pytest.mark.ranks(2)
def test_rows_that_cannot_be_cut_are_an_error(ranks):
    for message in ranks(2).run(cut_inside_a_block):
        assert message.startswith("fprop: chunked cuts 384 rows at ")
        assert " 192" in message and "inside a block of fp8_block[e4m3, 128x128]; " in message
        assert "set overlap = 'serial' for this GEMM" in message


def fsdp_gradients(wires: list[str | None]) -> list[dict[str, Tensor]]:
    """Return the full gradients of one backward of an FSDP model for each wire; None: FSDP's own reduce-scatter."""
    mesh, found = worker.mesh(dp_shard=dist.get_world_size()), []
    for wire in wires:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 31)).to(worker.device())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (model[0], model[2], model):
            dlp.fully_shard(module, mesh=mesh, mp_policy=policy)
        if wire is not None:
            set_grad_wire(model, wire)
        x = torch.randn(24, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(worker.device())
        model(x).square().mean().backward()
        gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
        found.append({name: gradient.full_tensor() for name, gradient in gradients.items()})
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_fsdp_travel_on_a_wire(ranks, world):
    bounds = {"hp": 1e-6, "bf16": 4e-3, "fp8": 0.04}
    for own, *others in ranks(world).run(fsdp_gradients, [None, *bounds]):
        for (wire, most), gradients in zip(bounds.items(), others, strict=True):
            for name, gradient in gradients.items():
                error = relative_error(gradient, own[name])
                assert most / 100 * (wire != "hp") < error <= most or wire == "hp" and error <= most, (
                    f"{wire} {name}: {error}"
                )


def bf16_gradients(computed: bool) -> list[Tensor]:
    """Return the shards of the gradients of two accumulated backwards, in which parameters are bf16. `computed`: ranks send
    gradients as bf16, as computed; otherwise FSDP reduces them in fp32."""
    mesh, device = worker.mesh(dp_shard=dist.get_world_size()), worker.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 31)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model):
        dlp.fully_shard(module, mesh=mesh, mp_policy=policy)
    if computed:
        set_grad_wire(model, "hp", torch.bfloat16)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(24, 64, generator=generator).to(device)).float().square().mean().backward()
    return [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.ranks(2)
def test_bf16_gradients_travel_as_they_are_with_the_bits_of_a_reduction_in_fp32(ranks):
    for own, sent in zip(ranks(2).run(bf16_gradients, False), ranks(2).run(bf16_gradients, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, sent, strict=True)) and any(g.any() for g in own)
        assert any(not torch.equal(g, g.bfloat16().float()) for g in sent), "sums are fp32"


def refusals() -> list[str]:
    summed = CodecReduceScatter(WIRES["fp8"])
    return [
        must_raise(ValueError, set_grad_wire, nn.Linear(2, 2), "fp4"),
        must_raise(ValueError, set_grad_wire, nn.Linear(2, 2), "bf16", torch.bfloat16),
        must_raise(ValueError, summed, torch.ones(2), torch.ones(4), dist.group.WORLD, dist.ReduceOp.MAX),
    ]


@pytest.mark.ranks(2)
def test_impossible_wires_are_refused(ranks):
    for unknown, computed, op in ranks(2).run(refusals):
        assert computed.startswith("computed requires the wire 'hp'; got 'bf16': leave computed out")
        assert unknown == "unknown gradient wire 'fp4': the wires are hp, bf16, fp8"
        assert op.startswith("a gradient wire supports SUM and AVG; got")


def without_tokens(wire: str, strategy: str) -> list[tuple[int, ...]]:
    """Return the shapes of y and dx of layers that get no tokens, as can happen to experts."""
    recipe = dlp.recipe("fp8_current", wire={"fprop": wire, "dgrad": wire})
    tp, found = worker.mesh(tp=2)["tp"], []
    for sequence_parallel in (False, True):
        for layer, features in ((dlp.ColumnParallelLinear, 64), (dlp.RowParallelLinear, 32)):
            made = layer(64, 64, True, tp=tp, sequence_parallel=sequence_parallel, recipe=recipe, overlap=strategy)
            x = torch.empty(0, features, device=worker.device(), requires_grad=True)
            y = made.to(worker.device())(x)
            y.sum().backward()
            assert x.grad is not None and not made.weight.grad.to_local().any()
            found += [tuple(y.shape), tuple(x.grad.shape)]
    return found


@pytest.mark.parametrize("strategy", ["serial", "chunked"])
@pytest.mark.parametrize("wire", list(WIRES))
@pytest.mark.ranks(2)
def test_no_tokens_are_summed_on_any_wire(ranks, wire, strategy):
    assert ranks(2).run(without_tokens, wire, strategy) == [[(0, 32), (0, 64), (0, 64), (0, 32)] * 2] * 2
