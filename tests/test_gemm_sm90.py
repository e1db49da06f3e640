"""Which GEMMs of blocks our own kernel takes, decided from sizes and layouts alone: no device is needed."""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import gemm_sm90, gemms
from dlp.kernels.table import GemmLaunchOptions
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.gemm import support

H200 = 132  # multiprocessors
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("size", "large"),
    [
        ((8192, 14336, 4096), True), ((8192, 4096, 14336), True), ((4096, 14336, 4096), True),  # measured
        ((8192, 8192, 28672), True), ((16384, 8192, 8192), True), ((8192, 4096, 4096), False),
        ((8192, 14336, 2048), False), ((4096, 4096, 8192), False), ((1, 200000, 8192), False),  # short, few, mostly empty
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


@pytest.mark.parametrize(("rows", "goes"), [(256, True), (512, True), (0, False), (128, False), (300, False)])
def test_rows_go_to_other_ranks_in_whole_pairs_of_tiles(rows, goes):
    a, b = torch.zeros(2 * rows, 256, dtype=torch.uint8).view(E4M3), torch.zeros(64, 256, dtype=torch.uint8).view(E4M3)
    scales = gemms.Scales(torch.ones(2, 2 * rows).t(), torch.ones(1, 4), gemms.BLOCK_1D, gemms.BLOCK_2D)
    assert (gemm_sm90.sending(a, b, rows, BF16, scales, bias=torch.zeros(64, dtype=BF16)) is not None) == goes
    wide = torch.zeros(2 * rows, 128)
    assert (gemm_sm90.sending(a, b, rows, FP32, scales, accumulate=wide[:, :64].contiguous()) is not None) == goes
    assert gemm_sm90.sending(a, b, rows, FP32, scales, accumulate=wide[:, :64]) is None or not rows
    assert gemm_sm90.sending(a, b, rows, FP32, scales, bias=torch.zeros(64)) is None
    placed = GemmLaunchOptions(out=torch.zeros(2 * rows, 64, dtype=BF16))
    assert gemm_sm90.sending(a, b, rows, BF16, scales, options=placed) is None


@pytest.mark.parametrize(("rows", "waits"), [(256, True), (512, True), (0, False), (128, False), (300, False)])
def test_rows_of_other_ranks_are_awaited_in_whole_pairs_of_tiles(rows, waits):
    """Of none there would be a grid without blocks, which no device launches."""
    a, b = (torch.zeros(lines, 512, dtype=torch.uint8).view(E4M3) for lines in (2 * rows, 64))
    scales = torch.ones(2 * rows, 4), torch.ones(1, 4)
    assert (gemm_sm90.while_arriving(a, b, rows, BF16, scales) is not None) == waits
    laid = torch.ones(4, 2 * rows).t()  # as a GEMM reads them whose rows are all here
    assert gemm_sm90.while_arriving(a, b, rows, BF16, (laid, scales[1])) is None
    of_256 = torch.ones(2 * rows, 2)  # lines of 8 bytes, which TMA does not read
    assert gemm_sm90.while_arriving(a[:, :256], b[:, :256], rows, BF16, (of_256, scales[1])) is None
