"""One training step as a CUDA graph: captured once, replayed with new tokens.

Everything a step does on the device, forward, backward, clipping, the optimizer and the step boundary of the recipes, is
launched by one call instead of thousands. What the host decides is decided at capture, so it must be the same in every
step: no collectives, no recipe swaps, no statistics. Numbers that change are read from memory: tokens, targets, the
learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2  # steps run as they are first: they make plans, buffers and optimizer state
Batch = tuple[Tensor, ...]


class CapturedStep:
    """`work`: batches -> the numbers of a step, on the device. `like`: batches of the shapes it will get."""

    def __init__(self, work: Callable[[Sequence[Batch]], Tensor], like: Sequence[Batch]) -> None:
        self._batches: list[Batch] = [tuple(each.clone() for each in batch) for batch in like]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads watch process groups
            self._numbers = work(self._batches)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Run the step on these batches. The numbers are overwritten by the next one."""
        for batch, new in zip(self._batches, batches, strict=True):
            for into, each in zip(batch, new, strict=True):
                into.copy_(each, non_blocking=True)
        self._graph.replay()
        return self._numbers
