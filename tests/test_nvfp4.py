"""Features that only NVFP4 has: stochastic rounding with random bits that depend on the position, and the Hadamard
transform. No ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.registry import REFERENCE, choose
from dlp.quant.gemm import check_pair
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Origin
from dlp.quant.recipe import load
from tests import table_method as table
from tests.emulated import emulated  # noqa: F401
from tests.metrics import assert_bit_equal, assert_close
from tests.quantizers import EXPONENTS, SEEDS, matrix, origin, quantize


def test_stochastic_rounding_is_unbiased_within_its_bound():
    """|mean - x| is at most 1/256 of the distance between grid points plus 4 sigma; values on the grid do not change."""
    x = torch.tensor([0.0, 0.1, 0.26, 0.5, 0.9, 1.3, 1.51, 2.2, 2.9, 3.6, 4.4, 5.0, 5.9, 6.0, -0.3, -4.9]).repeat(
        1024, 16
    )
    quantizer, draws = Nvfp4Scaling(stochastic=True), 4
    amax = torch.tensor(2688.0)  # S_enc 1: with a block amax of 6 the block scale is 1
    total = torch.zeros(16)
    for counter in range(draws):
        decoded = quantizer.cast(x, amax, at=origin(x, counter=counter)).dequantize()
        total += decoded.view(-1, 16).mean(0)
    step = torch.tensor([0.5] * 7 + [1.0] * 3 + [2.0] * 4 + [0.5, 2.0])
    sigma = step / 2 / (1024 * 16 * draws) ** 0.5
    bias = total / draws - x[0, :16]
    assert (bias.abs() <= step / 256 + 4 * sigma).all(), bias
    on_grid = torch.tensor([0, 3, 13])
    assert torch.equal(decoded[:, on_grid], x[:, on_grid])
    assert (bias[[1, 2, 5]].abs() < x[0, [1, 2, 5]] * 0.05).all(), "nearest would be off by 16 % and more"


def test_random_bits_differ_by_position_orientation_microbatch_seed_and_tensor():
    x, quantizer = torch.full((32, 32), 0.7), Nvfp4Scaling(stochastic=True)
    x[:, ::16] = 6  # makes the scale of every block 1
    at = origin(x)
    amax = torch.tensor(2688.0)

    def codes(where: Origin) -> Tensor:
        return quantizer.cast(x, amax, at=where).payload

    again = codes(at)
    assert torch.equal(again, codes(origin(x)))
    others = [origin(x, row=1), origin(x, column=16), origin(x, counter=1), at.t()]
    others += [Origin(0, 0, 32, 32, 3, 2, at.counter), Origin(0, 0, 32, 32, 1, 3, at.counter)]
    for other in others:
        assert (codes(other) != again).float().mean() > 0.2, other
    with pytest.raises(ValueError, match="pass at=Origin"):
        quantizer.cast(x, amax)
    with pytest.raises(ValueError, match="starts at column 8 .* inside a block of 16"):
        quantizer.cast(x, amax, at=origin(x, column=8))


@pytest.mark.usefixtures("emulated")
def test_the_kernel_rounds_both_orientations_stochastically_or_neither():
    """The kernel has one way of rounding per launch. If only one orientation has random bits, the reference runs."""
    x, amax, draw = torch.ones(32, 32), torch.ones(()), ops.PhiloxState(0, 0, 32, 0, torch.tensor(1), (1, 2))
    pairs = [(None, None), (draw, draw), (draw, None), (None, draw)]
    names = [choose("cast_nvfp4_both", x, (amax, amax), (1, 16), draws=draws).name for draws in pairs]
    assert names == ["kernel", "kernel", REFERENCE, REFERENCE]


def test_origin_of_the_transpose():
    at = Origin(3, 16, 64, 128, seed=1, tensor_id=2, counter=torch.tensor(0))
    flipped = at.t()
    assert (flipped.row, flipped.column, flipped.rows, flipped.columns, flipped.orientation) == (16, 3, 128, 64, 1)
    assert flipped.t() == at


def test_the_hadamard_transform_is_orthogonal():
    transform = ops.rht16(torch.eye(32)).double()
    assert torch.equal(transform @ transform.t(), torch.eye(32, dtype=torch.float64))
    assert (transform[:16, 16:] == 0).all() and (transform[:16, :16].abs() == 0.25).all()


@given(seed=SEEDS)
def test_the_hadamard_transform_cancels_in_wgrad(seed: int):
    """dy.T @ x is unchanged when both are transformed along the tokens, and bitwise unchanged for small integers."""
    generator = torch.Generator().manual_seed(seed)
    dy, x = (torch.randint(-8, 9, (64, n), generator=generator).bfloat16() for n in (24, 40))
    for signs in (ops.RHT_SIGNS, 0, seed & 0xFFFF):
        rotated = ops.rht16(dy.t(), signs).double() @ ops.rht16(x.t(), signs).double().t()
        assert torch.equal(rotated, dy.double().t() @ x.double())
    assert torch.equal(ops.rht16(x.t(), 0)[:, ::16].double(), x.double().view(4, 16, 40).sum(1).t() / 4)


def test_signs_are_a_part_of_the_basis():
    """The signs of the Hadamard transform are part of the format: a GEMM refuses operands with different signs, and only
    the default signs have a kernel for the cast."""
    x, fixed = matrix(3, 32, 32), load("nvfp4").x.columnwise
    for signs, basis in ((0xD7E8, "rht"), ("fixed", "rht"), ("none", "rht 0x0000"), (0xBEEF, "rht 0xbeef")):
        recipe = load("nvfp4", rht_signs=signs)
        made, dy = recipe.x.columnwise, recipe.dy.columnwise
        assert made.format.basis == dy.format.basis == basis and recipe.x.rowwise == load("nvfp4").x.rowwise
        same = torch.equal(quantize(made, x).payload, quantize(fixed, x).payload)
        assert same == (made == fixed) == (made.caps.op == "cast_nvfp4") == (basis == "rht")
        assert_close(quantize(made, x).dequantize(torch.float32), made.values(x).float(), 0.2)
    with pytest.raises(ValueError, match=r"rht\] x nvfp4\[1x16, rht 0x0000\].* same signs"):
        check_pair("wgrad", load("nvfp4").dy.columnwise.format, load("nvfp4", rht_signs="none").x.columnwise.format)
    for wrong, said in (
        (
            {"rht_signs": 1 << 16},
            "nvfp4: rht_signs must be fixed, none or 0 to 0xFFFF (one bit for each of 16 tokens); got 0x10000",
        ),
        (
            {"rht_signs": 1, "disable_rht": True},
            "rht_signs = 1 has no effect with disable_rht = true; set only one of the two",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            load("nvfp4", **wrong)


@given(seed=SEEDS, exponent=EXPONENTS)
def test_the_columnwise_amax_is_that_of_the_transformed_values(seed: int, exponent: int):
    x = matrix(seed, 64, 32, exponent).t()
    assert_bit_equal(Nvfp4Scaling(rht=True).observe(x), ops.amax(ops.rht16(x)))
    assert_bit_equal(Nvfp4Scaling().observe(x), ops.amax(x))


def butterfly(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the Hadamard transform of x [rows, 16] with the default signs, computed element by element in fp32, with one
    rounding to bf16 at the end. `strides`: distance of the two elements of a butterfly, for each of the four passes."""
    rows = [[-value if 0xD7E8 >> i & 1 else value for i, value in enumerate(row)] for row in x.float().numpy()]
    for stride in strides:
        for row in rows:
            for i in (i for i in range(16) if not i & stride):
                row[i], row[i + stride] = row[i] + row[i + stride], row[i] - row[i + stride]
    return (torch.tensor(np.array(rows)) * 0.25).bfloat16()


