"""Four over six of NVFP4 compared with its formula in numpy, element by element: candidates, errors, ties. No ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.recipe import load
from tests import table_method as table
from tests.metrics import assert_bit_equal
from tests.quantizers import four_over_six_ties, matrix

F32, FLT_MAX = np.float32, np.finfo(np.float32).max
SIXTH = np.uint32(0x3E2AAAAB).view(F32)  # fl(1/6)
Candidate = tuple[table.Codes, table.Codes, table.Floats]  # codes [blocks, height, 16], scales and errors [blocks]


def in_order(squares: table.Floats) -> table.Floats:
    """Return the fp32 sum of each block [height, 16] in the order of dlp: a row is added term by term; a 16 x 16 tile is added
    by 8 x 8 quarters, each element together with the element on the other side of the diagonal."""
    total = np.zeros(len(squares), F32)
    if squares.shape[1] == 1:
        for i in range(16):
            total = total + squares[:, 0, i]
        return total
    quarters = []
    for quarter in (squares[:, i : i + 8, j : j + 8] for i in (0, 8) for j in (0, 8)):
        total = np.zeros(len(squares), F32)
        for i in range(8):
            total = total + quarter[:, i, i]
            for j in range(i + 1, 8):
                total = total + (quarter[:, i, j] + quarter[:, j, i])
        quarters.append(total)
    return (quarters[0] + quarters[3]) + (quarters[1] + quarters[2])


def candidate(x: table.Floats, raw: table.Floats, encode: np.float32) -> Candidate:
    scale = table.encode(raw, "e4m3")
    value = table.decode(scale, "e4m3")
    with np.errstate(divide="ignore"):
        multiplier = np.minimum(F32(1) / (value * (F32(1) / encode)), FLT_MAX)
    codes = table.encode(x * multiplier[:, None, None], "e2m1")
    difference = table.decode(codes, "e2m1") * value[:, None, None] - x * encode
    return codes, scale, in_order(difference * difference)


def blocks_of(x: Tensor, height: int) -> table.Floats:
    blocks = x.float().view(x.shape[0] // height, height, x.shape[1] // 16, 16).transpose(1, 2)
    return blocks.reshape(-1, height, 16).numpy()


def check(quantizer: Nvfp4Scaling, x: Tensor, amax: Tensor | None = None) -> float:
    """Compare the cast of x with the formula; return the share of blocks that choose the scale for 4."""
    amax = quantizer.observe(x) if amax is None else amax
    q = quantizer.cast(x, amax)
    height = quantizer.format.block[0]
    values = blocks_of(quantizer.values(x), height)
    stored = F32(min(1.75 * float(amax), float(FLT_MAX)))
    encode = min(F32(2688) / stored, FLT_MAX)
    raw = np.abs(values).max((1, 2)) * F32(encode * SIXTH)
    six, four = candidate(values, raw, encode), candidate(values, raw * F32(1.5), encode)
    less = four[2] < six[2]
    codes = np.where(less[:, None, None], four[0], six[0])
    assert_bit_equal(q.parts[1].view(torch.uint8).flatten(), torch.tensor(np.where(less, four[1], six[1])), "scales")
    assert np.array_equal(blocks_of(ops.unpack_e2m1(q.parts[0]), height), codes)
    assert_bit_equal(q.parts[2], torch.tensor(stored), "amax")
    return float(less.mean())


ROW, TILE, TRANSFORMED = (Nvfp4Scaling(four_over_six=True, **o) for o in ({}, {"tile": True}, {"rht": True}))


def uniform(seed: int, rows: int, columns: int) -> Tensor:
    """Return uniformly distributed values. Many values are near the amax of their tile."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("quantizer", [ROW, TILE, TRANSFORMED], ids=["rows", "tiles", "rht"])
def test_casts_are_the_formula(quantizer):
    """Compare with the formula for values of several magnitudes in fp32 and bf16, with the amax of the tensor, a larger
    amax as from other ranks, and amaxes near FLT_MAX."""
    shares = []
    for seed, dtype, exponent in ((0, torch.bfloat16, 0), (1, torch.float32, -20), (2, torch.float32, 9)):
        for x in (matrix(seed, 64, 96, exponent, dtype), (uniform(seed, 64, 96) * 2.0**exponent).to(dtype)):
            shares.append(check(quantizer, x))
            check(quantizer, x, quantizer.observe(x) * 3)
    assert 0.1 < sum(shares) / len(shares) < 0.9, "these matrices do not tell the candidates apart"
    check(quantizer, torch.zeros(16, 32), torch.tensor(1.0))
    for large in (1e38, 3.4e38):
        check(quantizer, matrix(3, 16, 32).float() / 200, torch.tensor(large))


