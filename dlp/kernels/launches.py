"""Where kernels are launched: on torch's current stream, on a lane beside it, or into a recording, of which `captured.py` makes
captured launches.

    current stream   ─ gemm ─ mark ─────── gemm ──────────── await ─ sum
                               └► await ─ copies ─ mark ──────┘
    lane             ─────────────────────────────────

A recording collects launches, with all their arguments, and launches nothing. What is no kernel of this package, such as a
collective of NCCL or a sum by torch, is a `call` between launches.
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

Launched = list[tuple[str, tuple[Any, ...], int]]  # a kernel, its arguments, and a lane's stream, or CURRENT
CURRENT = 0  # in a recording: the stream that it will be launched on
MARK, AWAIT = "mark", "await_mark"
GEMM = "gemm"  # what a recording calls the run of a plan; its arguments are the plan and addresses
# A `Call` is started, and awaited; the arguments are the call and addresses of its tensors.
CALL, ANSWER = "call", "answer"

_RECORDING: ContextVar[Launched | None] = ContextVar("dlp_recording", default=None)


class NotPlain(Exception):
    """A function that is recorded does more than launch; the message says what."""


def stream_of(tensor: Tensor) -> int:
    """The current stream, for kernels on the current device. ValueError for a tensor on another device."""
    device = tensor.get_device()
    if device != torch._C._cuda_getDevice():
        raise ValueError(
            f"kernels run on the current device, cuda:{torch.cuda.current_device()}, and got a tensor on {tensor.device}; "
            f"call inside torch.cuda.device({device})"
        )
    return torch._C._cuda_getCurrentRawStream(device)


def launch(kernel: str, on: Tensor, *arguments: Any) -> None:
    """Launch a kernel of csrc/bindings.cpp, by name, on the device of `on`."""
    stream = stream_of(on)
    if not _recorded(kernel, arguments, CURRENT):
        getattr(loader.load(), kernel)(*arguments, stream)


def _recorded(kernel: str, arguments: tuple[Any, ...], lane: int) -> bool:
    """Record a launch, if a recording is active; returns whether."""
    recording = _RECORDING.get()
    if recording is not None:
        recording.append((kernel, arguments, lane))
    return recording is not None


class Lane:
    """A stream beside the current one, with high priority for its small kernels. `stream`: its handle."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.cuda.Stream(device, priority=-1)
        self.stream, self._fork = self._kept.cuda_stream, new_event()

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Launch a kernel on this lane."""
        if not _recorded(kernel, arguments, self.stream):
            getattr(loader.load(), kernel)(*arguments, self.stream)

    def follow(self, on: Tensor) -> None:
        """Let what is launched on this lane from now on wait for what the current stream of the device of `on` has been
        given."""
        launch(MARK, on, self._fork)
        self.launch(AWAIT, self._fork)

    def mark(self, event: int) -> None:
        """Mark a point in this lane, for `await_mark`."""
        self.launch(MARK, event)


def new_event() -> int:
    """An event, which marks a point in a stream any number of times, and is never freed."""
    event: int = loader.load().new_event()
    return event


def await_mark(event: int, on: Tensor) -> None:
    """Let the current stream of the device of `on` wait for a mark."""
    launch(AWAIT, on, event)


def run_plan(plan: Any, addresses: tuple[int, ...], stream: int) -> None:
    """Run a GEMM plan of `gemms`."""
    if not _recorded(GEMM, (plan, *addresses), CURRENT):
        plan.run(*addresses, stream)


class Call:
    """A call between launches. start: tensors like those recorded -> works, which are awaited later; kinds: shape, stride and
    dtype of each tensor."""

    def __init__(self, start: Callable[..., list[Any]], tensors: tuple[Tensor, ...]) -> None:
        self.start, self.kinds = start, [(tuple(each.shape), each.stride(), each.dtype) for each in tensors]


class _Answer(NamedTuple):
    """The work of a call in a recording."""

    arguments: tuple[Any, ...]

    def wait(self) -> None:
        if not _recorded(ANSWER, self.arguments, CURRENT):
            raise NotPlain("awaits a call after it has ended")


def call(start: Callable[..., list[Any]], *tensors: Tensor) -> list[Any]:
    """`start(*tensors)`, which returns works, of something that is no launch. Captured launches repeat it in each of their
    calls, on tensors like these."""
    if _RECORDING.get() is None:
        return start(*tensors)
    arguments = (Call(start, tensors), *[each.data_ptr() for each in tensors])
    _recorded(CALL, arguments, CURRENT)
    return [_Answer(arguments)]


def by_torch(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> Tensor:
    """`compute(*tensors, out=out)`, an operation of torch -> out; a call between launches, in a recording."""
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
