"""torch's FlopCounterMode counts the FLOPs of the GEMMs that a linear runs on the local rank."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dlp
from tests import pool as worker


def counted(sequence_parallel: bool) -> tuple[int, int, int]:
    """Counted FLOPs of a column and a row layer on this rank: of a forward, of its backward, and of a backward whose
    forward ran without a counter."""
    tp = worker.mesh(tp=2)["tp"]
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "recipe": "fp8_current", "device": worker.device()}
    up, down = dlp.ColumnParallelLinear(64, (128, 64), **options), dlp.RowParallelLinear(128, 64, **options)
    x = torch.randn(32 // (2 if sequence_parallel else 1), 64, device=worker.device(), requires_grad=True)
    modes = [FlopCounterMode(display=False) for _ in range(3)]
    with modes[0]:
        y = down(up(x)[0])
    with modes[1]:
        y.sum().backward()
    y = down(up(x)[0])
    with modes[2]:
        y.sum().backward()
    return tuple(mode.get_total_flops() for mode in modes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_flops_are_those_of_the_gemms_of_a_rank(ranks, sequence_parallel):
    forward = 2 * 32 * 64 * (64 + 32) + 2 * 32 * 64 * 64
    used = 2 * 32 * 64 * 64 + 2 * 32 * 64 * 64  # the second sibling of `up` is not used, so it has no backward GEMMs
    assert ranks(2).run(counted, sequence_parallel) == [(forward, 2 * used, 2 * used)] * 2
