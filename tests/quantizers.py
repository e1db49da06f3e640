"""Cases of the tests of quantizers and GEMMs, and matrices to quantize.

Recipes are read from their folder, and loaded without options and with the options in OPTIONS, which change numbers.
Matrices are drawn from a seed, so that one number reproduces a failure.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dlp.quant.quantizer import KeepHighPrecision, Origin, Quantizer, ScaleSlot
from dlp.quant.recipe import load
from dlp.quant.tensor import QuantizedTensor
from tests.cases import RECIPES as NAMES
from tests.metrics import assert_bit_equal

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fp8_current": [{"power_of_two": True}, {"fp8_format": "E4M3", "epsilon": 1e-3}],
    "fp8_delayed": [{"margin": 1, "fp8_format": "E4M3"}],
    "fp8_rowwise": [{"power_of_two": False, "fp8_format": "HYBRID"}],
    "fp8_block": [{"power_of_two": False}, {"x_block_dim": 2, "w_block_dim": 1}, {"fp8_format": "HYBRID"}],
    "mxfp8": [{"scale_rounding": "floor"}, {"enable_2d_quantization": True, "fp8_format": "HYBRID"}],
    "nvfp4": [
        {"disable_rht": True}, {"disable_stochastic_rounding": True, "disable_2d_quantization": True},
        {"disable_stochastic_rounding": True, "four_over_six": True},
    ],
}  # fmt: skip
RECIPES = [load(name, **options) for name in NAMES for options in ({}, *OPTIONS.get(name, []))]
SIDES = [(operand, side) for operand in ("x", "w", "dy") for side in ("rowwise", "columnwise")]
QUANTIZERS = list({getattr(getattr(r, o), side): None for r in RECIPES for o, side in SIDES})  # without duplicates
PLAIN = [q for q in QUANTIZERS if q.reduces == () and q != KeepHighPrecision()]
SEEDS = st.integers(0, 10**6)
EXPONENTS = st.integers(-30, 30)
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def matrix(seed: int, rows: int, columns: int, exponent: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gaussian values around 2^exponent with an outlier and a zero row. The magnitudes of rows grow."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 2.0**exponent * torch.linspace(-3, 3, rows).exp2()[:, None]
    x[int(torch.randint(rows, (), generator=generator)), int(torch.randint(columns, (), generator=generator))] *= 50
    x[int(torch.randint(rows, (), generator=generator))] = 0
    return x.to(dtype)


def four_over_six_ties(rows: int, columns: int, height: int, seed: int = 0) -> Tensor:
    """Return fp32 [rows, columns] of blocks [height, 16] for which the two candidates of four over six have equal
    errors in exact arithmetic, while fp32 sums of the errors depend on the order. The tensor amax must be 6; then S_enc
    is 256, and the scales of the candidates are 256 and 384.

    In units of 1 / S_enc, a block has the values 1536 and 0 and, for each of several d between 0 and 64, the values
    512 + d and 192 + d. For 512 + d, the nearest points of the two grids are 512 and 576, so that the squared errors of
    the two candidates are d^2 and (64 - d)^2. For 192 + d, the nearest points are 256 and 192, so that the squared
    errors are (64 - d)^2 and d^2.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks, pairs = rows * columns // (16 * height), 8 * height - 1
    d = torch.randint(1, 64 << 14, (blocks, pairs), generator=generator) / 2**14
    ends = torch.tensor([1536.0, 0.0]).expand(blocks, 2)
    values = torch.cat([512 + d, 192 + d, ends], 1)
    order = torch.rand(values.shape, generator=generator).argsort(1)
    shuffled = values.gather(1, order).view(rows // height, columns // 16, height, 16)
    return shuffled.transpose(1, 2).reshape(rows, columns) / 256


def origin(x: Tensor, row: int = 0, column: int = 0, counter: int = 0) -> Origin:
    return Origin(row, column, *x.shape, seed=1, tensor_id=2, counter=torch.tensor(counter))


def a_slot(scale: float = 3.0) -> ScaleSlot:
    return ScaleSlot(torch.tensor(scale), torch.zeros(()))


def quantize(quantizer: Quantizer, x: Tensor, at: Origin | None = None) -> QuantizedTensor:
    return quantizer.cast(x, quantizer.observe(x), slot=a_slot(), at=at or origin(x))


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.format == b.format
    for part, left, right in zip(a.format.parts, a.parts, b.parts, strict=True):
        assert_bit_equal(left, right, part.name)