def test_the_butterfly_sums_in_the_stated_order():
    """Large values cancel and leave the rounding errors of fp32, which depend on the order of the sum."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([1.0, -3.0, 2.0**25, -(2.0**25), 2.0**13])
    x = choices[torch.randint(0, 5, (32, 16), generator=generator)].bfloat16()
    assert_bit_equal(ops.rht16(x), butterfly(x, (1, 2, 4, 8)))
    assert not torch.equal(ops.rht16(x), butterfly(x, (8, 4, 2, 1))), "this matrix does not tell the orders apart"


def test_values_are_decoded_in_the_stated_order():
    """The decoded values are fl(e2m1 * fl(fl(scale * amax) * fl(1/2688))). They differ from e2m1 * scale * S_dec."""
    x = matrix(7, 64, 256)
    q = Nvfp4Scaling().cast(x, ops.amax(x))
    codes, scale, amax = (
        part.numpy() for part in (ops.unpack_e2m1(q.parts[0]), q.parts[1].view(torch.uint8), q.parts[2])
    )
    factor = (table.decode(scale, "e4m3") * amax).astype(np.float32) * np.float32(1 / 2688)
    expected = table.decode(codes, "e2m1") * np.repeat(factor, 16, axis=1)
    assert np.array_equal(q.dequantize().numpy(), expected)
    s_dec = np.float32(1) / (np.float32(2688) / amax)
    other = table.decode(codes, "e2m1") * np.repeat(table.decode(scale, "e4m3") * s_dec, 16, axis=1)
    assert not np.array_equal(other, expected), "this matrix does not tell the orders apart"
