"""Training steps as a CUDA graph: captured once, replayed with new tokens.

Everything a step does on the device, forward, backward, collectives, clipping, the optimizer and the step boundary of the
recipes, is launched by one call instead of thousands. What the host decides is decided at capture, so it must be the same in
every step: no statistics, no documents. Numbers that change are read from memory: tokens, targets, the learning rate.

    3 as they are, capture, replay, replay, ..., one as it is (a swap at its boundary), 3 as they are, capture, replay, ...

All of it, eager steps as well, runs on one stream beside torch's default one, which takes no part in captures: autograd's nodes
remember on which stream they were made. The streams of FSDP, of transports and of NCCL fork from it and join it again in every
step, and are captured with it. Collectives of NCCL are kernels like others, once their communicators are there, and nothing
polls them: who has waited too long in a replay is told by the run's own watch (`launch.hang`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dlp.parallel.model.session import Session

WARM_UP = (
    3  # steps run as they are first: they make plans, buffers, communicators, optimizer state and captured directions
)
Batch = tuple[Tensor, ...]
Work = Callable[[Sequence[Batch]], Tensor]


class CapturedStep:
    """`work`: batches -> the numbers of a step, on the device. `like`: batches of the shapes it will get."""

    def __init__(self, work: Work, like: Sequence[Batch]) -> None:
        self._batches: list[Batch] = [tuple(each.clone() for each in batch) for batch in like]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream  # None: one of torch's
        with torch.cuda.graph(
            self._graph, stream=own, capture_error_mode="thread_local"
        ):  # others watch process groups
            self._numbers = work(self._batches)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Run the step on these batches. The numbers are overwritten by the next one."""
        for batch, new in zip(self._batches, batches, strict=True):
            for into, each in zip(batch, new, strict=True):
                into.copy_(each, non_blocking=True)
        self._graph.replay()
        return self._numbers


class Replays:
    """Which steps of a run are replayed. `asked`: whether any; `session`: that of the model.

    A graph holds what recipes decided: the step whose boundary swaps some is run as it is, and so are WARM_UP behind it, then
    steps are captured anew. `capture` makes a graph.
    """

    capture = CapturedStep

    def __init__(self, asked: bool, session: Session, device: torch.device) -> None:
        self._asked, self._session = asked, session
        self._stream = torch.cuda.Stream(device) if asked and device.type == "cuda" else None
        self._captured: CapturedStep | None = None
        self._swaps, self._warm = len(session.swaps), 0

    def next(self) -> bool:
        """A step begins: whether it is to be replayed."""
        if not self._asked:
            return False
        session, made = self._session, len(self._session.swaps)
        if made != self._swaps or session.swaps_next:
            self.drop()
        self._swaps, self._warm = made, self._warm + 1
        return self._warm > WARM_UP and not session.swaps_next

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._captured is not None

    def make(self, work: Work, like: Sequence[Batch]) -> None:
        """Capture a step. It does nothing to the model but in a replay, and neither does what the host counts."""
        steps = self._session.steps
        self._captured = self.capture(work, like)
        self._session.steps = steps

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Replay the step that was captured on these batches; the host's count of steps goes on beside it."""
        assert self._captured is not None
        numbers = self._captured(batches)
        self._session.steps += 1
        return numbers

    def drop(self) -> None:
        """Let the graph and its memory go: before NCCL's communicators, which wait for graphs that hold collectives."""
        self._captured, self._warm = None, 0
        self._session.graphed.clear()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream of all steps, behind what was launched before; what follows comes behind it."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)
