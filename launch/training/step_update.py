"""Update of a step: gradient norm, clipping and the optimizer step, which is skipped if the norm is a spike.

    spike     norm > [train] skip_spikes x median of the last 100 norms without spikes, after at least 20 norms
    limit     at most 5 steps in a row are skipped; a sixth spike in a row is clipped and applied, since the level of the
              norm has probably changed

All decisions are computed on the device from numbers that are bitwise equal on all ranks, so the host never waits. Checkpoints
contain the norms, so that a resumed run skips the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launch.config.sections import Train
from launch.training.gradient_norm import GradientNorm

WINDOW = 100  # number of norms from which the median is computed
KNOWN = 20  # number of norms from which on spikes are detected
IN_A_ROW = 5  # largest number of steps in a row that are skipped as spikes


class SpikeFilter:
    """Detector of spikes of the gradient norm. `factor`: multiple of the median above which a norm is a spike; 0: never."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self._factor = factor
        self.norms = torch.full((WINDOW,), torch.nan, device=device)  # ring buffer
        self.taken = torch.zeros(1, dtype=torch.int64, device=device)  # number of norms recorded so far
        self.in_a_row = torch.zeros(
            1, dtype=torch.int64, device=device
        )  # number of latest norms in a row that are spikes

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves; loading a checkpoint overwrites them. Empty if `factor` is 0."""
        return {"norms": self.norms, "taken": self.taken, "in_a_row": self.in_a_row} if self._factor else {}

    def __call__(self, norm: Tensor, known_bad: bool = False) -> tuple[Tensor, Tensor]:
        """Return the largest norm that is not a spike, fp32 [], and whether the update is skipped, bool [].

        norm: norm of this step, fp32 []. known_bad: skip the update in any case, and do not record the norm.
        """
        if not self._factor:
            return torch.full_like(norm, torch.inf), torch.full_like(norm, known_bad, dtype=torch.bool)
        middle = (self.taken.clamp(max=WINDOW) - 1).clamp(min=0) // 2
        # Unused entries of the ring buffer are NaN, which sorts last
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
    """Clipping and optimizer step of a model, called after the last backward of a step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, train: Train, device: torch.device) -> None:
        self._optimizer, self._clip = optimizer, train.clip
        self._norm = GradientNorm(model.parameters(), train.invariant)
        self.spikes = SpikeFilter(train.skip_spikes, device)

    def __call__(self, skip: bool = False) -> Tensor:
        """Clip by the global norm, run the optimizer step, and set gradients to None.

        The step is skipped, without waiting of the host, if the norm is not finite or a spike, or if `skip`. Returns fp32 [3]:
        the norm before clipping, the limit above which a norm is a spike, and 1 if the step was skipped because of a spike or
        `skip`.
        """
        optimizer, norm = self._optimizer, self._norm()
        limit, skips = self.spikes(norm, known_bad=skip)
        optimizer.grad_scale = ((norm + 1e-6) / self._clip).clamp(min=1.0)  # type: ignore[attr-defined]
        optimizer.found_inf = (~torch.isfinite(norm) | skips).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([norm, limit, skips.float()])
