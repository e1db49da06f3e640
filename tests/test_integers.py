"""Int format: stored codes equal the results of the affine primitives bit by bit, and operands of pieces of a matrix
can be concatenated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import dlp
from dlp.quant import affine
from dlp.quant.integers import Int, IntScaling, pack, pack_bits, unpack, unpack_bits
from dlp.quant.tensor import SHARED
from dlp.testing import check_format
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.quantizers import EXPONENTS, SEEDS, matrix, quantize

KINDS = [
    IntScaling(), IntScaling(narrow=True), IntScaling(symmetric=False), IntScaling(4, 32), IntScaling(4, 32, symmetric=False),
    IntScaling(2, 16), IntScaling(3, 16, symmetric=False), IntScaling(6, 32),
]  # fmt: skip
every_kind = pytest.mark.parametrize("quantizer", KINDS, ids=str)


def test_codes_lie_from_the_lowest_bits_up():
    """Compare with bytes computed by hand: each code minus the smallest code is stored, from the lowest bit up, without
    gaps."""
    codes = torch.tensor([[-2, 1, 0, -1, -1, -2, 1, 0]], dtype=torch.int8)
    assert pack(codes, 2).tolist() == [[0b01_10_11_00, 0b10_11_00_01]]
    assert pack(codes, 3).tolist() == [[0b00_101_010, 0b0_011_011_1, 0b100_101_01]]
    assert pack(codes, 4).tolist() == [[0x96, 0x78, 0x67, 0x89]]
    assert pack(codes, 8) is codes and pack(codes, 4).dtype == torch.uint8


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_are_unpacked_at_every_size(bits: int):
    """The test uses sizes 0, 1, 2 and sizes around complete bytes, words and groups, and compares bit by bit with a
    stream of bits."""
    low, high = affine.code_range(bits)
    for size in (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 129):
        codes = torch.randint(low, high + 1, (3, size), generator=torch.Generator().manual_seed(size)).to(torch.int8)
        codes[:, :2] = torch.tensor([low, high], dtype=torch.int8)[:size]
        stored = pack_bits(codes, bits)
        assert stored.shape == (3, -(-size * bits // 8)) and stored.dtype == torch.uint8
        assert torch.equal(unpack_bits(stored, bits, size), codes)
        for row, expected in zip(stored.tolist(), codes.tolist(), strict=True):
            assert int.from_bytes(bytes(row), "little") == sum(
                (code - low) << (i * bits) for i, code in enumerate(expected)
            )


@pytest.mark.parametrize("bits", range(2, 9))
def test_files_of_weights_have_the_size_of_their_bits(bits: int, tmp_path: Path):
    """256 x 512 weights in groups of 32 take bits / 8 bytes per code, and 4 bytes of scale per group."""
    layer = nn.Linear(512, 256, bias=False).bfloat16()
    model = dlp.quantize_(nn.Sequential(layer), {"name": "qat", "weight": f"int{bits} group 32"})
    state = dlp.quantized_state_dict(model)
    assert state["0.weight.codes"].nbytes == 256 * 512 * bits // 8
    torch.save(state, tmp_path / "codes.pt")
    written = (tmp_path / "codes.pt").stat().st_size
    assert 0 < written - (256 * 512 * bits // 8 + 256 * 16 * 4) < 4096, written
    again = dlp.quantize_(
        nn.Sequential(nn.Linear(512, 256, bias=False).bfloat16()), dlp.recipe("qat", weight=f"int{bits} group 32")
    )
    dlp.load_quantized_state_dict(again, torch.load(tmp_path / "codes.pt", weights_only=True))
    x = torch.randn(4, 512).bfloat16()
    assert torch.equal(again(x), model(x))


def test_known_values_have_known_parts():
    x = torch.tensor([[-4.0, 1.0, 0.0, 2.5], [0.0, 1.0, 3.0, 0.5]]).repeat(1, 2)  # eight codes fill three bytes
    narrow = quantize(IntScaling(3, narrow=True), x)  # codes -3..3, steps of 4/3 and 1, halves to even
    assert unpack(narrow.parts[0], 3).tolist() == [[-3, 1, 0, 2] * 2, [0, 1, 3, 0] * 2]
    assert_bit_equal(narrow.parts[1], torch.tensor([4.0, 3.0]) / 3)
    wide = quantize(IntScaling(3, symmetric=False), x)  # codes -4..3, steps of 6.5/7 and 3/7
    assert unpack(wide.parts[0], 3).tolist() == [[-4, 1, 0, 3] * 2, [-4, -2, 3, -3] * 2]
    assert wide.parts[2].tolist() == [0, -4] and wide.parts[2].dtype == torch.int8
    assert_bit_equal(wide.parts[1], torch.tensor([6.5, 3.0]) / 7)


@every_kind
@given(seed=SEEDS, exponent=EXPONENTS)
def test_parts_are_what_the_primitives_give(quantizer: IntScaling, seed: int, exponent: int):
    x = matrix(seed, 16, 96, exponent)
    fmt, block, values = quantizer.format, (1, quantizer.group or 96), x.float()
    scale, zero = affine.choose_qparams_affine(
        values, block, quantizer.codes, symmetric=quantizer.symmetric, zero_point_dtype=torch.int8
    )
    codes = affine.quantize_affine(values, block, scale, zero, quantizer.codes)
    q = quantize(quantizer, x)
    assert torch.equal(unpack(q.parts[0], fmt.bits), codes)
    assert fmt.nbytes((16, 96), x.dtype) == sum(part.nbytes for part in q.parts)
    assert_bit_equal(q.parts[1].reshape(scale.shape), scale)
    assert_bit_equal(q.dequantize(), affine.dequantize_affine(codes, block, scale, zero))
    assert quantizer.symmetric or torch.equal(q.parts[2].reshape(zero.shape), zero)


@every_kind
def test_the_suites_of_formats(quantizer: IntScaling):
    check_format(quantizer, compiles=quantizer == KINDS[-2])
    assert type(quantizer.format) in torch.serialization.get_safe_globals()


def on_ranks(quantizer: Any) -> None:
    check_format(quantizer, mesh=worker.mesh(tp=2)["tp"], device=worker.device(), compiles=False)


@pytest.mark.ranks(2)
def test_the_suites_of_formats_over_ranks(ranks):
    for quantizer in (IntScaling(symmetric=False), IntScaling(4, 32, symmetric=False)):
        ranks(2).run(on_ranks, quantizer)


@pytest.mark.parametrize("quantizer", [IntScaling(), IntScaling(symmetric=False)], ids=str)
def test_what_pieces_of_a_contraction_observe_is_agreed_by_maximum(quantizer: IntScaling):
    """Ranks compare amaxes as bits (csrc/transport.cu), as if the numbers were unsigned integers."""
    x = matrix(0, 16, 96) + 1
    x[0, :48], x[1, :48], x[1, 48:], x[2, :48], x[2, 48:] = 0, 3, -2, -3, 2
    halves = x.chunk(2, 1)
    bits = [quantizer.observe(half).view(torch.int32).long() & 0xFFFFFFFF for half in halves]
    agreed = torch.maximum(*bits).int().view(torch.float32)
    assert_bit_equal(agreed, quantizer.observe(x))
    assert agreed.shape == ((16,) if quantizer.symmetric else (2, 16)) and agreed.dtype == torch.float32
    whole = quantize(quantizer, x)
    made = [quantizer.cast(half, agreed) for half in halves]
    assert torch.equal(torch.cat([each.payload for each in made], 1), whole.payload)
    assert all(torch.equal(each.parts[-1], whole.parts[-1]) for each in made)
    assert quantizer.format.moves[1][1:] == [SHARED] * (len(whole.parts) - 1)


@every_kind
def test_what_is_not_finite_stays_so_and_empty_shards_are_quantized(quantizer: IntScaling):
    x = matrix(0, 4, 96, dtype=torch.float32)
    x[0, 3], x[1, 5], x[2] = torch.inf, torch.nan, 0
    decoded: Tensor = quantize(quantizer, x).dequantize()
    first = slice(0, quantizer.group or 96)
    assert not decoded[:2, first].isfinite().any() and decoded[2:].isfinite().all() and not decoded[2].any()
    for shape in ((0, 96), (4, 0)):
        q = quantize(quantizer, torch.zeros(shape))
        assert q.dequantize().shape == shape
        assert [part.shape for part in q.parts] == [torch.Size(size) for size in quantizer.format.part_shapes(shape)]


def test_narrow_codes_are_odd_and_landmarks_are_one_and_the_largest():
    x = matrix(0, 8, 64)
    assert torch.equal(quantize(IntScaling(narrow=True), -x).payload, -quantize(IntScaling(narrow=True), x).payload)
    assert (Int().landmarks, Int(4).landmarks, Int(2).landmarks) == ((1, 127), (0x99, 0xFF), (0xFF, 0xFF))
    assert Int(symmetric=False).landmarks is Int(3).landmarks is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int(9), "integers of 9 bits are not supported: choose 2 to 8 bits"),
        (lambda: Int(1), "integers of 1 bits are not supported"),
        (lambda: Int(4, -1), "group must be a positive number of codes, or 0 for one scale per row; got -1"),
        (lambda: IntScaling(symmetric=False, narrow=True), "narrow codes need symmetric scales"),
        (lambda: IntScaling(4, 48).cast(torch.zeros(2, 64), None), "contraction size that is a multiple of 48; got 64"),
        (
            lambda: IntScaling(3).cast(torch.zeros(2, 63), torch.ones(2)),
            "contraction size that is a multiple of 8; got 63",
        ),
    ],
)
def test_what_has_no_format_is_refused(make: Any, said: str):
    with pytest.raises(ValueError, match=said):
        make()
