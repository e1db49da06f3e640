"""Tests of the comparators in tests/metrics.py: their results, and that each of them can fail."""

from __future__ import annotations

import math

import pytest
import torch

from tests.metrics import assert_bit_equal, assert_close, bit_difference, relative_error, sqnr

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of `dtype` in which every byte is 1."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.ones(*shape[:-1], shape[-1] * size, dtype=torch.uint8).view(dtype)


def test_relative_error_and_sqnr():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected * 1.1, expected) == pytest.approx(0.1, rel=1e-6)
    assert sqnr(expected * 1.1, expected) == pytest.approx(20, rel=1e-6)
    assert sqnr(expected, expected) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))


def test_relative_error_is_not_rounded_to_the_operands_dtype():
    expected = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert relative_error(expected.float() + 2**-12, expected) == pytest.approx(2**-12)


@pytest.mark.parametrize("actual", [[1.2, 1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_assert_close_can_fail(actual):
    assert_close(torch.tensor([1.001, 1.0]), torch.ones(2), at_most=1e-2)
    with pytest.raises(AssertionError, match=r"dw: relative error \S+ is over 0.01"):
        assert_close(torch.tensor(actual), torch.ones(2), at_most=1e-2, name="dw")


@pytest.mark.parametrize("shapes", [((2,), (1, 2)), ((1,), (2,))])
def test_shapes_are_never_broadcast(shapes):
    with pytest.raises(AssertionError, match="shapes differ"):
        relative_error(torch.ones(shapes[0]), torch.ones(shapes[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_equality_sees_one_bit_in_every_dtype(dtype):
    expected = bits(dtype, 3, 4)
    actual = expected.clone()
    assert_bit_equal(actual, expected)
    actual.view(torch.uint8)[1, -1] = 0  # the last byte of element (1, 3)
    with pytest.raises(AssertionError, match=r"codes: 1 of 12 elements differ, first at \(1, 3\): "):
        assert_bit_equal(actual, expected, name="codes")


def test_bit_difference_reports_value_and_bytes():
    assert bit_difference(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])) == (
        "1 of 2 elements differ, first at (1,): -0.0 (0x80000000) is not 0.0 (0x00000000)"
    )
    assert bit_difference(torch.tensor(1.0), torch.tensor(2.0)) == (
        "1 of 1 elements differ, first at (): 1.0 (0x3f800000) is not 2.0 (0x40000000)"
    )
    nan = torch.tensor([math.nan])
    assert bit_difference(nan, nan.clone()) is None


def test_bit_equality_compares_logical_order_dtype_and_shape():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert_bit_equal(matrix.t(), matrix.t().contiguous())
    assert_bit_equal(torch.empty(0, 4), torch.empty(0, 4))
    assert bit_difference(matrix, matrix.double()) == "torch.float32 (2, 3) is not torch.float64 (2, 3)"
    assert bit_difference(matrix, matrix.reshape(3, 2)) == "torch.float32 (2, 3) is not torch.float32 (3, 2)"
