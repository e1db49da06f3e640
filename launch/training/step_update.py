"""Update of a step: gradient norm, clipping and the optimizer step, which is skipped if the norm is a spike.

    spike     norm > [train] skip_spikes x median of the last 100 norms without spikes, once 20 norms are known
    limit     5 skipped steps in a row; the sixth step is applied and clipped: the norm has moved

All decisions are made on the device, by numbers with equal bits on all ranks, so the host never waits. Norms are saved with a
checkpoint, so that a resumed run skips the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launch.config.sections import Train
from launch.training.gradient_norm import GradientNorm

WINDOW = 100  # number of norms for the median
KNOWN = 20  # minimum number of norms
IN_A_ROW = 5


class SpikeFilter:
    """Detector of spikes. `factor`: multiple of the median above which a norm is a spike; 0: never."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self._factor = factor
        self.norms = torch.full((WINDOW,), torch.nan, device=device)  # a ring
        self.taken = torch.zeros(1, dtype=torch.int64, device=device)  # number of norms so far
        self.in_a_row = torch.zeros(1, dtype=torch.int64, device=device)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves and loading overwrites."""
        return {"norms": self.norms, "taken": self.taken, "in_a_row": self.in_a_row} if self._factor else {}

    def __call__(self, norm: Tensor, known_bad: bool = False) -> tuple[Tensor, Tensor]:
        """Return the largest norm that is not a spike, fp32 [], and whether the update is skipped, bool []: if the norm is a
        spike, or `known_bad`. The window takes no norm that is known to be bad."""
        if not self._factor:
            return torch.full_like(norm, torch.inf), torch.full_like(norm, known_bad, dtype=torch.bool)
        middle = (self.taken.clamp(max=WINDOW) - 1).clamp(min=0) // 2
        # Norms that are not known yet are NaN, which sorts last
        limit = self._factor * self.norms.sort().values.gather(0, middle)
        limit = torch.where(self.taken >= KNOWN, limit, torch.inf)
        if known_bad:
            return limit[0], torch.ones_like(limit[0], dtype=torch.bool)
        spike = norm > limit
        skips = spike & (self.in_a_row < IN_A_ROW)
        place = self.taken % WINDOW
        kept = torch.where(skips | ~norm.isfinite(), self.norms.gather(0, place), norm)
        self.norms.scatter_(0, place, kept)
        self.taken += (~skips & norm.isfinite()).long()
        self.in_a_row.copy_(torch.where(spike, self.in_a_row + 1, 0))
        return limit[0], skips[0]


class Update:
    """Update of a model whose gradients are complete."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, train: Train, device: torch.device) -> None:
        self._optimizer, self._clip = optimizer, train.clip
        self._norm = GradientNorm(model.parameters(), train.invariant)
        self.spikes = SpikeFilter(train.skip_spikes, device)

    def __call__(self, skip: bool = False) -> Tensor:
        """Clip by the global norm and run the optimizer step, which divides gradients by `grad_scale` and does nothing
        if `found_inf` is set. `skip`: skip the step in any case.

        Returns fp32 [3]: the norm before clipping, the limit above which a norm is a spike, and whether the step was
        skipped because of a spike or `skip`.
        """
        optimizer, norm = self._optimizer, self._norm()
        limit, skips = self.spikes(norm, known_bad=skip)
        optimizer.grad_scale = ((norm + 1e-6) / self._clip).clamp(min=1.0)  # type: ignore[attr-defined]
        optimizer.found_inf = (~torch.isfinite(norm) | skips).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([norm, limit, skips.float()])