def test_worked_blocks():
    """The expected codes were computed by hand for a tensor amax of 6. Then the stored amax is 10.5, S_enc is 256, and
    the block scales of the candidates are 256 and 384, which decode to 1 and 1.5."""
    x = torch.zeros(4, 16)
    x[0, :2] = torch.tensor([6.0, 4.5])  # scale 1: 4.5 -> 4; scale 1.5: 4 and 3, exactly
    x[1, :2] = torch.tensor([6.0, 4.0])  # scale 1: exact; scale 1.5: 2.67 -> 3
    x[2, :1] = 6.0  # exact with both scales: a tie
    x[3, :2] = torch.tensor([-6.0, -4.5])
    q = ROW.cast(x, torch.tensor(6.0))
    assert float(q.parts[2]) == 10.5
    assert q.parts[1].float().flatten().tolist() == [384.0, 256.0, 256.0, 384.0]
    assert ops.unpack_e2m1(q.parts[0])[:, :2].tolist() == [[6, 5], [7, 6], [7, 0], [14, 13]]
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("quantizer", [ROW, TILE], ids=["rows", "tiles"])
def test_the_sum_is_fp32_in_its_order(quantizer):
    """In these blocks the errors of the two candidates are equal except for the rounding of their fp32 sums. With wider
    sums all blocks would choose 6, and with another order other blocks would choose 4."""
    x = four_over_six_ties(256, 256, quantizer.format.block[0])
    assert 0.1 < check(quantizer, x, torch.tensor(6.0)) < 0.9


def test_a_tile_and_its_transpose_choose_alike():
    x = four_over_six_ties(256, 256, 16, seed=1)
    row, column = TILE.cast(x, torch.tensor(6.0)).transpose(), TILE.cast(x.t(), torch.tensor(6.0))
    for a, b in zip(row.parts, column.parts, strict=True):
        assert_bit_equal(a, b)


def test_values_that_are_not_finite_take_six():
    x = matrix(4, 32, 32).float()
    x[0, 3], x[17, 20], x[1, 5] = float("nan"), float("inf"), -float("inf")
    for quantizer in (ROW, TILE):
        plain = Nvfp4Scaling(tile=quantizer.tile)
        made = quantizer.cast(x, torch.tensor(3.0))
        six = plain.cast(x, torch.tensor(5.25))
        rows = [0, 1, 17] if not quantizer.tile else [0, 1]
        for row, column in zip(rows, (0, 0, 1), strict=False):
            assert_bit_equal(made.parts[1][row, column].view(torch.uint8), six.parts[1][row, column].view(torch.uint8))
    for unusable in (float("inf"), float("nan"), 0.0):
        amax = torch.tensor(unusable)
        assert_bit_equal(ROW.cast(x, amax).parts[2], amax)


def test_the_error_is_never_larger_than_with_six_alone():
    """Both casts use the same stored amax, so that the candidate with the scale for 6 equals the cast without four over six."""
    x = uniform(6, 256, 256)
    for quantizer in (ROW, TILE, TRANSFORMED):
        amax, values = quantizer.observe(x), quantizer.values(x).double()
        plain = Nvfp4Scaling(tile=quantizer.tile, rht=quantizer.rht)
        made, six = quantizer.cast(x, amax), plain.cast(x, amax * 1.75)
        assert made.format == six.format
        shape = (256 // quantizer.format.block[0], quantizer.format.block[0], 16, 16)
        errors = [((q.dequantize().double() - values) ** 2).view(shape).sum((1, 3)) for q in (made, six)]
        assert (errors[0] <= errors[1] * (1 + 1e-5)).all() and errors[0].sum() < 0.97 * errors[1].sum()


def test_the_recipe_has_it_for_operands_rounded_to_nearest():
    def chosen(**options: object) -> list[bool]:
        recipe = load("nvfp4", **options)
        sides = [getattr(getattr(recipe, o), side) for o in ("x", "w", "dy") for side in ("rowwise", "columnwise")]
        return [each.four_over_six for each in sides]

    assert chosen() == [False] * 6
    assert chosen(four_over_six=True) == [True] * 4 + [False] * 2
    assert chosen(four_over_six=True, disable_stochastic_rounding=True) == [True] * 6
    assert chosen(four_over_six=["w"]) == [False] * 2 + [True] * 2 + [False] * 2
    assert chosen(four_over_six=["dy"], disable_stochastic_rounding=True) == [False] * 4 + [True] * 2
    with pytest.raises(ValueError, match="four_over_six of dy needs disable_stochastic_rounding = true"):
        load("nvfp4", four_over_six=["x", "dy"])
    with pytest.raises(ValueError, match="four_over_six must be true or false or a list, each one of x, w, dy; got"):
        load("nvfp4", four_over_six="x")
    with pytest.raises(ValueError, match="set four_over_six or stochastic, not both"):
        Nvfp4Scaling(stochastic=True, four_over_six=True)
