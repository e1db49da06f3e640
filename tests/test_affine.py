"""The affine primitives: by their definition, and bit by bit those of torchao."""

from __future__ import annotations

import pytest
import torch

from dlp.quant import affine
from tests.metrics import assert_bit_equal

BLOCKS = [(8, 64), (1, 64), (1, 16), (8, 1), (4, 32)]


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
    reach = 1.001 if symmetric or bits == 1 else 0.501 + 0.5  # the end of a range that is rounded to a code
    assert (off.view(8, 4, 16) <= reach * scale[:, :, None]).all()
    assert not affine.dequantize_affine(q, block, scale, zero)[3].any(), "zero is exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("zero_dtype", [torch.int32, torch.float32])
def test_bits_are_those_of_torchao(block, bits, dtype, zero_dtype):
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    x, codes = matrix(dtype), affine.code_range(bits)
    for symmetric, mapping in ((True, ao.MappingType.SYMMETRIC), (False, ao.MappingType.ASYMMETRIC)):
        theirs = ao.choose_qparams_affine(x, mapping, block, torch.int8, *codes, zero_point_dtype=zero_dtype)
        scale, zero = affine.choose_qparams_affine(x, block, codes, symmetric=symmetric, zero_point_dtype=zero_dtype)
        assert_bit_equal(scale.flatten(), theirs[0].flatten())
        assert_bit_equal(zero.flatten(), theirs[1].flatten())
        q = affine.quantize_affine(x, block, scale, zero, codes)
        assert_bit_equal(q, ao.quantize_affine(x, block, *theirs, torch.int8, *codes))
        for out in (torch.float32, torch.bfloat16):
            expected = ao.dequantize_affine(q, block, *theirs, torch.int8, *codes, output_dtype=out)
            assert_bit_equal(affine.dequantize_affine(q, block, scale, zero, out), expected)


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"blocks of \(1, 48\) do not divide a tensor of shape"):
        affine.choose_qparams_affine(matrix(torch.float32), (1, 48), (-8, 7), symmetric=True)
    with pytest.raises(ValueError, match="the bits of a code must be 1 to 8; got 9"):
        affine.code_range(9)
