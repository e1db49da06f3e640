"""The kernels of the FP8 wire against the reference, bit for bit; NaNs are compared as NaNs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlp.kernels import wire
from dlp.kernels.reference import wire as reference
from tests.metrics import assert_bit_equal

SHAPES = [(1, 8), (3, 128), (5, 300), (2, 3, 129), (64, 4096), (7, 1)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Gaussian values with outliers and a row of tiny values; large tensors also have a block of zeros, and NaN and Inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = x.view(-1)
    flat[:: max(1, flat.numel() // 5)] *= 1e6
    x[..., -1, :] *= 1e-36
    if flat.numel() > 1000:
        x[0, :128] = 0
        flat[500], flat[700], flat[900] = math.nan, math.inf, -math.inf
    return x.to(dtype).cuda()


def same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_bit_equal(actual.nan_to_num(nan=0, posinf=math.inf, neginf=-math.inf),
                     expected.nan_to_num(nan=0, posinf=math.inf, neginf=-math.inf))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_is_that_of_the_reference(device, shape, dtype):
    x = values(shape, dtype)
    codes, scale = wire.pack_fp8(x)
    expected_codes, expected_scale = reference.pack_fp8(x.cpu())
    assert_bit_equal(codes.cpu(), expected_codes)
    same(scale.cpu(), expected_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_that_of_the_reference(device, shape, ranks, dtype):
    packed = [wire.pack_fp8(values(shape, torch.bfloat16) * (i + 1)) for i in range(ranks)]
    codes, scale = (torch.stack(parts) for parts in zip(*packed, strict=True))
    total = wire.sum_fp8(codes, scale, dtype)
    same(total.cpu(), reference.sum_fp8(codes.cpu(), scale.cpu(), dtype))
    for index in {0, ranks - 1}:
        own = index, codes[index].clone(), scale[index].clone()
        apart = codes.clone(), scale.clone()
        apart[0].view(torch.uint8)[index], apart[1][index] = 7, 7.0
        same(wire.sum_fp8(*apart, dtype, own).cpu(), total.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_off_alignment_are_refused_where_they_are_read_by_eight(device, dtype):
    def moved(x: Tensor, offset: int) -> Tensor:
        """Copy of x that begins `offset` bytes after an aligned address, with `offset` more bytes between ranks."""
        memory = torch.zeros(len(x), offset + x[0].nbytes, dtype=torch.uint8, device=x.device)
        memory[:, offset:] = x.view(torch.uint8).flatten(1)
        return memory[:, offset:].view(x.dtype).unflatten(1, x.shape[1:])

    for features in (256, 129):  # eight elements per access; one element per access
        packed = [wire.pack_fp8(values((3, features), torch.bfloat16) * (i + 1)) for i in range(2)]
        codes, scale = (torch.stack(parts) for parts in zip(*packed, strict=True))
        expected, own = wire.sum_fp8(codes, scale, dtype), (0, moved(codes[:1], 1)[0], scale[0])
        same(wire.sum_fp8(moved(codes, 8), scale, dtype), expected)
        for given in ((moved(codes, 4), scale, dtype), (codes, scale, dtype, own)):
            if features % 8:
                same(wire.sum_fp8(*given), expected)
                continue
            with pytest.raises(RuntimeError, match=r"expected .* % 8 == 0u?, got [14] and 0"):
                wire.sum_fp8(*given)
