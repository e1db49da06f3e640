"""The FP8 wire without ranks: rounding, the sum compared with fp64, and the content of the scale word."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlp.comm import collectives
from dlp.kernels import reference
from dlp.kernels.reference.wire import pack_fp8, sum_fp8, unpack_fp8
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.weight.fsdp2 import CodecReduceScatter
from tests.metrics import assert_bit_equal

R, ROWS, FEATURES = 4, 6, 300  # two complete blocks and a partial one


def contributions(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [R, ROWS, FEATURES]: gaussian values with outliers, a block of zeros, and very small and very large
    blocks."""
    x = torch.randn(R, ROWS, FEATURES, generator=torch.Generator().manual_seed(3))
    x[:, 0, 5] = 1e4
    x[1, 1, :128] = 0
    x[2, 2] *= 1e-30
    x[3, 3] *= 1e30
    return x.to(dtype)


def block_amax(x: Tensor) -> Tensor:
    """Return for each element the amax of its block of 128."""
    padded = torch.nn.functional.pad(x.double().abs(), (0, -FEATURES % 128)).unflatten(-1, (-1, 128))
    return padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., :FEATURES]


def bound(x: Tensor) -> Tensor:
    """Return the bound on the error of decoded values: half a step of E4M3 or of its subnormals, and the rounding of
    fp32 scales."""
    return (x.double().abs() * 2**-4 + block_amax(x) / 448 * 2**-10) * (1 + 2**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_packed_value_is_within_its_bound(dtype):
    x = contributions(dtype)
    codes, scale_inv = pack_fp8(x)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn and scale_inv.shape == (R, ROWS, 3)
    error = (unpack_fp8(codes, scale_inv).double() - x.double()).abs()
    assert (error <= bound(x)).all()
    assert (error > 0.9 * bound(x)).any(), "the bound is that of the format, not a loose one"


def test_a_scale_is_one_division_rounded_once():
    x = contributions()
    _, scale_inv = pack_fp8(x)
    amax = torch.nn.functional.pad(x.double().abs(), (0, -FEATURES % 128)).unflatten(-1, (-1, 128)).amax(-1)
    # fp64, so that rounding to fp32 is the only rounding that matters
    scale = torch.where(amax > 0, 448 / amax.clamp_min(448 * 2.0**-126), 1).float()
    assert_bit_equal(scale_inv, (1 / scale.double()).float())


def test_a_sum_is_that_of_fp64_within_the_bounds_of_its_contributions():
    x = contributions()
    total = sum_fp8(*pack_fp8(x), torch.float32)
    allowed = bound(x).sum(0) + x.double().abs().sum(0) * 2**-22
    assert ((total.double() - x.double().sum(0)).abs() <= allowed).all()


def test_a_sum_is_the_fp32_sum_in_rank_order_of_what_was_packed_rounded_once():
    codes, scale_inv = pack_fp8(contributions())
    total = torch.zeros(ROWS, FEATURES)
    for rank in range(R):
        blocks = codes[rank].float() * scale_inv[rank].repeat_interleave(128, -1)[:, :FEATURES]
        total = blocks if rank == 0 else total + blocks
    assert_bit_equal(sum_fp8(codes, scale_inv, torch.float32), total)
    assert_bit_equal(sum_fp8(codes, scale_inv, torch.bfloat16), total.bfloat16())
    flipped = sum_fp8(codes.view(torch.uint8).flip(0).view(codes.dtype), scale_inv.flip(0), torch.float32)
    assert not torch.equal(flipped, total), "the order can be seen in the bits"


@pytest.mark.parametrize("index", range(R))
def test_a_sum_reads_one_contribution_elsewhere(index):
    """`sum_fp8` reads the contribution of the local rank from a separate buffer. The position of this contribution in
    the received buffer may contain any values."""
    codes, scale_inv = pack_fp8(contributions())
    own = index, codes[index].clone(), scale_inv[index].clone()
    total, plain = sum_fp8(codes, scale_inv, torch.bfloat16), contributions(torch.bfloat16)
    expected = reference.sum_in_order(plain)
    mine = index, plain[index].clone()
    for there in (codes.view(torch.uint8), scale_inv, plain):
        there[index] = 7
    assert_bit_equal(sum_fp8(codes, scale_inv, torch.bfloat16, own), total)
    assert_bit_equal(reference.sum_in_order(plain, None, mine), expected)


def test_zeros_have_the_scale_1_and_no_scale_is_denormal():
    x = torch.zeros(1, 2, 256)
    x[0, 1, :128] = 1e-42
    codes, scale_inv = pack_fp8(x)
    assert scale_inv.tolist()[0][0] == [1.0, 1.0] and not unpack_fp8(codes, scale_inv)[0, 0].any()
    assert (scale_inv >= torch.finfo(torch.float32).tiny).all()
    assert torch.isfinite(unpack_fp8(codes, scale_inv)).all()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_travel_in_the_scale(special):
    x = contributions()
    x[1, 4, 130] = special
    codes, scale_inv = pack_fp8(x)
    assert scale_inv[1, 4].isfinite().tolist() == [True, False, True]
    total = sum_fp8(codes, scale_inv, torch.bfloat16)
    finite = total.isfinite()
    assert not finite[4, 128:256].any(), "every value of the block must be non-finite"
    finite[4, 128:256] = True
    assert finite.all(), "all other values must be finite"
    assert torch.equal(total[4, 130], torch.tensor(special).bfloat16()) or math.isnan(special)


def test_every_wire_sums_in_fp32_and_keeps_the_shape():
    x = contributions(torch.float32)[:, :3, :] * 1e-3
    for name, (pack, total, kinds) in WIRES.items():
        parts = pack(x)
        assert all(len(part) == R for part in parts)
        assert kinds(tuple(x.shape), x.dtype) == ([part.shape for part in parts], [part.dtype for part in parts]), name
        summed = total(parts, torch.float32)
        assert summed.shape == x.shape[1:] and summed.dtype == torch.float32, name
    assert WIRES["bf16"].pack(x)[0].dtype == torch.bfloat16
    assert_bit_equal(WIRES["hp"].total((x,), torch.float32), ((x[0] + x[1]) + x[2]) + x[3])


def test_an_average_over_three_ranks_is_rounded_once(monkeypatch):
    values = torch.randn(3, 999, generator=torch.Generator().manual_seed(0)).bfloat16()
    group = Mock(**{"size.return_value": 3})

    def reduce_scatter(x: Tensor, group: Any, codec: Any, dtype: torch.dtype) -> collectives.Pending[Tensor]:
        return collectives.done(codec.total((values,), dtype))

    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
    found = torch.empty(999, dtype=torch.bfloat16)
    CodecReduceScatter(WIRES["hp"])(found, values.view(-1), group, dist.ReduceOp.AVG)
    assert_bit_equal(found, (values.float().sum(0) / 3).bfloat16())
    assert not torch.equal(found, values.float().sum(0).bfloat16() / 3), "two roundings give other bits"
