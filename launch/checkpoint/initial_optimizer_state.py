"""Zero states of an optimizer before its first step, into which a checkpoint is loaded."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from dlp.optim.encodings import AVERAGES
from dlp.optim.scaled import ScaledOptimizer


def make_state(optimizer: Optimizer) -> None:
    """Allocate the zero states that `optimizer` would allocate in its first step, so that a checkpoint can be loaded into
    them."""
    if isinstance(optimizer, ScaledOptimizer):
        optimizer.make_state()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **{name: torch.zeros_like(parameter) for name in AVERAGES}}
