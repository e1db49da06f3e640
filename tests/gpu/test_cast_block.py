"""Block FP8 kernels, 1x128 and 128x128, against the reference: both orientations, both layouts of the scales."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda, reference
from dlp.kernels.cuda import BlockJob, block_scale_shape
from tests.gpu.inputs import CODES, DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.metrics import assert_bit_equal

OPTIONS = [{}, {"power_of_two": False}, {"epsilon": 1e-3}]


def expected(x: Tensor, code: torch.dtype, tile: bool, gemm_layout: bool, **options: float) -> tuple[Tensor, Tensor]:
    """Codes and scales of the reference, along the rows of x."""
    block = (128, 128) if tile else (1, 128)
    codes, scale = reference.cast_fp8_block(x, block, code, **({"power_of_two": True} | options))  # type: ignore[arg-type]
    if gemm_layout:
        scale = (reference.block_2d_layout if tile else reference.block_1d_layout)(scale)
    return codes, scale


def outputs(poisoned, shape, code, tile, gemm_layout, wanted=(True, True)) -> dict[str, Tensor]:
    out = {}
    for name, lines, along, want in (("", *shape, wanted[0]), ("_t", *reversed(shape), wanted[1])):
        if want:
            out[f"codes{name}"] = poisoned((lines, along), code)
            scales = block_scale_shape(lines, along, tile=tile, gemm_layout=gemm_layout)
            out[f"scale{name}"] = poisoned(scales, torch.float32)
    return out


def check(out: dict[str, Tensor], x: Tensor, code, tile, gemm_layout, what: str, **options) -> None:
    for suffix, source in (("", x), ("_t", x.t())):
        if f"codes{suffix}" in out:
            codes, scale = expected(source, code, tile, gemm_layout, **options)
            assert_bit_equal(out[f"codes{suffix}"].cpu(), codes, f"codes{suffix} of {what}")
            assert_bit_equal(out[f"scale{suffix}"].cpu(), scale, f"scale{suffix} of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("data", DATA)
def test_cast_is_the_reference(device, poisoned, dtype, tile, data):
    for number, shape in enumerate([*SHAPES, (260, 515)]):
        x, code, options = values(data, *shape, dtype), CODES[number % 2], OPTIONS[number % 3]
        for gemm_layout, stride in product((False, True), STRIDES):
            out = outputs(poisoned, shape, code, tile, gemm_layout)
            job = BlockJob(place(x, stride, device), **out)
            cuda.cast_block(job, tile=tile, gemm_layout=gemm_layout, **options)
            check(out, x, code, tile, gemm_layout, f"{data} {dtype} {shape} {stride} {options}", **options)


@pytest.mark.parametrize("tile", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
def test_one_orientation(device, poisoned, tile, wanted):
    x = values("gauss", 300, 520, torch.bfloat16)
    out = outputs(poisoned, x.shape, CODES[0], tile, False, wanted)
    cuda.cast_block(BlockJob(x.to(device), **out), tile=tile)
    check(out, x, CODES[0], tile, False, "one orientation")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [False, True], ids=["1x128", "128x128"])
def test_batch_is_each_alone(device, poisoned, dtype, tile):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (300, 520), (8, 2048)])]
    outs = [outputs(poisoned, x.shape, CODES[0], tile, True) for x in matrices]
    jobs = [BlockJob(place(x, STRIDES[i % 3], device), **outs[i]) for i, x in enumerate(matrices)]
    cuda.cast_block_batch(jobs, tile=tile, gemm_layout=True)()
    for i, x in enumerate(matrices):
        check(outs[i], x, CODES[0], tile, True, f"job {i}")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("tile", [False, True], ids=["1x128", "128x128"])
def test_more_than_2_to_the_31_elements(device, tile):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    rows, cols = 65664, 32768
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    x[::97] = torch.randn(cols, device=device).bfloat16()
    shapes = {"": (rows, cols), "_t": (cols, rows)}
    out = {f"codes{name}": torch.empty(shape, dtype=CODES[0], device=device) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        out[f"scale{name}"] = torch.empty(block_scale_shape(*shape, tile=tile, gemm_layout=False), device=device)
    cuda.cast_block(BlockJob(x, **out), tile=tile)
    first = 65664 - 384
    codes, scale = expected(x[first:].cpu(), CODES[0], tile, False)
    assert_bit_equal(out["codes"][first:].cpu(), codes, "codes")
    assert_bit_equal(out["scale"][first // 128 if tile else first :].cpu(), scale, "scale")
    codes, scale = expected(x[first:].t().cpu(), CODES[0], tile, False)
    assert_bit_equal(out["codes_t"][:, first:].cpu().contiguous(), codes, "codes_t")
    assert_bit_equal(out["scale_t"][:, first // 128 :].cpu().contiguous(), scale, "scale_t")


def test_what_a_block_cast_refuses(device):
    x = torch.zeros(4, 8, device=device)
    codes = torch.empty(4, 8, dtype=CODES[0], device=device)
    with pytest.raises(ValueError, match="together: pass both tensors"):
        cuda.cast_block(BlockJob(x, codes), tile=False)
    with pytest.raises(ValueError, match=r"scale must be a contiguous \[4, 1\]"):
        cuda.cast_block(BlockJob(x, codes, torch.empty(1, 4, device=device)), tile=False)
