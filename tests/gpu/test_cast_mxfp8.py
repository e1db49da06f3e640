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


LAYOUTS = pytest.mark.parametrize("tile, blocks_first", [(False, False), (False, True), (True, False)],
                                  ids=["1x32", "1x32 blocks first", "32x32"])  # fmt: skip


def outputs(poisoned, shape, code, tile, wanted=(True, True), offset=0, blocks_first=False) -> dict[str, Tensor]:
    out = {}
    for name, lines, along, want in (("", *shape, wanted[0]), ("_t", *reversed(shape), wanted[1])):
        if want:
            out[f"codes{name}"] = poisoned((lines, along), code, offset)
            scales = mx_scale_shape(lines, along, tile=tile, blocks_first=blocks_first)
            out[f"scale{name}"] = poisoned(scales, torch.uint8, offset)
    return out


def check(
    out: dict[str, Tensor], x: Tensor, code: torch.dtype, tile: bool, rule: str, what: str, blocks_first: bool = False
) -> None:
    for suffix, source in (("", x), ("_t", x.t())):
        if f"codes{suffix}" in out:
            codes, scale = reference.cast_mxfp8(source, (32 if tile else 1, 32), code, rule=rule)
            made = out[f"scale{suffix}"].cpu()
            made = made.t()[: len(scale)].contiguous() if blocks_first else made
            assert_bit_equal(made, scale, f"scale{suffix} of {what}")
            assert_bit_equal(out[f"codes{suffix}"].cpu(), codes, f"codes{suffix} of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@LAYOUTS
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("rule", RULES)
def test_cast_is_the_reference(device, poisoned, dtype, tile, blocks_first, data, rule):
    for number, shape in enumerate([*SHAPES, (160, 416), (260, 515)]):
        x, code = values(data, *shape, dtype), CODES[number % 2]
        for stride in STRIDES:
            out = outputs(poisoned, shape, code, tile, blocks_first=blocks_first)
            cuda.cast_mxfp8(BlockJob(place(x, stride, device), **out), tile=tile, rule=rule, blocks_first=blocks_first)
            check(out, x, code, tile, rule, f"{data} {dtype} {shape} {stride} {code}", blocks_first)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("code", CODES)
def test_every_exponent(device, poisoned, rule, code):
    """Casts of blocks with every bf16 value as the amax, including ties of the scale."""
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


@LAYOUTS
def test_unaligned_outputs(device, poisoned, tile, blocks_first):
    x = values("gauss", 160, 288, torch.bfloat16)
    for offset in (1, 8):
        out = outputs(poisoned, x.shape, CODES[0], tile, offset=offset, blocks_first=blocks_first)
        cuda.cast_mxfp8(BlockJob(x.to(device), **out), tile=tile, blocks_first=blocks_first)
        check(out, x, CODES[0], tile, "ceil", f"offset {offset}", blocks_first)


@pytest.mark.parametrize("dtype", DTYPES)
@LAYOUTS
def test_batch_is_each_alone(device, poisoned, dtype, tile, blocks_first):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (320, 544), (32, 2048)])]
    outs = [outputs(poisoned, x.shape, CODES[1], tile, blocks_first=blocks_first) for x in matrices]
    jobs = [BlockJob(place(x, STRIDES[i % 3], device), **outs[i]) for i, x in enumerate(matrices)]
    cuda.cast_mxfp8_batch(jobs, tile=tile, blocks_first=blocks_first)()
    for i, x in enumerate(matrices):
        check(outs[i], x, CODES[1], tile, "ceil", f"job {i}", blocks_first)
