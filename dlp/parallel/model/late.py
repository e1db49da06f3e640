"""Numbers that the host reads later than they are made, so that it waits for nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class OnTheWay:
    """A few numbers, as they are now, that start for the host and are read later: `read` waits for them, and for nothing
    after them (`tensor.tolist()` would wait for all that was launched since)."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._host = numbers.clone()
        else:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> list[float]:
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
