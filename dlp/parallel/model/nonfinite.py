"""What happens when a cast meets a NaN or Inf: the step boundary tells, one step late, so that nobody waits."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from dlp.parallel.model.flags import bad, first
from dlp.parallel.model.late import OnTheWay
from dlp.parallel.model.runtime import Runtime, runtime_of

ACTIONS = ("raise", "warn", "ignore")
LOG = logging.getLogger("dlp")


class Watch:
    """Reads the flags of a model at step boundaries. `action`: one of ACTIONS."""

    def __init__(self, runtime: Runtime, action: str) -> None:
        self._runtime, self._action = runtime, action
        self._coming: tuple[int, list[OnTheWay]] | None = None

    def close(self) -> None:
        """A step is over."""
        self._runtime.flags.close()

    def look(self) -> None:
        """After the boundary of a step: look at the flags of the one before. Raises FloatingPointError. Where the boundary
        is being captured nothing is read, as nothing could be in a replay."""
        if self._action == "ignore" or _capturing():
            return
        before, flags = self._coming, self._runtime.flags
        self._coming = self._runtime.steps, [OnTheWay(closed) for closed in flags.closed]
        if before is not None:
            step, coming = before
            self._tell(step, [flag for part in coming for flag in part.read()])

    def _tell(self, step: int, flags: list[float]) -> None:
        found = first(self._runtime.flags.names, flags, dist.get_rank() if dist.is_initialized() else 0)
        if found is None:
            return
        if self._action == "raise":
            raise FloatingPointError(f"step {step}: {found}; to go on after it, dlp.attach(..., on_nonfinite='warn')")
        LOG.warning("step %d: %s", step, found)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def not_finite(model: nn.Module) -> list[str]:
    """The tensors that held a NaN or Inf when this rank cast them, in the last step or since its boundary, such as
    "x of model.layers.3.mlp.up_proj", in the order of forward. Waits for the device. What is kept in high precision is not
    cast: it hands NaN and Inf on. ValueError before `convert` or `attach`."""
    flags = runtime_of(model).flags
    both = [flag for now, closed in zip(flags.now, flags.closed, strict=True) for flag in (now + closed).tolist()]
    return [str(name) for _, name in bad(flags.names, both)]
