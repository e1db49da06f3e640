"""Rowwise FP8 kernels against the reference: amaxes of rows and columns with one read, and casts with a second read."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda_rowwise, reference
from dlp.kernels.cuda_rowwise import RowwiseJob
from tests.gpu.inputs import CODES, DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.metrics import assert_bit_equal

OPTIONS = [{}, {"power_of_two": False}, {"epsilon": 1e-3}]


def outputs(poisoned, x: Tensor, code: torch.dtype, wanted=(True, True)) -> dict[str, Tensor]:
    out = {}
    for name, source, want in (("", x, wanted[0]), ("_t", x.t(), wanted[1])):
        if want:
            out[f"codes{name}"] = poisoned(tuple(source.shape), code)
            out[f"amax{name}"] = reference.amax(source, 1).cuda()
            out[f"scale_inv{name}"] = poisoned((source.shape[0],), torch.float32)
    return out


def check(out: dict[str, Tensor], x: Tensor, code: torch.dtype, what: str, **options) -> None:
    for suffix, source in (("", x), ("_t", x.t())):
        if f"codes{suffix}" in out:
            rule = {"power_of_two": True} | options
            scale = reference.scale_from_amax(reference.amax(source, 1), reference.FP8_MAX[code], **rule)
            assert_bit_equal(out[f"scale_inv{suffix}"].cpu(), scale.reciprocal(), f"scale_inv{suffix} of {what}")
            codes = reference.cast_fp8(source, scale[:, None], code)
            assert_bit_equal(out[f"codes{suffix}"].cpu(), codes, f"codes{suffix} of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_amaxes_of_lines(device, poisoned, dtype, data):
    for shape in [*SHAPES, (260, 515)]:
        x = values(data, *shape, dtype)
        for stride, wanted in product(STRIDES, [(True, True), (True, False), (False, True)]):
            out = [
                poisoned((size,), torch.float32).zero_() if want else None
                for size, want in zip(shape, wanted, strict=True)
            ]
            cuda_rowwise.amax_lines(place(x, stride, device), *out)
            for dim, found in enumerate(out):
                if found is not None:
                    assert_bit_equal(
                        found.cpu(), reference.amax(x, 1 - dim), f"{data} {shape} {stride} {wanted}, {dim}"
                    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_cast_is_the_reference(device, poisoned, dtype, data):
    for number, shape in enumerate([*SHAPES, (260, 515)]):
        x, code, options = values(data, *shape, dtype), CODES[number % 2], OPTIONS[number % 3]
        for stride, wanted in zip(STRIDES, [(True, True), (True, False), (False, True)], strict=True):
            out = outputs(poisoned, x, code, wanted)
            cuda_rowwise.cast_rowwise(RowwiseJob(place(x, stride, device), **out), **options)
            check(out, x, code, f"{data} {dtype} {shape} {stride} {options}", **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_is_each_alone(device, poisoned, dtype):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (300, 520), (8, 2048)])]
    placed = [place(x, STRIDES[i % 3], device) for i, x in enumerate(matrices)]
    outs = [outputs(poisoned, x, CODES[0]) for x in matrices]
    amaxes = [tuple(poisoned((size,), torch.float32).zero_() for size in x.shape) for x in matrices]
    cuda_rowwise.amax_lines_batch(placed, amaxes)()
    cuda_rowwise.cast_rowwise_batch([RowwiseJob(x, **out) for x, out in zip(placed, outs, strict=True)])()
    for i, x in enumerate(matrices):
        check(outs[i], x, CODES[0], f"job {i}")
        assert_bit_equal(amaxes[i][0].cpu(), reference.amax(x, 1), f"rows of job {i}")
        assert_bit_equal(amaxes[i][1].cpu(), reference.amax(x, 0), f"columns of job {i}")


def test_what_a_rowwise_cast_refuses(device):
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="pass all three, of at least one orientation"):
        cuda_rowwise.cast_rowwise(RowwiseJob(x))
    with pytest.raises(ValueError, match="pass all three, of at least one orientation"):
        cuda_rowwise.cast_rowwise(RowwiseJob(x, torch.empty(4, 8, dtype=CODES[0], device=device)))
