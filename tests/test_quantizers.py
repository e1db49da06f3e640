"""Properties of every quantizer that hold for all values. No ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlp.kernels import ops
from dlp.kernels.reference import mx_from_block_scales
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.fp8_codes import ELEMENTS
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.integers import IntScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Quantizer, ScaleSlot, caps_of
from dlp.quant.recipe import load
from tests.metrics import assert_bit_equal, relative_error
from tests.quantizers import (
    EXPONENTS,
    PLAIN,
    QUANTIZERS,
    SEEDS,
    a_slot,
    assert_same,
    every_quantizer,
    matrix,
    origin,
    quantize,
)
from tests.refusals import refuses

# --- shapes, storage, orientation


@every_quantizer
def test_parts_have_the_shapes_and_dtypes_the_format_says(quantizer: Quantizer):
    x = matrix(0, 64, 96)
    q, storage = quantize(quantizer, x), quantizer.format.empty((64, 96), dtype=x.dtype, device=x.device)
    assert q.shape == (64, 96) and q.format == quantizer.format
    for part, shape, made, empty in zip(
        q.format.parts, q.format.part_shapes((64, 96)), q.parts, storage.parts, strict=True
    ):
        assert made.shape == empty.shape == torch.Size(shape)
        assert made.dtype == empty.dtype == (part.dtype or x.dtype)
    assert q.format.nbytes((64, 96), x.dtype) == sum(part.nbytes for part in q.parts)


@every_quantizer
def test_out_is_filled_and_returned(quantizer: Quantizer):
    x = matrix(1, 64, 96)
    out = quantizer.format.empty((64, 96), dtype=x.dtype, device=x.device)
    made = quantizer.cast(x, quantizer.observe(x), out=out, slot=a_slot(), at=origin(x))
    assert made is out
    assert_same(out, quantize(quantizer, x))


@every_quantizer
def test_fp64_is_cast_as_fp32(quantizer: Quantizer):
    x = matrix(2, 64, 96, dtype=torch.float32)
    single, double = quantize(quantizer, x), quantize(quantizer, x.double())
    if not quantizer.format.keeps_source:
        assert_same(double, single)


@every_quantizer
@given(seed=SEEDS, exponent=EXPONENTS)
def test_a_transposed_view_quantizes_like_its_copy(quantizer: Quantizer, seed: int, exponent: int):
    """The cast of a transposed view equals the cast of a contiguous copy, so rowwise(x.T) == columnwise(x)."""
    x = matrix(seed, 64, 32, exponent).t()
    assert_same(quantize(quantizer, x), quantize(quantizer, x.contiguous()))


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if q.format.transposable], ids=str)
@given(seed=SEEDS, exponent=EXPONENTS, rows=st.sampled_from([32, 96, 288]))
def test_transposing_equals_quantizing_the_transpose(quantizer: Quantizer, seed: int, exponent: int, rows: int):
    x = matrix(seed, rows, 160, exponent)
    q = quantize(quantizer, x)
    assert_same(q.transpose(), quantize(quantizer, x.t()))
    assert_same(q.transpose().transpose(), q)
    assert torch.equal(q.transpose().dequantize(), q.dequantize().t())


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if not q.format.transposable], ids=str)
def test_what_cannot_be_transposed_says_so(quantizer: Quantizer):
    with pytest.raises(ValueError, match="cannot be transposed: quantize the transposed tensor"):
        quantize(quantizer, matrix(0, 32, 32)).transpose()


# --- values


@every_quantizer
@given(seed=SEEDS, exponent=EXPONENTS)
def test_error_is_that_of_the_element_type(quantizer: Quantizer, seed: int, exponent: int):
    """The relative error is at most half a step of the FP8 element type (2^-4 for E4M3, 2^-3 for E5M2), 0 for formats
    that keep the values, and 0.25 for the other formats."""
    x = matrix(seed, 32, 128, max(exponent, 0) if getattr(quantizer, "epsilon", 0) else exponent)
    slot = ScaleSlot(ops.scale_from_amax(ops.amax(x), 448.0), torch.zeros(()))
    q = quantizer.cast(x, quantizer.observe(x), slot=slot, at=origin(x))
    source = ops.rht16(x) if q.format.basis else x
    if getattr(quantizer, "scale_rounding", "ceil") == "floor":
        return  # the largest values of a binade saturate
    bound = {"e4m3": 2**-4, "e5m2": 2**-3}.get(q.format.element, 0.0 if q.format.keeps_source else 0.25)
    assert relative_error(q.dequantize(), source.float()) <= bound


@pytest.mark.parametrize("quantizer", [q for q in PLAIN if q.format.bf16_exact] + [RowwiseScaling()], ids=str)
@given(seed=SEEDS, exponent=EXPONENTS)
def test_quantizing_what_was_quantized_changes_nothing(quantizer: Quantizer, seed: int, exponent: int):
    """With power-of-two scales, every decoded value is on the grid again."""
    once = quantize(quantizer, matrix(seed, 32, 64, exponent)).dequantize()
    assert torch.equal(quantize(quantizer, once).dequantize(), once)
    assert torch.equal(once.bfloat16().float(), once)


@pytest.mark.parametrize(
    "quantizer", [q for q in QUANTIZERS if not q.format.basis and not getattr(q, "stochastic", 0)], ids=str
)
@given(seed=SEEDS, exponent=EXPONENTS)
def test_rounding_is_monotonic_and_odd_within_a_block(quantizer: Quantizer, seed: int, exponent: int):
    block = matrix(seed, 1, 32, exponent).sort(dim=1).values
    x = block.expand(32, 32)  # every tile of every format has the same values
    narrow = torch.cat([x[:, :16], x[:, :16]], 1)  # the same block of 16 twice
    for values in (x, narrow) if quantizer.format.block[1] != 16 else (narrow,):
        decoded = quantize(quantizer, values).dequantize()
        assert (decoded[:, 1:16] >= decoded[:, :15]).all()
        assert torch.equal(quantize(quantizer, -values).dequantize(), -decoded)


@every_quantizer
@given(seed=SEEDS, exponent=st.integers(-140, 100))
def test_nothing_finite_becomes_nan_or_more_than_double(quantizer: Quantizer, seed: int, exponent: int):
    """Decoded values of a finite matrix are finite, and at most about twice its amax. The amaxes are at most FLT_MAX / 448,
    because for larger amaxes NVFP4 overflows in decoding by definition."""
    x = matrix(seed, 32, 32, exponent, torch.float32)
    slot = ScaleSlot(ops.scale_from_amax(ops.amax(x), 448.0), torch.zeros(()))
    q = quantizer.cast(x, quantizer.observe(x), slot=slot, at=origin(x))
    limit = 2.01 * ops.amax(ops.rht16(x) if q.format.basis else x)
    assert (q.dequantize().abs() <= limit).all()


@every_quantizer
def test_zeros_denormals_inf_and_nan(quantizer: Quantizer):
    zeros = torch.zeros(32, 32)
    assert torch.equal(quantize(quantizer, zeros).dequantize(), zeros)
    tiny = torch.full((32, 32), 1e-42)
    assert torch.isfinite(quantize(quantizer, tiny).dequantize()).all()
    if quantizer.format.keeps_source or quantizer.format.basis:
        return  # values are unchanged, or the transform spreads them over 16 elements
    odd = matrix(3, 64, 64, dtype=torch.float32)
    odd[0, 0], odd[63, 40] = torch.inf, torch.nan
    q = quantize(quantizer, odd)
    if isinstance(quantizer, IntScaling):  # integers have no code for NaN
        finite = q.dequantize().isfinite().all(1)
        assert not finite[0] and not finite[63] and finite[1:63].all()
        return
    codes = q.payload.view(torch.uint8)
    codes = ops.unpack_e2m1(codes) if q.format.elements_per_code == 2 else codes
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}.get(q.format.element, 0x7)
    poisons = getattr(quantizer, "scale_rounding", "ceil") == "floor"  # in OCP MX a NaN makes the complete block NaN
    assert codes[0, 0] == (0x7F if poisons else largest)
    assert codes[63, 40] == (0x7F if q.format.element else 0x7)


@given(seed=SEEDS, exponent=EXPONENTS)
def test_mxfp8_saturates_nothing_and_floor_does(seed: int, exponent: int):
    x = matrix(seed, 32, 64, exponent)
    for element, dtype in ELEMENTS.items():
        _, byte = MxScaling(element).cast(x, None).parts
        scaled = x.float().unflatten(1, (2, 32)) / ops.decode_e8m0(byte)[..., None]
        amax = scaled.abs().amax(-1)
        largest = ops.FP8_MAX[dtype]
        assert (amax <= largest).all() and ((amax > largest / 2) | (amax == 0)).all()
    saturated = torch.full((1, 32), 1.99)
    assert MxScaling(scale_rounding="floor").cast(saturated, None).dequantize().max() == 1.75
    assert MxScaling().cast(saturated, None).dequantize().max() == 2.0


# --- partial blocks


@pytest.mark.parametrize("tile", [False, True])
@given(seed=SEEDS, rows=st.integers(1, 200), columns=st.integers(1, 300))
def test_a_partial_fp8_block_is_one_filled_with_zeros(tile: bool, seed: int, rows: int, columns: int):
    quantizer, x = BlockScaling(tile=tile), matrix(seed, rows, columns)
    q = quantize(quantizer, x)
    whole = quantize(quantizer, torch.nn.functional.pad(x, (0, 300 - columns, 0, 200 - rows)))
    assert_bit_equal(q.payload, whole.payload[:rows, :columns].contiguous())
    down, across = q.parts[1].shape
    assert_bit_equal(q.parts[1], whole.parts[1][:down, :across].contiguous())
    assert torch.equal(q.dequantize(), whole.dequantize()[:rows, :columns])


@pytest.mark.parametrize(
    "quantizer, multiple", [(MxScaling(), 32), (Nvfp4Scaling(), 16), (Nvfp4Scaling(rht=True), 16)], ids=str
)
def test_a_partial_block_that_a_format_cannot_hold_is_refused(quantizer: Quantizer, multiple: int):
    x = matrix(0, 3, 100)
    with refuses(f"contraction size that is a multiple of {multiple}; got 100 in .3, 100.. Append"):
        quantizer.cast(x, torch.tensor(1.0))
    padded = quantizer.format.padded(x)
    assert padded.shape == (3, 100 + -100 % multiple) and quantizer.format.padded(padded) is padded
    assert torch.equal(padded[:, :100], x) and not padded[:, 100:].any()
    assert quantize(quantizer, padded).shape == padded.shape


@pytest.mark.parametrize("quantizer", [MxScaling(tile=True), Nvfp4Scaling(tile=True)], ids=str)
def test_tiles_need_whole_rows_of_tiles(quantizer: Quantizer):
    with pytest.raises(ValueError, match="rows size that is a multiple of"):
        quantizer.cast(matrix(0, 40, 64)[:36], torch.tensor(1.0))


@pytest.mark.parametrize(
    "quantizer", [CurrentScaling(), RowwiseScaling(), BlockScaling(), MxScaling(), Nvfp4Scaling()], ids=str
)
def test_an_empty_shard_is_quantized(quantizer: Quantizer):
    x = torch.zeros(0, 64)
    q = quantize(quantizer, x)
    assert q.shape == (0, 64) and q.dequantize().shape == (0, 64)
    assert [part.shape for part in q.parts] == [torch.Size(shape) for shape in q.format.part_shapes((0, 64))]


# --- layouts and slots


@given(rows=st.integers(1, 300), columns=st.integers(1, 20), seed=SEEDS)
def test_the_swizzle_is_its_formula(rows: int, columns: int, seed: int):
    scales = torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    tiles = ops.swizzle_128x4(scales)
    assert len(tiles) == -(-rows // 128) * -(-columns // 4) * 512
    assert (tiles != 0).sum() == scales.numel()
    r, c = rows - 1, columns - 1
    for row, column in ((0, 0), (r, c), (r, 0), (0, c), (rows // 2, columns // 2)):
        offset = (
            ((row // 128) * -(-columns // 4) + column // 4) * 512
            + (row % 32) * 16
            + ((row % 128) // 32) * 4
            + column % 4
        )
        assert tiles[offset] == scales[row, column]
    assert torch.equal(ops.unswizzle_128x4(tiles, rows, columns), scales)


@given(lines=st.integers(1, 300), each=st.sampled_from([16, 32, 128]), seed=SEEDS)
def test_lines_of_a_tile_share_its_scale(lines: int, each: int, seed: int):
    """A block-scaled GEMM reads one scale per row and block, so the scale of a tile is stored once for each of its
    `each` rows. `lines`: rows of the matrix; the last tile may be partial."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 256, (-(-lines // each), 6), generator=generator, dtype=torch.uint8)
    tiles = ops.swizzle_128x4(scales, lines, each)
    assert torch.equal(ops.unswizzle_128x4(tiles, lines, 6), scales[torch.arange(lines) // each])
    assert (tiles != 0).sum() == lines * 6


def test_power_of_two_scales_of_128_are_mx_scales_of_32():
    scale_inv = torch.tensor([[2.0**-127, 1.0, 2.0**127], [2.0**-126, 2.0**-3, 2.0**8]])
    byte = mx_from_block_scales(scale_inv, 300)
    assert byte.shape == (2, 10) and byte[0].tolist() == [0] * 4 + [127] * 4 + [254] * 2
    assert torch.equal(ops.decode_e8m0(byte), scale_inv.repeat_interleave(4, 1)[:, :10])


def test_a_delayed_cast_uses_the_slot_and_records_the_amax():
    quantizer = load("fp8_delayed").dy.rowwise
    assert caps_of(quantizer).slot is not None and caps_of(CurrentScaling()).slot is None
    slot = a_slot(4.0)
    slot.staging.fill_(0.5)
    x = torch.tensor([[1.0, -3.0, float("nan"), 0.1]])
    q = quantizer.cast(x, None, slot=slot)
    assert slot.staging == 3.0 and slot.scale == 4.0 and q.parts[1] == 0.25
    assert_bit_equal(q.payload, ops.encode_fp8(x * 4, torch.float8_e5m2))
    quantizer.cast(x * 0.1, None, slot=slot)
    assert slot.staging == 3.0, "several casts of a step merge by maximum"
    assert q.parts[1] == 0.25
