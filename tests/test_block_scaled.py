"""Arguments of block-scaled GEMMs for cuBLASLt, checked against cuBLASLt's documentation. No GPU is needed.

`blackwell` replaces cuBLASLt by a function that checks the requirements of Blackwell's tensor cores (sizes, alignment,
scale modes and tiles), reads codes and scales from the tiles, and multiplies in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import gemm_entries, gemms, ops, reference, registry, table
from dlp.quant.gemm import Gemm, support
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, Recipe, load
from tests.quantizers import matrix, quantize

RECIPES = [
    load("mxfp8"), load("mxfp8", fp8_format="HYBRID", enable_2d_quantization=True), load("nvfp4"),
    load("nvfp4", disable_2d_quantization=True, disable_rht=True), load("fp8_block"),
    load("fp8_block", x_block_dim=2, w_block_dim=1),
]  # fmt: skip
BLOCKS = {gemms.MX_BLOCKS: 32, gemms.NVFP4_BLOCKS: 16}


def _values(codes: Tensor, tiles: Tensor, mode: int) -> Tensor:
    """Values that the tensor core multiplies, in float64: codes times the scales of the blocks."""
    packed, lines = codes.dtype is gemms.FP4, codes.shape[0]
    assert packed == (mode == gemms.NVFP4_BLOCKS)
    values = ops.decode_e2m1(codes.view(torch.uint8)) if packed else ops.decode_fp8(codes)
    blocks = -(-values.shape[1] // BLOCKS[mode])
    assert values.shape[1] % 32 == 0 and codes.is_contiguous() and codes.shape[1] % 16 == codes.data_ptr() % 16 == 0
    assert tiles.dtype == torch.uint8 and tiles.data_ptr() % 16 == 0
    assert len(tiles) >= -(-lines // 128) * -(-blocks // 4) * 512, "scales for all lines and blocks"
    scales = ops.unswizzle_128x4(tiles, lines, blocks).contiguous()
    factors = ops.decode_e8m0(scales) if mode == gemms.MX_BLOCKS else scales.view(torch.float8_e4m3fn).float()
    return values.double() * factors.double().repeat_interleave(BLOCKS[mode], 1)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> list[gemms.Scales]:
    """Simulate a Blackwell GPU; return the list of the scales of the GEMMs that run on it."""
    asked: list[gemms.Scales] = []

    def product(
        a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: gemms.Scales, *, bias: Any = None, accumulate: Any = None,
        alpha: Any = None, options: Any,
    ) -> Tensor:  # fmt: skip
        asked.append(scales)
        assert scales.a_mode == scales.b_mode in BLOCKS and b.shape[0] % 32 == 0
        assert (alpha is not None) == (scales.a_mode == gemms.NVFP4_BLOCKS)
        sums = _values(a, scales.a, scales.a_mode) @ _values(b, scales.b, scales.b_mode).t()
        return reference.finish((sums * (1 if alpha is None else alpha.double())).float(), out_dtype, bias, accumulate)

    monkeypatch.setattr(gemms, "product", product)
    monkeypatch.setitem(table.DEVICE_AT, -1, "sm_100")
    for operation in registry._ON.keys() - {table.GEMM}:  # all operations except GEMMs run on the CPU
        monkeypatch.setitem(registry._ON[operation], "sm_100", table.entries(operation, "cpu"))
    return asked


def operands(recipe: Recipe, which: str, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    rows, cols, contraction = shape
    made = []
    for lines, quantizer, side in zip((rows, cols), recipe.operands(which), GEMM_OPERANDS[which][1::2], strict=True):
        x = quantizer.format.padded(matrix(lines + contraction, lines, contraction))
        made.append(quantize(quantizer, x if side == "rowwise" else x.t().contiguous().t()))
    return made[0], made[1]


@pytest.mark.parametrize(
    "shape", [(256, 128, 512), (160, 96, 64), (37, 51, 200), (1, 16, 16), (130, 300, 144)], ids=str
)
@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_block_scaled_gemm_multiplies_the_decoded_operands(blackwell, recipe, which, shape):
    a, b = operands(recipe, which, shape)
    left, right = a.dequantize().double(), b.dequantize().double()
    exact, bound = left @ right.t(), left.abs() @ right.abs().t() * 1e-6
    wide = Gemm(which, b, torch.float32, options=getattr(recipe, which))(a)
    assert len(blackwell) == 1 and ((wide.double() - exact).abs() <= bound).all()
    bias, into = torch.randn(b.shape[0]), torch.randn(wide.shape)
    assert torch.equal(Gemm(which, b, torch.float32, bias=bias)(a), wide + bias)
    added = into + wide
    assert Gemm(which, b, torch.float32, accumulate=into)(a) is into and torch.equal(into, added)
    assert Gemm(which, b, torch.bfloat16)(a).dtype == torch.bfloat16


def test_a_wrong_scale_is_noticed(blackwell, monkeypatch):
    """Shift the scales by one block: the comparison of the previous test must fail."""
    a, b = operands(RECIPES[0], "fprop", (256, 128, 512))
    expected = Gemm("fprop", b, torch.float32)(a)
    swizzle = ops.swizzle_128x4
    monkeypatch.setattr(gemm_entries, "swizzle_128x4", lambda scales, *more: swizzle(scales.roll(1, 1), *more))
    assert not torch.allclose(Gemm("fprop", b, torch.float32)(a), expected, rtol=1e-2)


def test_inexact_scales_are_not_taken_for_powers_of_two(blackwell):
    recipe = load("fp8_block", power_of_two=False)
    a, b = operands(recipe, "fprop", (128, 128, 256))
    Gemm("fprop", b, torch.float32)(a)
    assert not blackwell
    assert support(a.format, b.format, "sm_100").kernel == "reference"


def test_the_words_of_a_block_scaled_problem():
    """CUDA_R_4F_E2M1 is 33, VEC16_UE4M3 is 1, VEC32_UE8M0 is 2. Sizes and strides count elements, two of which share a
    byte."""
    a, b = (torch.zeros(lines, 64, dtype=torch.uint8).view(gemms.FP4) for lines in (8, 32))
    tiles, one = torch.zeros(512, dtype=torch.uint8), torch.ones(())
    scales = gemms.Scales(tiles, tiles, gemms.NVFP4_BLOCKS, gemms.NVFP4_BLOCKS)
    job = gemms.prepare(a, b, torch.bfloat16, scales, alpha=one)
    assert job.problem[:-2] == (33, 33, 14, -1, 8, 32, 128, 128, 128, 32, 0, 0, 1, 1, 0, 1, 0, 0, 0)
    assert job.out.shape == (8, 32) and "[8, 128] float4_e2m1fn_x2" in str(job.problem)
    codes = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
    mx = gemms.prepare(codes, codes, torch.float32, gemms.Scales(tiles, tiles, gemms.MX_BLOCKS, gemms.MX_BLOCKS))
    assert mx.problem[:-2] == (28, 28, 0, -1, 32, 32, 64, 64, 64, 32, 0, 0, 2, 2, 0, 0, 0, 0, 0)
