"""Observing and casting both gradients of a gated activation together gives the bits of separate casts, with the
reference and with emulated kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.producers import GATE_GRADS
from dlp.kernels import gate_grads, ops
from dlp.quant.fp8 import CurrentScaling, DelayedScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.quantizer import ScaleSlot
from tests.emulated import emulated  # noqa: F401
from tests.metrics import assert_bit_equal

QUANTIZERS = [CurrentScaling("e5m2"), DelayedScaling("e5m2"), BlockScaling(), BlockScaling("e5m2", power_of_two=False)]
Made = tuple[list[torch.Tensor], list[torch.Tensor]]  # parts of the operands; amaxes and flags


def gradients(act: str, rows: int) -> ops.GatedGrads:
    generator = torch.Generator().manual_seed(0)
    dh, gate, up = (torch.randn(rows, 256, generator=generator).bfloat16() for _ in range(3))
    return ops.GatedGrads(dh, gate, 3 * up, act)


def beside() -> tuple[list[ScaleSlot], list[torch.Tensor]]:
    slots = [ScaleSlot(torch.tensor(scale), torch.zeros(())) for scale in (2.0, 8.0)]
    return slots, [torch.zeros(()) for _ in range(2)]


def together(quantizer: Any, act: str, rows: int) -> Made:
    slots, flags = beside()
    grads = gradients(act, rows)
    made = quantizer.both_grads(grads, quantizer.observe_grads(grads), slots, flags)
    return [part for both in made for q in both for part in q.parts], [*flags, *(slot.staging for slot in slots)]


def one_by_one(quantizer: Any, act: str, rows: int) -> Made:
    slots, flags = beside()
    grads, parts = gradients(act, rows), list[torch.Tensor]()
    for which, (slot, flag) in enumerate(zip(slots, flags, strict=True)):
        x = ops.stored(ops.GatedGrad(grads, which))
        amaxes = quantizer.observe_both(x, quantizer)
        parts += [p for q in quantizer.both(x, amaxes, columnwise=quantizer, slot=slot, flag=flag) for p in q.parts]
    return parts, [*flags, *(slot.staging for slot in slots)]


def check(quantizer: Any, act: str, rows: int) -> None:
    for made, expected in zip(together(quantizer, act, rows), one_by_one(quantizer, act, rows), strict=True):
        for i, (a, b) in enumerate(zip(made, expected, strict=True)):
            assert_bit_equal(a.contiguous(), b.contiguous(), f"{quantizer} {act} {i}")


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_together_they_have_the_bits_of_one_after_the_other(quantizer, act):
    for rows in (128, 96):
        check(quantizer, act, rows)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_so_they_have_by_kernels(quantizer, act):
    for rows in (128, 96):
        check(quantizer, act, rows)


def test_the_benchmark_compares_what_is_equal():
    x = torch.randn(256, 128).bfloat16()
    for name in (name for name in GATE_GRADS if name.endswith("fused")):
        made = []
        for each in (name, name.replace("fused", "apart")):
            torch.manual_seed(0)
            made.append(GATE_GRADS[each](x).run())
        for a, b in zip(*made, strict=True):
            assert_bit_equal(a.contiguous(), b.contiguous(), name)


@pytest.mark.usefixtures("emulated")
def test_an_activation_may_be_called_by_name_where_kernels_run():
    x = torch.randn(8, 16).bfloat16()
    assert_bit_equal(ops.gated(x, x, name="gelu"), ops.gated(x, x, "gelu"))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("rows", "cols", "takes"), [(128, 256, True), (0, 256, False), (128, 0, False), (96, 256, False)]
)
def test_the_kernels_take_whole_tiles_and_at_least_one(rows, cols, takes):
    """Kernels run only for at least one complete tile, because a CUDA launch without thread blocks is an error."""
    grads = ops.GatedGrads(*(torch.zeros(rows, 256).bfloat16()[:, :cols] for _ in range(3)), "silu")
    assert gate_grads.takes_gate_grads(grads) == takes
