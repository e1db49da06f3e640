"""Quantizing shards and gathering the parts equals quantizing the unsharded tensor, for every quantizer, along both
dimensions.

No ranks: the gather is a concatenation according to the declarations of the parts.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlp.quant.fp8 import CurrentScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Quantizer
from dlp.quant.tensor import QuantizedTensor
from tests.metrics import assert_bit_equal, relative_error
from tests.quantizers import SEEDS, a_slot, assert_same, every_quantizer, matrix, origin, quantize


def cast_shards(quantizer: Quantizer, shards: list[Tensor], x: Tensor, dim: int) -> list[QuantizedTensor]:
    """Cast each shard separately. If `reduces` requires an agreement of ranks, all shards use the maximum of their
    amaxes."""
    observed = [quantizer.observe(shard) for shard in shards]
    if dim in quantizer.reduces:
        observed = [o if o is None else torch.stack([p for p in observed if p is not None]).amax(0) for o in observed]
    starts = [sum(shard.shape[dim] for shard in shards[:i]) for i in range(len(shards))]
    return [
        quantizer.cast(shard, amax, slot=a_slot(), at=origin(x, *((start, 0) if dim == 0 else (0, start))))
        for shard, amax, start in zip(shards, observed, starts, strict=True)
    ]


def gathered(shards: list[QuantizedTensor], dim: int) -> QuantizedTensor:
    """Concatenate the parts of all shards as their declarations say for a gather along `dim`. A part that is not gathered
    must be equal in all shards."""
    fmt = shards[0].format
    parts = []
    for i, part in enumerate(fmt.parts):
        along = part.moves_along(dim)
        pieces = [shard.parts[i] for shard in shards]
        for piece in pieces[1:] if along is None else []:
            assert_bit_equal(piece, pieces[0], f"shared {part.name}")
        parts.append(pieces[0] if along is None else torch.cat(pieces, along))
    return fmt.wrap(parts)


@every_quantizer
@pytest.mark.parametrize("dim", [0, 1])
@given(seed=SEEDS, ranks=st.sampled_from([2, 4]), size=st.sampled_from([128, 96, 48, 40]), empty=st.booleans())
def test_quantized_shards_concatenate_to_the_quantized_whole(
    quantizer: Quantizer, dim: int, seed: int, ranks: int, size: int, empty: bool
):
    """gather(quantize(shards)) == quantize(concat(shards)), with amaxes that differ by rank and, if `empty`, a shard of
    zeros."""
    if not quantizer.format.concatenates(dim, size):
        assert size % 128  # complete blocks can always be concatenated
        return
    x = matrix(seed, *((ranks * size, 64) if dim == 0 else (64, ranks * size)))
    x = x * torch.linspace(0, 8, ranks * size).exp2().unsqueeze(1 - dim).bfloat16()
    shards = list(x.split(size, dim))
    if empty:
        shards[1] = torch.zeros_like(shards[1])
        x = torch.cat(shards, dim)
    if any(extent % multiple for extent, multiple in zip(x.shape, quantizer.format.multiple, strict=True)):
        return
    assert_same(gathered(cast_shards(quantizer, shards, x, dim), dim), quantize(quantizer, x))


def test_where_shards_concatenate():
    """Check which formats can be gathered quantized, by the dimension and size of the shards."""
    block, tile, mx, fp4 = (q.format for q in (BlockScaling(), BlockScaling(tile=True), MxScaling(), Nvfp4Scaling()))
    assert all(fmt.concatenates(0, 5) for fmt in (block, mx, fp4, RowwiseScaling().format, CurrentScaling().format))
    assert all(fmt.concatenates(1, 5) for fmt in (RowwiseScaling().format, CurrentScaling().format))
    sizes = {block: 128, mx: 32, fp4: 16}
    assert all(fmt.concatenates(1, size) and not fmt.concatenates(1, size - 8) for fmt, size in sizes.items())
    assert tile.concatenates(0, 128) and not tile.concatenates(0, 64) and not tile.concatenates(1, 64)


def test_forgetting_to_agree_is_noticed():
    """The test of shards can fail: without the agreement, a per-tensor operand has large errors."""
    x = matrix(5, 64, 64)
    x[32:] *= 100
    quantizer = CurrentScaling()
    alone = [quantizer.cast(shard, quantizer.observe(shard)) for shard in x.split(32)]
    wrong = quantizer.format.wrap([torch.cat([q.payload for q in alone]), alone[0].parts[1]])
    assert relative_error(wrong.dequantize(), x.float()) > 0.5
    assert relative_error(quantize(quantizer, x).dequantize(), x.float()) < 0.04
