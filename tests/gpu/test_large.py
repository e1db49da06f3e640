"""Matrices of more than 2^31 elements: what a cast makes of the last rows is what it makes of them alone, in both
orientations; so is what transposes and decoding make. Per-tensor and FP8 block casts have such tests in their own files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import one_read
from tests.metrics import assert_bit_equal

ROWS, COLS, LAST = 2**20 + 256, 2080, 128
QUANTIZERS = [RowwiseScaling(), MxScaling(), MxScaling(tile=True), Nvfp4Scaling(), Nvfp4Scaling(tile=True)]


@pytest.fixture(scope="module")
def large(device: str) -> Iterator[Tensor]:
    """bf16 [ROWS, COLS]."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    assert ROWS * COLS > 2**31
    generator = torch.Generator(device).manual_seed(0)
    yield torch.empty(ROWS, COLS, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    torch.cuda.empty_cache()


def last(q: Any, columnwise: bool) -> list[Tensor]:
    """The parts of an operand that belong to the last rows of its matrix, or to the last columns of a columnwise one."""
    parts = []
    for part, dim in zip(q.parts, q.format.moves_along(int(columnwise)), strict=True):
        size = 0 if dim is None else LAST * part.shape[dim] // ROWS
        parts.append(part if dim is None else part.narrow(dim, part.shape[dim] - size, size))
    return parts


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_a_cast_of_more_than_2_to_the_31_elements(large, quantizer):
    both = one_read(quantizer, quantizer)
    amax, amax_t = both.observe(large)
    made = both.cast(large, (amax, amax_t))
    tail = large[-LAST:].contiguous()
    rows = amax[-LAST:] if amax is not None and amax.dim() else amax
    expected = quantizer.cast(tail, rows), quantizer.cast(tail.t(), amax_t)
    for columnwise in (False, True):
        for left, right in zip(last(made[columnwise], columnwise), expected[columnwise].parts, strict=True):
            assert_bit_equal(left.contiguous().cpu(), right.contiguous().cpu(), f"columnwise: {columnwise}")


def test_transposes_and_decoding_of_more_than_2_to_the_31_elements(large):
    codes = large.view(torch.uint8)[:, :COLS].contiguous().view(torch.float8_e4m3fn)
    turned = ops.transpose_codes(codes)
    assert_bit_equal(turned[:, -LAST:].contiguous().cpu(), codes[-LAST:].t().contiguous().cpu())
    scale = torch.full((ROWS, COLS // 32), 127, dtype=torch.uint8, device=codes.device)
    values = ops.decode_mxfp8(codes, scale, (1, 32), torch.bfloat16)[-LAST:]
    expected = ops.decode_fp8(codes[-LAST:]).bfloat16()
    assert_bit_equal(values.nan_to_num(nan=1e9).cpu(), expected.nan_to_num(nan=1e9).cpu())
