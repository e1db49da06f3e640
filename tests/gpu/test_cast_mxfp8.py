"""MXFP8 kernels, 1x32 and 32x32, against the reference: both scale rules, both orientations, partial blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda, reference
from dlp.kernels.cuda import BlockJob, mx_scale_shape
from tests.gpu.inputs import CODES, DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.metrics import assert_bit_equal

RULES = ["ceil", "floor"]
TILES = pytest.mark.parametrize("tile", [False, True], ids=["1x32", "32x32"])


def outputs(poisoned, shape, code, tile, wanted=(True, True), offset=0) -> dict[str, Tensor]:
    out = {}
    for name, lines, along, want in (("", *shape, wanted[0]), ("_t", *reversed(shape), wanted[1])):
        if want:
            out[f"codes{name}"] = poisoned((lines, along), code, offset)
            out[f"scale{name}"] = poisoned(mx_scale_shape(lines, along, tile=tile), torch.uint8, offset)
    return out


def check(out: dict[str, Tensor], x: Tensor, code: torch.dtype, tile: bool, rule: str, what: str) -> None:
    for suffix, source in (("", x), ("_t", x.t())):
        if f"codes{suffix}" in out:
            codes, scale = reference.cast_mxfp8(source, (32 if tile else 1, 32), code, rule=rule)
            assert_bit_equal(out[f"scale{suffix}"].cpu(), scale, f"scale{suffix} of {what}")
            assert_bit_equal(out[f"codes{suffix}"].cpu(), codes, f"codes{suffix} of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@TILES
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("rule", RULES)
def test_cast_is_the_reference(device, poisoned, dtype, tile, data, rule):
    for number, shape in enumerate([*SHAPES, (160, 416), (260, 515)]):
        x, code = values(data, *shape, dtype), CODES[number % 2]
        for stride in STRIDES:
            out = outputs(poisoned, shape, code, tile)
            cuda.cast_mxfp8(BlockJob(place(x, stride, device), **out), tile=tile, rule=rule)
            check(out, x, code, tile, rule, f"{data} {dtype} {shape} {stride} {code}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("code", CODES)
def test_every_exponent(device, poisoned, rule, code):
    """Blocks whose amax is any bf16 value, ties of the scale among them."""
    x = (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)[:, None]
        .expand(-1, 32)
        .contiguous()
    )
    x[:, 1:] *= 0.37
    out = outputs(poisoned, x.shape, code, False)
    cuda.cast_mxfp8(BlockJob(x.to(device), **out), tile=False, rule=rule)
    check(out, x, code, False, rule, "every bf16")


@TILES
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
def test_one_orientation(device, poisoned, tile, wanted):
    x = values("gauss", 320, 544, torch.bfloat16)
    out = outputs(poisoned, x.shape, CODES[0], tile, wanted)
    cuda.cast_mxfp8(BlockJob(x.to(device), **out), tile=tile)
    check(out, x, CODES[0], tile, "ceil", "one orientation")


@TILES
def test_unaligned_outputs(device, poisoned, tile):
    x = values("gauss", 160, 288, torch.bfloat16)
    for offset in (1, 8):
        out = outputs(poisoned, x.shape, CODES[0], tile, offset=offset)
        cuda.cast_mxfp8(BlockJob(x.to(device), **out), tile=tile)
        check(out, x, CODES[0], tile, "ceil", f"offset {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
@TILES
def test_batch_is_each_alone(device, poisoned, dtype, tile):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (320, 544), (32, 2048)])]
    outs = [outputs(poisoned, x.shape, CODES[1], tile) for x in matrices]
    jobs = [BlockJob(place(x, STRIDES[i % 3], device), **outs[i]) for i, x in enumerate(matrices)]
    cuda.cast_mxfp8_batch(jobs, tile=tile)()
    for i, x in enumerate(matrices):
        check(outs[i], x, CODES[1], tile, "ceil", f"job {i}")
