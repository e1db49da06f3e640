"""Kernels on matrices with more than 2^31 elements, compared with the same kernels on the last rows alone.

The last rows have the largest values, so that every amax comes from the last rows. Casts (in both orientations),
transposes, decoding, RMSNorm and SwiGLU must have equal bits. For sums, all other rows are 0. test_cast_tensor.py and
test_cast_block.py have such tests of per-tensor and block FP8 casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Origin, one_read
from tests.metrics import assert_bit_equal

ROWS, COLS, LAST = 2**20 + 256, 2080, 128
EPS = 1e-5
NVFP4, CHANCE, TURNED = Nvfp4Scaling(), Nvfp4Scaling(stochastic=True), Nvfp4Scaling(rht=True)
ALIKE = [RowwiseScaling(), MxScaling(), MxScaling(tile=True), NVFP4, Nvfp4Scaling(tile=True), CHANCE]
PAIRS = [*((each, each) for each in ALIKE), (NVFP4, TURNED), (CHANCE, replace(TURNED, stochastic=True))]


@pytest.fixture(scope="module")
def large(device: str) -> Iterator[Tensor]:
    """bf16 [ROWS, COLS] with larger values in the last rows, and the largest values in the very last row."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    assert ROWS * COLS > 2**31
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(ROWS, COLS, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    x[-LAST:] *= 8
    x[-1] *= 8
    yield x
    del x
    torch.cuda.empty_cache()


def last(q: Any, columnwise: bool) -> list[Tensor]:
    """Return the parts of the operand q that belong to the last rows of the matrix. In a columnwise operand these rows are
    the last columns."""
    parts = []
    for part, dim in zip(q.parts, q.format.moves[int(columnwise)], strict=True):
        size = 0 if dim is None else LAST * part.shape[dim] // ROWS
        parts.append(part if dim is None else part.narrow(dim, part.shape[dim] - size, size))
    return parts


def origin(x: Tensor, row: int) -> Origin:
    """Origin of x, which is cut from a matrix of ROWS rows, beginning at `row`."""
    return Origin(row, 0, ROWS, x.shape[1], seed=1, tensor_id=2, counter=torch.tensor(11, device=x.device))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_cast_of_more_than_2_to_the_31_elements(large, pair):
    both, whole = one_read(*pair), origin(large, 0)
    made = both.cast(large, both.observe(large), at=(whole, whole.t()))
    tail, place = large[-LAST:].contiguous(), origin(large, ROWS - LAST)
    for columnwise, (x, at) in enumerate([(tail, place), (tail.t(), place.t())]):
        expected = pair[columnwise].cast(x, pair[columnwise].observe(x), at=at)
        for left, right in zip(last(made[columnwise], bool(columnwise)), expected.parts, strict=True):
            assert_bit_equal(left.contiguous().cpu(), right.contiguous().cpu(), f"columnwise: {bool(columnwise)}")


def test_transposes_and_decoding_of_more_than_2_to_the_31_elements(large):
    codes = large.view(torch.uint8)[:, :COLS].contiguous().view(torch.float8_e4m3fn)
    turned = ops.transpose_codes(codes)
    assert_bit_equal(turned[:, -LAST:].contiguous().cpu(), codes[-LAST:].t().contiguous().cpu())
    scale = torch.full((ROWS, COLS // 32), 127, dtype=torch.uint8, device=codes.device)
    values = ops.decode_mxfp8(codes, scale, (1, 32), torch.bfloat16)[-LAST:]
    expected = ops.decode_fp8(codes[-LAST:]).bfloat16()
    assert_bit_equal(values.nan_to_num(nan=1e9).cpu(), expected.nan_to_num(nan=1e9).cpu())


def weight_of(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.shape[1], device=x.device)


def first_bytes(x: Tensor, count: int) -> Tensor:
    """The first `count` bytes of every row, uint8 [rows, count]."""
    return x.view(torch.uint8)[:, :count].contiguous()


def decoded_nvfp4(x: Tensor, height: int) -> Tensor:
    scale = (first_bytes(x[::height], COLS // 16) % 127).view(torch.float8_e4m3fn)  # no NaN
    return ops.decode_nvfp4(first_bytes(x, COLS // 2), scale, (height, 16), dtype=torch.bfloat16)


def rms_norm_backward(x: Tensor) -> Tensor:
    return ops.rms_norm_backward(x, x, weight_of(x), ops.rms_norm(x, weight_of(x), EPS)[1])[0]


ROW_BY_ROW: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
    "transpose_e2m1": lambda x: [ops.transpose_e2m1(first_bytes(x, COLS)).t()],
    "decode_nvfp4": lambda x: [decoded_nvfp4(x, 1)],
    "decode_nvfp4 of tiles": lambda x: [decoded_nvfp4(x, 16)],
    "rms_norm": lambda x: ops.rms_norm(x, weight_of(x), EPS),
    "rms_norm_backward": lambda x: [rms_norm_backward(x)],
    "swiglu": lambda x: [ops.swiglu(x, x)],
    "swiglu_backward": lambda x: ops.swiglu_backward(x, x, x),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_is_made_of_rows_of_more_than_2_to_the_31_elements(large, name):
    made, expected = ROW_BY_ROW[name](large), ROW_BY_ROW[name](large[-LAST:].contiguous())
    for left, right in zip(made, expected, strict=True):
        assert_bit_equal(left[-len(right) :].contiguous().cpu(), right.contiguous().cpu(), name)


def test_sums_of_more_than_2_to_the_31_elements(large):
    """Compare sums of columns, and the gradient of a norm's weight. All rows before the last rows are 0, because the order of
    summation depends on the number of rows."""
    sparse, tail = torch.zeros_like(large), large[-LAST:].contiguous()
    sparse[-LAST:] = tail
    assert_bit_equal(ops.column_sums(sparse).cpu(), ops.column_sums(tail).cpu(), "sums of columns")
    sparse[:-1] = 0
    weight = weight_of(large)
    made, expected = (
        ops.rms_norm_backward(dy, x, weight, ops.rms_norm(x, weight, EPS)[1])[1]
        for dy, x in ((sparse, large), (sparse[-LAST:].contiguous(), tail))
    )
    assert_bit_equal(made.cpu(), expected.cpu(), "gradient of a weight")
