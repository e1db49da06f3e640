"""Launching kernels: on torch's current stream, on a second stream beside it (a `Lane`), or into a recording.

    current stream   ─ gemm ─ mark ─────── gemm ──────────── await ─ sum
                               └► await ─ copies ─ mark ──────┘
    lane             ─────────────────────────────────

Inside `recording()` launches are collected, with all their arguments, and nothing is launched; captured.py makes captured
launches of such a recording. Work on the GPU that is no kernel of this package, such as a collective of NCCL or an operation of
torch, goes through `call` or `by_torch`, so that a recording has it, too, in its place between the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import loader

# A recording: for each launch the name of the kernel, its arguments, and the stream: that of a lane, or CURRENT.
Launched = list[tuple[str, tuple[Any, ...], int]]
CURRENT = 0  # the stream that is current when the recorded launches are run
# Names that are no kernels. Arguments of GEMM are a plan of `gemms` and addresses; those of CALL, the start of a `Call`, and
# of ANSWER, the wait for its end, are the `Call` and the addresses of its tensors.
MARK, AWAIT = "mark", "await_mark"
GEMM = "gemm"
CALL, ANSWER = "call", "answer"

_RECORDING: ContextVar[Launched | None] = ContextVar("dlp_recording", default=None)


class NotPlain(Exception):
    """A recorded function does more than allocate, take views and launch; the message says what."""


def stream_of(tensor: Tensor) -> int:
    """The handle of the current stream. ValueError for a tensor that is not on the current device."""
    device = tensor.get_device()
    if device != torch._C._cuda_getDevice():
        raise ValueError(
            f"kernels run on the current device, cuda:{torch.cuda.current_device()}, and got a tensor on {tensor.device}; "
            f"call inside torch.cuda.device({device})"
        )
    return torch._C._cuda_getCurrentRawStream(device)


def launch(kernel: str, on: Tensor, *arguments: Any) -> None:
    """Launch a kernel of csrc/bindings.cpp, by its name there, on the current stream of the device of `on`."""
    stream = stream_of(on)
    if not _recorded(kernel, arguments, CURRENT):
        getattr(loader.load(), kernel)(*arguments, stream)


def _recorded(kernel: str, arguments: tuple[Any, ...], lane: int) -> bool:
    """Append a launch to the active recording, if there is one; returns whether there is."""
    recording = _RECORDING.get()
    if recording is not None:
        recording.append((kernel, arguments, lane))
    return recording is not None


class Lane:
    """A second stream beside the current one, of high priority, since its kernels are small. `stream`: its handle."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.cuda.Stream(device, priority=-1)
        self.stream, self._fork = self._kept.cuda_stream, new_event()

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Launch a kernel on this lane."""
        if not _recorded(kernel, arguments, self.stream):
            getattr(loader.load(), kernel)(*arguments, self.stream)

    def follow(self, on: Tensor) -> None:
        """Order what is launched on this lane from now on after what has been launched on the current stream of the device of
        `on`."""
        launch(MARK, on, self._fork)
        self.launch(AWAIT, self._fork)

    def mark(self, event: int) -> None:
        """Record an event at this point of the lane, for `await_mark`."""
        self.launch(MARK, event)


def new_event() -> int:
    """The handle of a new CUDA event. It can be recorded any number of times, and is never freed."""
    event: int = loader.load().new_event()
    return event


def await_mark(event: int, on: Tensor) -> None:
    """Let the current stream of the device of `on` wait for the point where an event was recorded last."""
    launch(AWAIT, on, event)


def run_plan(plan: Any, addresses: tuple[int, ...], stream: int) -> None:
    """Run a GEMM plan of `gemms`."""
    if not _recorded(GEMM, (plan, *addresses), CURRENT):
        plan.run(*addresses, stream)


class Call:
    """A call between launches.

    start   takes tensors of the recorded shapes, strides and dtypes; returns works, each with a `wait()`
    kinds   shape, strides and dtype of each tensor
    """

    def __init__(self, start: Callable[..., list[Any]], tensors: tuple[Tensor, ...]) -> None:
        self.start, self.kinds = start, [(tuple(each.shape), each.stride(), each.dtype) for each in tensors]


class _Answer(NamedTuple):
    """The work that a recorded call returns; its `wait()` is recorded, too. arguments: the `Call`, addresses of its tensors."""

    arguments: tuple[Any, ...]

    def wait(self) -> None:
        if not _recorded(ANSWER, self.arguments, CURRENT):
            raise NotPlain("awaits a call after it has ended")


def call(start: Callable[..., list[Any]], *tensors: Tensor) -> list[Any]:
    """`start(*tensors)`, which starts something that is no launch and returns works, each with a `wait()`. In a recording it is
    not started: captured launches call it every time that they run, on tensors of the same shapes, strides and dtypes."""
    if _RECORDING.get() is None:
        return start(*tensors)
    arguments = (Call(start, tensors), *[each.data_ptr() for each in tensors])
    _recorded(CALL, arguments, CURRENT)
    return [_Answer(arguments)]


def by_torch(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> Tensor:
    """Run `compute(*tensors, out=out)`, an operation of torch, and return `out`; in a recording, a call between launches."""
    call(partial(_into, compute), out, *tensors)
    return out


def _into(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> list[Any]:
    compute(*tensors, out=out)
    return []


@contextmanager
def recording() -> Iterator[Launched]:
    """A context in which launches of this thread are recorded."""
    launched: Launched = []
    token = _RECORDING.set(launched)
    try:
        yield launched
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether launches of this thread are recorded."""
    return _RECORDING.get() is not None


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph. False, without asking, before torch uses CUDA: a torch built for CUDA
    raises where there is no driver."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
