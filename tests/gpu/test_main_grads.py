"""wgrad with beta = 1 in captured launches on a GPU: gradients have the bits of autograd's sums, except the gradients of
nvfp4 weights.

The nvfp4 GEMM multiplies its sums by alpha and adds them to the gradient with one rounding, but autograd rounds the
product before it adds.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dlp
from dlp.runtime.capture import CapturedLaunches
from tests.cases import BY_SCALES
from tests.metrics import assert_bit_equal, assert_close
from tests.paired_models import K, M, N, programs, values


@pytest.mark.parametrize("sizes", [N, (N, K)], ids=["alone", "siblings"])
@pytest.mark.parametrize("recipe", BY_SCALES)
def test_sums_have_autograds_bits(device: str, recipe: str, sizes: int | tuple[int, ...]):
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(K, sizes, recipe=recipe)).to(device)
    models = {mode: copy.deepcopy(model) for mode in ("off", "grad")}
    optimizers = {mode: torch.optim.SGD(each.parameters(), 0.1) for mode, each in models.items()}
    for mode, each in models.items():
        dlp.attach(each, optimizers[mode], main_grads=mode)
    for step in range(3):
        for each in models.values():
            for micro in range(4):
                ys = each(values(10 * step + micro, M, K).to(device).requires_grad_())
                ys = ys if isinstance(ys, tuple) else (ys,)
                torch.autograd.backward(ys, [values(micro + i, *y.shape).to(device) for i, y in enumerate(ys)])
        for (name, plain), added in zip(models["off"].named_parameters(), models["grad"].parameters(), strict=True):
            if recipe == "nvfp4" and "weight" in name:
                assert_close(added.grad, plain.grad, 1e-6, f"{name}, step {step}")
            else:
                assert_bit_equal(added.grad, plain.grad, f"{name}, step {step}")
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    found = [made for made in programs(models["grad"])["backward"] if isinstance(made, CapturedLaunches)]
    assert len(found) == 3, "with a gradient to add to, before the boundary casts weights and after, and without one"
