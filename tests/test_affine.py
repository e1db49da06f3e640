"""The affine primitives, compared with their definition, and bit by bit with torchao."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlp.quant import affine
from tests.metrics import assert_bit_equal
from tests.refusals import refuses


class Problem(NamedTuple):
    x: Tensor
    block: tuple[int, ...]
    codes: tuple[int, int]
    symmetric: bool
    chosen: dict[str, Any]


def matrix(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    return x


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_value_is_further_off_than_half_a_code(symmetric, bits):
    x, block, codes = matrix(torch.float32), (1, 16), affine.code_range(bits)
    scale, zero = affine.choose_qparams_affine(x, block, codes, symmetric=symmetric)
    q = affine.quantize_affine(x, block, scale, zero, codes)
    assert codes[0] <= q.min() and q.max() <= codes[1]
    off = (affine.dequantize_affine(q, block, scale, zero) - x).abs()
    reach = 1.001 if symmetric or bits == 1 else 0.501 + 0.5  # rounding of a value, plus rounding of the zero point
    assert (off.view(8, 4, 16) <= reach * scale[:, :, None]).all()
    assert not affine.dequantize_affine(q, block, scale, zero)[3].any(), "zero is exact"


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a tensor of one to three dimensions, a block shape that divides it, and all options."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 6, 16]), min_size=1, max_size=3))
    block = tuple(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in sizes)
    assume(max(block) > 1)  # left out: torchao reduces blocks of one element over all of x
    bits, signed = draw(st.integers(1, 8)), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    x = (made * 2.0 ** draw(st.integers(-12, 6)) + draw(st.sampled_from([0, 1, -1]))).to(dtype)
    chosen = {
        "eps": draw(st.sampled_from([None, 1e-4])),
        "scale_dtype": draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        "zero_point_dtype": draw(st.sampled_from([torch.int32, torch.int8, torch.float32, torch.bfloat16])),
    }
    if not signed and chosen["zero_point_dtype"] == torch.int8:
        chosen["zero_point_dtype"] = torch.uint8
    return Problem(x, block, affine.code_range(bits, signed=signed), draw(st.booleans()), chosen)


def check_bits(problem: Problem) -> None:
    """Compare scales, zero points, codes and values of all four functions with torchao's."""
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    x, block, codes, symmetric, chosen = problem
    mapping = ao.MappingType.SYMMETRIC if symmetric else ao.MappingType.ASYMMETRIC
    held = torch.int8 if codes[0] else torch.uint8
    theirs = ao.choose_qparams_affine(x, mapping, block, held, *codes, **chosen, keepdim=True)
    scale, zero = affine.choose_qparams_affine(x, block, codes, symmetric=symmetric, **chosen)
    assert_bit_equal(scale, theirs[0])
    assert_bit_equal(zero, theirs[1])
    low, high = x.flatten()[::2] - 1, x.flatten()[::2] + 1
    met = affine.choose_qparams_affine_with_min_max(low, high, codes, symmetric=symmetric, **chosen)
    expected = ao.choose_qparams_affine_with_min_max(low, high, mapping, (1,), held, *codes, **chosen)
    assert_bit_equal(met[0], expected[0])
    assert_bit_equal(met[1], expected[1])
    q = affine.quantize_affine(x, block, scale, zero, codes, held)
    assert_bit_equal(q, ao.quantize_affine(x, block, *theirs, held, *codes))
    for out in (torch.float32, torch.bfloat16, torch.float16):
        values = ao.dequantize_affine(q, block, *theirs, held, *codes, output_dtype=out)
        assert_bit_equal(affine.dequantize_affine(q, block, scale, zero, out), values)


@settings(max_examples=100)
@given(problems())
def test_bits_are_those_of_torchao(problem):
    check_bits(problem)


def test_bits_of_192_settings_are_those_of_torchao():
    """The 192 settings combine bit widths, signs, symmetries, dtypes of zero points, and smallest scales, on a matrix
    with a row of zeros."""
    settings_ = list(
        product(range(1, 9), (True, False), (True, False), (torch.int32, None, torch.float32), (None, 1e-4))
    )
    assert len(settings_) == 192
    for bits, signed, symmetric, zero_dtype, eps in settings_:
        small = torch.int8 if signed else torch.uint8
        chosen = {"eps": eps, "scale_dtype": None, "zero_point_dtype": zero_dtype or small}
        codes = affine.code_range(bits, signed=signed)
        check_bits(Problem(matrix(torch.bfloat16), (1, 16), codes, symmetric, chosen))


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"blocks of \(1, 48\) do not divide a tensor of shape"):
        affine.choose_qparams_affine(matrix(torch.float32), (1, 48), (-8, 7), symmetric=True)
    with pytest.raises(ValueError, match="the bits of a code must be 1 to 8; got 9"):
        affine.code_range(9)
    with refuses(r"codes of 0 to 255 do not fit torch\.int8: choose another dtype, such as torch\.uint8"):
        affine.quantize_affine(torch.ones(4), (4,), torch.ones(1), torch.zeros(1), (0, 255))
