"""Per-tensor FP8 kernels against the reference: cast, cast + transpose, delayed scaling, many in one launch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda, reference
from dlp.kernels.cuda import TensorJob
from tests.gpu.inputs import CODES, DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.metrics import assert_bit_equal

Options = dict[str, bool | float]
OPTIONS: list[Options] = [{}, {"power_of_two": True}, {"epsilon": 8.0}]
ORIENTATIONS = [(True, False), (True, True), (False, True)]


def expected(x: Tensor, amax: Tensor, code: torch.dtype, **options: bool | float) -> tuple[Tensor, Tensor]:
    """Codes and scale_inv of the reference, computed with an amax."""
    scale = reference.scale_from_amax(amax, reference.FP8_MAX[code], **options)  # type: ignore[arg-type]
    return reference.cast_fp8(x, scale, code), scale.reciprocal()


def outputs(poisoned, shape, code, rowwise=True, columnwise=True, offset=0) -> dict[str, Tensor]:
    rows, cols = shape
    wanted = {"codes": (rows, cols)} if rowwise else {}
    wanted |= {"codes_t": (cols, rows)} if columnwise else {}
    return {name: poisoned(shape, code, offset) for name, shape in wanted.items()} | {
        "scale_inv": poisoned((), torch.float32)
    }


def check(out: dict[str, Tensor], codes: Tensor, scale_inv: Tensor, what: str) -> None:
    for name, tensor in out.items():
        want = {"codes": codes, "codes_t": codes.t().contiguous(), "scale_inv": scale_inv}[name]
        assert_bit_equal(tensor.cpu(), want, f"{name} of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("data", DATA)
def test_cast_is_the_reference(device, poisoned, dtype, code, data):
    for shape, (rowwise, columnwise) in product(SHAPES, ORIENTATIONS):
        x = values(data, *shape, dtype)
        amax, options = reference.amax(x), OPTIONS[sum(shape) % 3]
        want = expected(x, amax, code, **options)
        for stride in STRIDES:
            out = outputs(poisoned, shape, code, rowwise, columnwise)
            job = TensorJob(place(x, stride, device), amax=amax.to(device), **out)
            cuda.cast_tensor(job, **options)
            check(out, *want, f"{data} {dtype} {shape} {stride} {options}")


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3.0, 448.0, 3.4e38, float("inf"), float("nan")])
@pytest.mark.parametrize("options", OPTIONS)
def test_scale_of_any_amax(device, poisoned, value, options):
    x, amax = values("gauss", 16, 16, torch.float32), torch.tensor(value)
    for code, columnwise in product(CODES, (False, True)):
        out = outputs(poisoned, (16, 16), code, True, columnwise)
        cuda.cast_tensor(TensorJob(x.to(device), amax=amax.to(device), **out), **options)
        check(out, *expected(x, amax, code, **options), f"amax {value}")


@pytest.mark.parametrize("code", CODES)
def test_every_bf16_value(device, poisoned, code):
    """Casts of all 65536 bf16 bit patterns, including ties and NaNs."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for scale, columnwise in product((1.0, 0.37, 2.0**-7), (False, True)):
        out = outputs(poisoned, (256, 256), code, True, columnwise)
        given = torch.tensor(scale)
        cuda.cast_tensor(TensorJob(x.to(device), scale=given.to(device), **out))
        check(out, reference.cast_fp8(x, given, code), given.reciprocal(), f"scale {scale}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_delayed_scaling_observes_in_the_same_read(device, poisoned, dtype, columnwise):
    for shape, data in product(SHAPES, ("gauss", "specials")):
        x = values(data, *shape, dtype)
        for before in (0.0, 1e9):
            staging = poisoned((), torch.float32).fill_(before)
            scale, out = torch.tensor(0.75), outputs(poisoned, shape, CODES[0], True, columnwise)
            cuda.cast_tensor(TensorJob(place(x, "strided", device), scale=scale.to(device), staging=staging, **out))
            check(out, reference.cast_fp8(x, scale, CODES[0]), scale.reciprocal(), f"{shape} {dtype}")
            assert_bit_equal(staging.cpu(), torch.maximum(torch.tensor(before), reference.amax(x)), "staging")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delayed", [False, True])
def test_batch_is_each_alone(device, poisoned, dtype, delayed):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (300, 520), (8, 2048)])]
    scale, jobs, wants = torch.tensor(0.5), [], []
    for i, x in enumerate(matrices):
        amax = reference.amax(x)
        out = outputs(poisoned, x.shape, CODES[0], i % 3 != 1, i % 3 != 2)
        source = (
            {"scale": scale.to(device), "staging": poisoned((), torch.float32).zero_()}
            if delayed
            else {"amax": amax.to(device)}
        )
        jobs.append(TensorJob(place(x, STRIDES[i % 3], device), **out, **source))
        codes = (reference.cast_fp8(x, scale, CODES[0]), scale.reciprocal()) if delayed else expected(x, amax, CODES[0])
        wants.append((out, *codes, amax))
    batch = cuda.cast_tensor_batch(jobs)
    batch()
    for i, (out, codes, scale_inv, amax) in enumerate(wants):
        check(out, codes, scale_inv, f"job {i}")
        if delayed:
            assert_bit_equal(jobs[i].staging.cpu(), amax, f"staging of job {i}")


