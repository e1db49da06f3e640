"""NVFP4 kernels against the reference: amaxes, casts of 1x16 blocks with Hadamard transform and stochastic rounding,
and casts of 16x16 tiles. Each kernel reads the matrix once."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda_fp4, reference
from dlp.kernels.cuda_fp4 import Nvfp4Job, scale_shape
from dlp.kernels.reference import PhiloxState
from tests.gpu.inputs import DATA, DTYPES, STRIDES, place, values
from tests.metrics import assert_bit_equal
from tests.quantizers import four_over_six_ties

SHAPES = [(128, 128), (256, 384), (16, 16), (16, 304), (304, 16), (80, 272), (144, 400), (0, 128), (128, 0)]
RHT = pytest.mark.parametrize("rht", [False, True], ids=["plain", "rht"])


def outputs(poisoned, shape, amaxes, tile=False, wanted=(True, True), offset=0) -> dict[str, Tensor]:
    out = {}
    ways = (("", *shape, wanted[0], amaxes[0]), ("_t", *reversed(shape), wanted[1], amaxes[1]))
    for name, lines, along, want, amax in ways:
        if want:
            out[f"codes{name}"] = poisoned((lines, along // 2), torch.uint8, offset)
            out[f"scale{name}"] = poisoned(scale_shape(lines, along, tile=tile), torch.float8_e4m3fn, offset)
            out[f"amax{name}"] = amax.cuda()
            out[f"amax{name}_out"] = poisoned((), torch.float32)
    return out


def draws(device: str, counter: int = (1 << 33) + 5) -> tuple[PhiloxState, PhiloxState]:
    """Return the Philox states of the rowwise and the columnwise cast. Block numbers and the microbatch counter exceed
    32 bits."""
    count = torch.tensor(counter, device=device)
    return PhiloxState(1 << 30, 64, 4096, 0, count, (123, -7)), PhiloxState(
        77, 1 << 20, 1 << 21, 1, count, (1 << 40, 9)
    )


def check(out, x, amaxes, what, *, tile=False, rht=False, drawn=(None, None), four=False) -> None:
    for i, (suffix, source) in enumerate((("", x), ("_t", x.t()))):
        if f"codes{suffix}" not in out:
            continue
        random = None if drawn[i] is None else drawn[i].bytes(*source.shape)
        turned = reference.rht16(source) if rht and i else source
        codes, scale = reference.cast_nvfp4(
            turned, amaxes[i], (16 if tile else 1, 16), random=random, four_over_six=four
        )
        assert_bit_equal(out[f"scale{suffix}"].cpu(), scale, f"scale{suffix} of {what}")
        assert_bit_equal(out[f"codes{suffix}"].cpu(), codes, f"codes{suffix} of {what}")
        stored = reference.nvfp4_stored_amax(amaxes[i], four_over_six=four)
        assert_bit_equal(out[f"amax{suffix}_out"].cpu(), stored, f"amax{suffix} of {what}")


def observed(x: Tensor, rht: bool) -> tuple[Tensor, Tensor]:
    amax = reference.amax(x)
    return amax, reference.amax(reference.rht16(x.t())) if rht else amax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_both_amaxes_are_the_reference(device, poisoned, dtype, data):
    for shape, stride in product([*SHAPES, (48, 1001), (112, 77)], STRIDES):
        x, out = values(data, *shape, dtype), poisoned((2,), torch.float32)
        cuda_fp4.amax_rht(place(x, stride, device), out)
        assert_bit_equal(out.cpu(), torch.stack(observed(x, True)), f"{data} {dtype} {shape} {stride}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("by_chance", [False, True], ids=["nearest", "chance"])
@RHT
def test_cast_is_the_reference(device, poisoned, dtype, data, by_chance, rht):
    drawn = draws("cpu") if by_chance else (None, None)
    given = draws(device) if by_chance else (None, None)
    for number, (shape, stride) in enumerate(product(SHAPES, STRIDES)):
        x = values(data, *shape, dtype)
        amaxes = observed(x, rht)
        if number % 4 == 3:
            amaxes = (amaxes[0] / 3, amaxes[1] * 500)  # amaxes that are not those of x, as after an agreement of ranks
        out = outputs(poisoned, shape, amaxes)
        cuda_fp4.cast_nvfp4(Nvfp4Job(place(x, stride, device), **out), rht=rht, draws=given)
        check(out, x, amaxes, f"{data} {dtype} {shape} {stride}", rht=rht, drawn=drawn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", [*DATA, "ties"])
@pytest.mark.parametrize("way", ["plain", "rht", "tile"])
def test_four_over_six_is_the_reference(device, poisoned, dtype, data, way):
    tile, rht = way == "tile", way == "rht"
    for number, (shape, stride) in enumerate(product(SHAPES, STRIDES)):
        if data == "ties":
            x, amaxes = four_over_six_ties(*shape, 16 if tile else 1, number).to(dtype), (torch.tensor(6.0),) * 2
        else:
            x = values(data, *shape, dtype)
            amaxes = observed(x, rht)
        if number % 4 == 3:
            amaxes = (amaxes[0] * 3,) * 2 if tile else (amaxes[0] / 3, amaxes[1] * 500)
        out = outputs(poisoned, shape, amaxes, tile)
        job = Nvfp4Job(place(x, stride, device), **out)
        if tile:
            cuda_fp4.cast_nvfp4_tile(job, four_over_six=True)
        else:
            cuda_fp4.cast_nvfp4(job, rht=rht, four_over_six=True)
        check(out, x, amaxes, f"{data} {dtype} {shape} {stride}", tile=tile, rht=rht, four=True)


@pytest.mark.parametrize("by_chance", [False, True], ids=["nearest", "chance"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
@RHT
def test_one_orientation(device, poisoned, by_chance, wanted, rht):
    x = values("gauss", *((200, 304) if wanted[0] and not rht else (304, 203)), torch.bfloat16)
    if wanted[0]:
        x = x[:, :192].contiguous()
    amaxes = observed(x, rht and wanted[1])
    drawn, given = ((None, None), (None, None)) if not by_chance else (draws("cpu"), draws(device))
    given = tuple(draw if want else None for draw, want in zip(given, wanted, strict=True))
    out = outputs(poisoned, x.shape, amaxes, wanted=wanted)
    cuda_fp4.cast_nvfp4(Nvfp4Job(x.to(device), **out), rht=rht, draws=given)
    check(out, x, amaxes, "one orientation", rht=rht, drawn=drawn)


@pytest.mark.parametrize("value", [0.0, 1e-45, 7.8e-36, 8e-36, 1e-38, 3.0, 2688.0, 3.4e38, float("inf"), float("nan")])
def test_any_tensor_amax(device, poisoned, value):
    x, amaxes = values("specials", 64, 128, torch.float32), (torch.tensor(value),) * 2
    for tile, four in product((False, True), (False, True)):
        out = outputs(poisoned, x.shape, amaxes, tile)
        job = Nvfp4Job(x.to(device), **out)
        (cuda_fp4.cast_nvfp4_tile if tile else cuda_fp4.cast_nvfp4)(job, four_over_six=four)
        check(out, x, amaxes, f"amax {value}", tile=tile, four=four)


@pytest.mark.parametrize("by_chance", [False, True], ids=["nearest", "chance"])
def test_every_neighbourhood_of_the_grid(device, poisoned, by_chance):
    """Casts of values at, directly below and directly above all grid points and midpoints, with a scale of one."""
    points = torch.arange(0, 6.51, 0.125)
    bits = points.view(torch.int32)[:, None] + torch.arange(-8, 8, dtype=torch.int32)
    row = bits.clamp(min=0).view(torch.float32).flatten()
    row = torch.cat([row, -row])
    x = row[: len(row) // 240 * 240].view(-1, 15)
    # Every block has the amax 6; with a tensor amax of 2688 its scale is 1
    x = torch.cat([torch.full((len(x), 1), 6.0), x], 1)
    x = torch.cat([x, torch.full((-len(x) % 16, 16), 2688.0)]).repeat(1, 2)
    x[-1, 0] = 2688.0
    amaxes = (torch.tensor(2688.0),) * 2
    drawn, given = (draws("cpu"), draws(device)) if by_chance else ((None, None), (None, None))
    out = outputs(poisoned, x.shape, amaxes)
    cuda_fp4.cast_nvfp4(Nvfp4Job(x.to(device), **out), draws=given)
    check(out, x, amaxes, "grid", drawn=drawn)


@pytest.mark.parametrize("amax", [129, 147, 168, 210, 252])
def test_products_are_rounded_before_the_grid(device, poisoned, amax):
    """The kernel rounds x * scale to fp32 before it rounds to the grid. With these amaxes hundreds of exact products
    are so close to the midpoint of two grid points that the first rounding decides the code."""
    x = (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * amax / 3).clamp(-amax, amax).bfloat16()
    x[0, 0] = amax
    amaxes = observed(x, False)
    out = outputs(poisoned, x.shape, amaxes)
    cuda_fp4.cast_nvfp4(Nvfp4Job(x.to(device), **out))
    check(out, x, amaxes, f"amax {amax}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_tiles_are_the_reference(device, poisoned, dtype, data):
    for shape, stride in product(SHAPES, STRIDES):
        x = values(data, *shape, dtype)
        amaxes = observed(x, False)
        out = outputs(poisoned, shape, amaxes, True)
        cuda_fp4.cast_nvfp4_tile(Nvfp4Job(place(x, stride, device), **out))
        check(out, x, amaxes, f"{data} {dtype} {shape} {stride}", tile=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
def test_tiles_in_one_orientation(device, poisoned, wanted):
    x = values("gauss", 304, 208, torch.bfloat16)
    amaxes = observed(x, False)
    out = outputs(poisoned, x.shape, amaxes, True, wanted)
    cuda_fp4.cast_nvfp4_tile(Nvfp4Job(x.to(device), **out))
    check(out, x, amaxes, "one orientation", tile=True)


@pytest.mark.parametrize("tile", [False, True])
def test_unaligned_outputs(device, poisoned, tile):
    x = values("gauss", 160, 288, torch.bfloat16)
    amaxes = observed(x, False)
    for offset in (1, 8):
        out = outputs(poisoned, x.shape, amaxes, tile, offset=offset)
        job = Nvfp4Job(x.to(device), **out)
        (cuda_fp4.cast_nvfp4_tile if tile else cuda_fp4.cast_nvfp4)(job)
        check(out, x, amaxes, f"offset {offset}", tile=tile)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [False, True])
def test_batch_is_each_alone(device, poisoned, dtype, tile):
    matrices = [values("gauss", *shape, dtype, seed) for seed, shape in enumerate([*SHAPES, (320, 544), (32, 2048)])]
    outs = [outputs(poisoned, x.shape, observed(x, False), tile) for x in matrices]
    jobs = [Nvfp4Job(place(x, STRIDES[i % 3], device), **outs[i]) for i, x in enumerate(matrices)]
    for four in (False, True):
        cuda_fp4.cast_nvfp4_batch(jobs, tile=tile, four_over_six=four)()
        for i, x in enumerate(matrices):
            check(outs[i], x, observed(x, False), f"job {i}", tile=tile, four=four)


@pytest.mark.needs_gpu
def test_what_an_nvfp4_cast_refuses(device):
    x = torch.zeros(16, 24, device=device)
    codes = torch.zeros(16, 12, dtype=torch.uint8, device=device)
    scale = torch.zeros(16, 1, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"blocks of 1x16; got \[16, 24\]"):
        cuda_fp4.cast_nvfp4(Nvfp4Job(x, codes, scale, x[0, 0]))
    with pytest.raises(ValueError, match="codes, scale and amax of an orientation together"):
        cuda_fp4.cast_nvfp4(Nvfp4Job(x, codes))
    with pytest.raises(ValueError, match="needs a multiple of 16 rows; got 8"):
        cuda_fp4.amax_rht(x[:8], torch.zeros(2, device=device))
    with pytest.raises(ValueError, match="int64 .* counter on cuda"):
        cuda_fp4.cast_nvfp4(Nvfp4Job(x), draws=draws("cpu"))
