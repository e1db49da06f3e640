"""Every cast compared with the numpy implementation: all 65,536 bf16 values, a million random fp32 values, and all grid
points and midpoints with their neighbours; and quantizers on the same values in blocks. No ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.reference import philox_4x32
from dlp.quant.fp8 import ELEMENTS
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Origin
from tests import table_method as table


def all_bf16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random_fp32(count: int = 1_000_000) -> Tensor:
    """Return fp32 values of which half are random bit patterns, and half are in the range of the formats' grids."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator, dtype=torch.int64)
    scale = torch.exp2(torch.randint(-20, 20, (count // 2,), generator=generator).float())
    return torch.cat(
        [patterns.to(torch.int32).view(torch.float32), torch.randn(count // 2, generator=generator) * scale]
    )


def near_the_grid(element: str) -> Tensor:
    """Return the grid points of a format and the midpoints between them, the two fp32 neighbours of each of these
    values, and the negatives of all values."""
    points = table.POINTS[element]
    exact = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    around = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    values = torch.from_numpy(np.concatenate(around))
    return torch.cat([values, -values])


SWEEPS = {"bf16": lambda element: all_bf16().float(), "fp32": lambda element: random_fp32(), "grid": near_the_grid}


def assert_codes(got: Tensor, expected: np.ndarray, x: Tensor) -> None:
    wrong = np.flatnonzero(got.view(torch.uint8).numpy().ravel() != expected.ravel())
    assert wrong.size == 0, f"{wrong.size} codes differ, first at x = {x.flatten()[wrong[0]].item()!r}"


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_fp8_cast(element: str, sweep: str):
    x = SWEEPS[sweep](element)
    codes = ops.encode_fp8(x, ELEMENTS[element])
    assert_codes(codes, table.encode(x.numpy(), element), x)
    finite = ~torch.isnan(x)
    assert np.array_equal(
        ops.decode_fp8(codes)[finite].numpy(), table.decode(codes.view(torch.uint8)[finite].numpy(), element)
    )


@pytest.mark.parametrize("sweep", SWEEPS)
def test_e2m1_cast(sweep: str):
    x = SWEEPS[sweep]("e2m1")
    assert_codes(ops.encode_e2m1(x), table.encode(x.numpy(), "e2m1"), x)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_e2m1_stochastic_cast(sweep: str):
    x = SWEEPS[sweep]("e2m1")
    random = torch.randint(0, 256, x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    assert_codes(ops.encode_e2m1_stochastic(x, random), table.encode_stochastic(x.numpy(), random.numpy()), x)


def test_every_e2m1_byte_packs_and_decodes():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = ops.unpack_e2m1(packed)
    assert torch.equal(ops.pack_e2m1(codes), packed)
    assert np.array_equal(ops.decode_e2m1(packed).numpy(), table.decode(codes.numpy(), "e2m1"))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_scale_from_amax(element: str, power_of_two: bool, epsilon: float):
    amax = torch.cat([random_fp32(20_000), *([] if epsilon else [all_bf16().float()])]).abs()
    largest, flt_max = ops.FP8_MAX[ELEMENTS[element]], ops.FLT_MAX
    scale = ops.scale_from_amax(amax, largest, power_of_two=power_of_two, epsilon=epsilon)
    assert np.array_equal(scale.numpy(), table.scale_from_amax(amax.numpy(), largest, power_of_two, epsilon, flt_max))


@pytest.mark.parametrize(
    ("element", "kind"),
    [
        *itertools.product(ELEMENTS, ["all bf16"]),
        *[pytest.param(each, "all mantissas", marks=[pytest.mark.slow, *marks]) for each, marks in zip(
            ELEMENTS, ([], *[[pytest.mark.full]] * (len(ELEMENTS) - 1)), strict=True)],
    ],
)  # fmt: skip
def test_mx_scale_is_the_least_power_of_two_that_saturates_nothing(element: str, kind: str):
    amax = (
        all_bf16().float().abs()
        if kind == "all bf16"
        else (0x3F800000 + torch.arange(2**23, dtype=torch.int32)).view(torch.float32)
    )
    amax = amax[torch.isfinite(amax) & (amax > 0)].double()
    fraction, exponent = torch.frexp(amax / ops.FP8_MAX[ELEMENTS[element]])
    least = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, 127) + 127
    assert torch.equal(ops.mx_scale(amax.float(), ELEMENTS[element], "ceil").int(), least.int())


def test_constants_are_correctly_rounded():
    for value, bits in ((1 / 448, 0x3B124925), (1 / 57344, 0x37924925), (1 / 6, 0x3E2AAAAB)):
        assert (torch.ones(()) * value).view(torch.int32) == bits


def matrices(width: int) -> dict[str, Tensor]:
    """Return matrices of all bf16 values in order (blocks of one binade, of NaN, of Inf), of shuffled finite bf16 values,
    and of random values in fp32 and rounded to bf16. The first two have 4 * `width` columns."""
    ordered = all_bf16().view(-1, width * 4)
    finite = all_bf16()[torch.isfinite(all_bf16())]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(3))][
        : 65024 // (4 * width) * 4 * width
    ]
    normal = torch.randn(128, 1024, generator=torch.Generator().manual_seed(4))
    fp32 = normal * torch.exp2(torch.linspace(-30, 30, 128))[:, None]
    return {"ordered": ordered, "shuffled": shuffled.view(-1, width * 4), "fp32": fp32, "bf16": fp32.bfloat16()}


NAMES = ("ordered", "shuffled", "fp32", "bf16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("element", ELEMENTS)
def test_fp8_block(element: str, power_of_two: bool, name: str):
    x = matrices(128)[name]
    codes, scale_inv = BlockScaling(element, power_of_two=power_of_two).cast(x, None).parts
    expected = table.quantize_fp8_block(x.float().numpy(), element, power_of_two, torch.finfo(x.dtype).max)
    assert np.array_equal(scale_inv.numpy(), expected[1])
    assert_codes(codes, expected[0], x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mxfp8(element: str, name: str):
    x = matrices(32)[name]
    codes, scale = MxScaling(element).cast(x, None).parts
    expected = table.quantize_mxfp8(x.float().numpy(), element)
    assert np.array_equal(scale.numpy(), expected[1])
    assert_codes(codes, expected[0], x)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4(name: str, stochastic: bool):
    x = matrices(16)[name]
    quantizer = Nvfp4Scaling(stochastic=stochastic)
    at = Origin(0, 0, *x.shape, seed=5, tensor_id=6, counter=torch.tensor(7))
    random = ops.random_bytes(
        *x.shape, row=0, column=0, total_columns=x.shape[1], orientation=0, counter=at.counter, key=(5, 6)
    )
    for amax in (quantizer.observe(x), torch.tensor(3.0)):
        assert amax is not None
        codes, scale, _ = quantizer.cast(x, amax, at=at).parts
        bits = random.numpy() if stochastic else None
        expected = table.quantize_nvfp4(x.float().numpy(), amax.numpy(), bits)
        assert np.array_equal(scale.view(torch.uint8).numpy(), expected[1])
        assert_codes(ops.unpack_e2m1(codes), expected[0], x)


PHILOX_VECTORS = [  # known answers of Random123 for philox4x32-10: counter, key, output
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, output", PHILOX_VECTORS)
def test_philox(counter: list[int], key: list[int], output: list[int]):
    words = philox_4x32(tuple(torch.tensor([word]) for word in counter), (key[0], key[1]))
    assert [int(word) for word in words] == output


def test_random_bytes_are_keyed_as_documented():
    """Block j of row i has the counter words (i * blocks + j, 0, orientation, microbatch) and the key (seed, tensor id);
    `blocks` is the number of blocks of 16 columns in a row. Byte b of word w is the random number of element 4w + b."""
    got = ops.random_bytes(
        3, 32, row=5, column=16, total_columns=100, orientation=1, counter=torch.tensor(9), key=(11, 12)
    )
    for i in range(3):
        for j in range(2):
            block = (5 + i) * math.ceil(100 / 16) + 1 + j
            words = philox_4x32(tuple(torch.tensor(word) for word in (block, 0, 1, 9)), (11, 12))
            expected = [int(word) >> shift & 0xFF for word in words for shift in (0, 8, 16, 24)]
            assert got[i, 16 * j : 16 * j + 16].tolist() == expected
