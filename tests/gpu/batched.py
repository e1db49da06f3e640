"""Check that a batch of casts has the bits of casts that are launched one by one, also if amaxes are increased between
observation and cast, as by an agreement of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlp.quant.fp8 import CurrentScaling, DelayedScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import ScaleSlot, one_read
from tests.gpu.inputs import values
from tests.metrics import assert_bit_equal

BATCHED: list[Any] = [
    CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling(tile=True), BlockScaling(power_of_two=False),
    MxScaling(), MxScaling(tile=True), Nvfp4Scaling(), Nvfp4Scaling(tile=True),
]  # fmt: skip
SIZES = [(96, 160), (32, 32), (288, 64)]
# For each matrix: whether the rowwise and the columnwise operand are cast
WANTED = [(True, True), (True, False), (False, True)]


def slot(device: str) -> ScaleSlot:
    return ScaleSlot(torch.tensor(3.0, device=device), torch.zeros((), device=device))


def _cast(quantizer: Any, x: Tensor, wanted: tuple[bool, bool], raised: float, slot: ScaleSlot) -> tuple[Any, Any]:
    """Cast x, x.t() or both, according to `wanted`, with `raised` times the observed amaxes."""

    def more(amax: Tensor | None) -> Tensor | None:
        return None if amax is None else amax * raised

    if all(wanted):
        both = one_read(quantizer, quantizer)
        return both.cast(x, tuple(more(amax) for amax in both.observe(x)), slot=slot)
    x, turned = (x, False) if wanted[0] else (x.t(), True)
    made = quantizer.cast(x, more(quantizer.observe(x)), slot=slot)
    return (None, made) if turned else (made, None)


def check_batch(quantizer: Any, dtype: torch.dtype, device: str) -> None:
    """Cast a batch twice, the second time with other values and increased amaxes, and compare both results with separate
    casts."""
    xs = [values("gauss", *size, dtype, seed).to(device) for seed, size in enumerate(SIZES)]
    outs = [
        _cast(quantizer, torch.zeros_like(x), asked, 1.0, slot(device)) for x, asked in zip(xs, WANTED, strict=True)
    ]
    slots = [slot(device) for _ in xs]
    launches = quantizer.batch(xs, outs, slots, [None] * len(xs))
    for raised in (1.0, 1.5):
        for launch in launches.observe:
            launch()
        for amax in {id(amax): amax for both in launches.amaxes for amax in both if amax is not None}.values():
            amax.mul_(raised)
        for launch in launches.cast:
            launch()
        for i, (x, asked) in enumerate(zip(xs, WANTED, strict=True)):
            own = slot(device)
            for made, expected in zip(outs[i], _cast(quantizer, x, asked, raised, own), strict=True):
                assert (made is None) == (expected is None)
                for left, right in zip(made.parts if made else (), expected.parts if expected else (), strict=True):
                    assert_bit_equal(left.cpu(), right.cpu(), f"matrix {i}, amaxes x {raised}")
            if raised == 1.0:
                assert_bit_equal(slots[i].staging.cpu(), own.staging.cpu(), f"staging of matrix {i}")
        for x in xs:
            x.mul_(-0.5)
