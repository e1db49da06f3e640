"""Choice of the block-scaled GEMMs that dlp's kernel for Hopper runs. The choice depends on sizes and layouts only, so
the tests need no device."""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import gemm_sm90
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.gemm import support

H200 = 132  # SMs
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("size", "large"),
    [
        ((8192, 14336, 4096), True), ((8192, 4096, 14336), True), ((4096, 14336, 4096), True),  # measured
        ((8192, 8192, 28672), True), ((16384, 8192, 8192), True), ((8192, 4096, 4096), False),
        # Few rows or columns, few tiles, mostly empty tiles
        ((8192, 14336, 2048), False), ((4096, 4096, 8192), False), ((1, 200000, 8192), False),
    ],
)  # fmt: skip
def test_large_is_many_full_tiles_and_a_long_contraction(size, large):
    assert gemm_sm90.is_large(*size, H200) == large


def taken(a_dtype=E4M3, b_dtype=E4M3, out_dtype=BF16, cols=64, along=256, **more) -> bool:
    a = torch.zeros(32, along, dtype=torch.uint8).view(a_dtype)
    b = torch.zeros(cols, along, dtype=torch.uint8).view(b_dtype)
    return gemm_sm90.can_take(a, b, out_dtype, **more)


def test_what_the_kernel_asks_of_its_operands():
    assert taken() and taken(a_dtype=E5M2) and taken(out_dtype=FP32) and taken(bias=torch.zeros(64, dtype=BF16))
    assert taken(accumulate=torch.zeros(32, 64))
    assert not taken(b_dtype=E5M2)
    assert not taken(cols=60) and not taken(along=250) and not taken(out_dtype=torch.float16)
    assert not taken(bias=torch.zeros(64)) and not taken(accumulate=torch.zeros(32, 64, dtype=BF16))
    assert not taken(accumulate=torch.zeros(32, 65)[:, :64])


def test_it_multiplies_blocks_by_tiles_alone():
    pairs = {(a, b) for a in (1, 2) for b in (1, 2)} - {(2, 2)}
    kernels = {pair: support(*(BlockScaling(tile=dim == 2).format for dim in pair), "sm_90").kernel for pair in pairs}
    assert kernels.pop((1, 2)) == "cublaslt fp8 blocks, large: gemm_sm90"
    assert set(kernels.values()) == {"cublaslt fp8 blocks"}
