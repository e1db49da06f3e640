"""Casting both gradients of SwiGLU in one launch gives the bits of storing the gradients and casting each one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_gate_grads, cuda_producers
from dlp.kernels.cuda import BlockJob, TensorJob
from tests.gpu.inputs import DATA, values
from tests.gpu.test_producers import assert_equal

SHAPES = [(128, 128), (256, 384), (384, 128)]
CODES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
BF16 = torch.bfloat16


def given(data: str, shape: tuple[int, int], device: str) -> list[Tensor]:
    """Return dh, gate and up. up has gaps between its rows, like one half of the joint output of siblings."""
    dh, gate, up = (values(each, *shape, BF16, seed) for seed, each in enumerate((data, "gauss", data), 1))
    wide = torch.zeros(shape[0], shape[1] + 8, dtype=BF16)
    wide[:, : shape[1]] = up
    return [dh.to(device), gate.to(device), wide.to(device)[:, : shape[1]]]


def stored(tensors: list[Tensor]) -> list[Tensor]:
    dgate, dup = (torch.empty_like(tensors[1]) for _ in range(2))
    cuda_producers.swiglu_backward(*tensors, dgate, dup)
    return [dgate, dup]


def empty(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def tensor_job(x: Tensor, dtype: torch.dtype, new: Any, **scale: Tensor) -> TensorJob:
    return TensorJob(x, new((), torch.float32), new(tuple(x.shape), dtype), new(tuple(x.shape[::-1]), dtype), **scale)


def block_job(x: Tensor, dtype: torch.dtype, new: Any, gemm_layout: bool, flag: Tensor) -> BlockJob:
    job = []
    for shape in (tuple(x.shape), tuple(x.shape[::-1])):
        scales = cuda.block_scale_shape(*shape, tile=False, gemm_layout=gemm_layout)
        job += [new(shape, dtype), new(scales, torch.float32)]
    return BlockJob(x, *job, flag=flag)


def assert_jobs_equal(made: Any, expected: Any, what: str) -> None:
    for name, mine, its in zip(made._fields[1:], made[1:], expected[1:], strict=True):
        if its is not None:
            bits = (mine.view(torch.uint8), its.view(torch.uint8)) if mine.dtype.itemsize == 1 else (mine, its)
            assert_equal(*bits, f"{name}, {what}")


@pytest.mark.parametrize("data", DATA)
def test_amaxes_are_those_of_the_gradients(device, poisoned, data):
    for shape in SHAPES:
        tensors = given(data, shape, device)
        out = poisoned((2,), torch.float32)
        cuda_gate_grads.amaxes(*tensors, out)
        for found, x in zip(out, stored(tensors), strict=True):
            expected = torch.empty((), device=device)
            cuda.amax(x, expected)
            assert_equal(found, expected, f"{data} {shape}")


@CODES
@pytest.mark.parametrize("data", DATA)
def test_casts_by_one_scale_have_the_bits_of_two_casts(device, poisoned, data, dtype):
    for number, shape in enumerate(SHAPES):
        tensors = given(data, shape, device)
        jobs, expected = [], []
        for x, start in zip(stored(tensors), (3.0, 0.5), strict=True):
            scale = torch.tensor(start, device=device)
            delayed = {"scale": scale, "staging": scale.clone()} if number % 2 else {"amax": scale}
            more = {name: each.clone() for name, each in delayed.items()}
            flags = [torch.zeros((), device=device) for _ in range(2)]
            jobs.append(tensor_job(tensors[1], dtype, poisoned, **delayed, flag=flags[0]))
            expected.append(tensor_job(x, dtype, partial(empty, device), **more, flag=flags[1]))
            cuda.cast_tensor(expected[-1])
        cuda_gate_grads.cast_tensor(*tensors, tuple(jobs))
        for name, made, its in zip(("gate", "up"), jobs, expected, strict=True):
            assert_jobs_equal(made, its, f"{name} {data} {shape}")


@CODES
@pytest.mark.parametrize("data", DATA)
def test_casts_in_blocks_have_the_bits_of_two_casts(device, poisoned, data, dtype):
    for number, shape in enumerate(SHAPES):
        tensors, layout = given(data, shape, device), bool(number % 2)
        jobs, expected = [], []
        for x in stored(tensors):
            flags = [torch.zeros((), device=device) for _ in range(2)]
            jobs.append(block_job(tensors[1], dtype, poisoned, layout, flags[0]))
            expected.append(block_job(x, dtype, partial(empty, device), layout, flags[1]))
            cuda.cast_block(expected[-1], tile=False, gemm_layout=layout)
        cuda_gate_grads.cast_block(*tensors, tuple(jobs), gemm_layout=layout)
        for name, made, its in zip(("gate", "up"), jobs, expected, strict=True):
            assert_jobs_equal(made, its, f"{name} {data} {shape}")
