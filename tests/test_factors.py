"""Constant factors of gradients, and values that must not change: a run with AdamW and clipping would not show errors
in these, because its loss decreases anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.comm.mapped import Transport
from dlp.comm.slots import AGREED, MAXIMA
from dlp.kernels import ops
from dlp.parallel.linear.modules import ColumnParallelLinear
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.integers import IntScaling
from dlp.quant.stats import StatsTable
from tests.metrics import assert_bit_equal
from tests.quantizers import quantize


def test_dgrads_of_siblings_are_summed_in_fp32():
    """In bf16 256 + 1 rounds to 256. The sum of the three dgrads is 258 only if it is not rounded after the second."""
    layer = ColumnParallelLinear(16, (16, 16, 16), recipe="bf16", dtype=torch.bfloat16)
    for weight, value in zip(layer.parameters(), (256.0, 1.0, 1.0), strict=True):
        torch.nn.init.constant_(weight, value)
    x = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(16, 16, dtype=torch.bfloat16)
    dy[:, 0] = 1
    torch.autograd.backward(layer(x), [dy] * 3)
    assert x.grad is not None and (x.grad == 258).all()


@pytest.mark.parametrize("shape", [(3, 5), (16, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_an_amax_leaves_its_input_as_it_is(shape: tuple[int, int], dtype: torch.dtype, dim: int | None):
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    amax = ops.amax(x, dim)
    assert_bit_equal(x, before)
    assert_bit_equal(amax, (before.abs().amax() if dim is None else before.abs().amax(dim)).float())


@pytest.mark.parametrize("quantizer", [IntScaling(epsilon=0.5), IntScaling(4, 16, epsilon=0.5)], ids=str)
def test_epsilon_is_the_least_step_of_integers(quantizer: IntScaling):
    x = torch.full((2, 16), 0.25)
    x[1] *= 1000
    steps = quantize(quantizer, x).parts[1].flatten()
    assert steps[0] == 0.5 and steps[1] > 0.5
    assert (quantize(IntScaling(quantizer.bits, quantizer.group), x).parts[1].flatten()[0] < 0.5).all()


def test_statistics_of_a_step_begin_at_zero():
    table = StatsTable(["x"], torch.device("cpu"))
    for size in (8.0, 2.0):
        x = torch.full((4, 4), size)
        table.record("x", x, quantize(CurrentScaling(), x))
        table.close()
        assert table.last[1][0, 0] == size, "the largest of this step"
        assert not table.sums.any() and not table.maxima.any()


class _Slot:
    """Stand-in for a slot: records the number of tensors of each agreement, and returns the amaxes plus 1 as the maxima
    of all ranks."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def agree(self, observed: Any, largest: Any, use: int) -> None:
        assert len(observed) == len(largest) <= AGREED and sum(each.numel() for each in observed) <= MAXIMA
        assert all(each.is_contiguous() for each in (*observed, *largest)), "the kernel gets addresses and sizes"
        self.launches.append(len(observed))
        for into, each in zip(largest, observed, strict=True):
            into.copy_(each + 1)


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [([3] * AGREED, [8]), ([3] * (AGREED + 1), [8, 1]), ([2] * 20, [8, 8, 4]), ([MAXIMA, 1, MAXIMA - 1, 1], [1, 2, 1])],
)
def test_an_agreement_of_many_tensors_skips_none(sizes: list[int], launches: list[int]):
    memory, slot = Transport.__new__(Transport), _Slot()
    memory.world = 2
    memory._slot = lambda *_: slot  # type: ignore[method-assign]
    memory._number = lambda _: 0  # type: ignore[method-assign]
    observed = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    memory.group = None  # type: ignore[assignment]
    agreed: list[Tensor] = memory.agree(observed)
    for i, value in enumerate(agreed):
        assert_bit_equal(value, torch.full((sizes[i],), float(i + 1)))
    assert slot.launches == launches
    turned = torch.arange(6.0).view(3, 2).t()
    assert_bit_equal(memory.agree([turned])[0], turned + 1)