@pytest.mark.parametrize("columnwise", [False, True])
def test_unaligned_outputs(device, poisoned, columnwise):
    """Outputs may start at any address, such as the middle of an output buffer."""
    x = values("gauss", 144, 272, torch.bfloat16)
    for offset in (1, 8):
        out = outputs(poisoned, x.shape, CODES[0], True, columnwise, offset)
        amax = reference.amax(x)
        cuda.cast_tensor(TensorJob(x.to(device), amax=amax.to(device), **out))
        check(out, *expected(x, amax, CODES[0]), f"offset {offset}")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("columnwise", [False, True])
def test_more_than_2_to_the_31_elements(device, columnwise):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    rows, cols = 65664, 32768
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    x[::97] = torch.randn(cols, device=device).bfloat16()
    codes = torch.empty(rows, cols, dtype=CODES[0], device=device)
    codes_t = torch.empty(cols, rows, dtype=CODES[0], device=device) if columnwise else None
    amax, scale_inv = torch.tensor(6.0, device=device), torch.empty((), device=device)
    cuda.cast_tensor(TensorJob(x, scale_inv, codes, codes_t, amax=amax))
    for part in (slice(0, 300), slice(65300, rows)):
        want, _ = expected(x[part].cpu(), amax.cpu(), CODES[0])
        assert_bit_equal(codes[part].cpu(), want, "codes")
        if codes_t is not None:
            assert_bit_equal(codes_t[:, part].cpu().contiguous(), want.t().contiguous(), "codes_t")


def test_what_a_cast_refuses(device):
    x, scalar = torch.zeros(4, 8, device=device), torch.ones((), device=device)
    codes = torch.empty(4, 8, dtype=CODES[0], device=device)
    with pytest.raises(ValueError, match="pass codes, codes_t or both"):
        cuda.cast_tensor(TensorJob(x, scalar, amax=scalar))
    with pytest.raises(ValueError, match="amax or from scale: pass exactly one"):
        cuda.cast_tensor(TensorJob(x, scalar, codes))
    with pytest.raises(ValueError, match=r"codes_t must be a contiguous \[8, 4\]"):
        cuda.cast_tensor(TensorJob(x, scalar, codes_t=codes, amax=scalar))
    with pytest.raises(ValueError, match="the presence of staging"):
        jobs = [TensorJob(x, scalar, codes, scale=scalar, staging=staging) for staging in (None, scalar)]
        cuda.cast_tensor_batch(jobs)
