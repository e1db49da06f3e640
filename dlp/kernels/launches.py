"""Launches of kernels: on torch's current stream, on a side stream (`Lane`), or into a recording.

    current stream   ─ gemm ─ record event ─── gemm ──────────────────── wait for event ─ sum
                                  └► wait for event ─ copies ─ record event ──┘
    side stream      ──────────────────────────────────────────────────

Inside `recording()` launches are collected with all arguments, and nothing is launched; `dlp.runtime.capture` builds captured
launches from a recording. Other work on the GPU, such as a collective of NCCL or an operation of torch, goes through `call` or
`by_torch`, so that the recording contains the work at the right position between launches.
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

# Recording: for each launch the name of the kernel, the arguments, and the stream (a side stream, or CURRENT).
Launched = list[tuple[str, tuple[Any, ...], int]]
CURRENT = 0  # the current stream at the time of the replay
# Names in a recording that are not kernels. MARK records an event, and AWAIT waits for an event. The arguments of GEMM are a
# plan of `gemms` and addresses. The arguments of CALL (start a `Call`) and ANSWER (wait for the end of a `Call`) are the `Call`
# and the addresses of its tensors.
MARK, AWAIT = "mark", "await_mark"
GEMM = "gemm"
CALL, ANSWER = "call", "answer"

_RECORDING: ContextVar[Launched | None] = ContextVar("dlp_recording", default=None)


class NotPlain(Exception):
    """Error of a recording: the function cannot be replayed, for example because it runs an operation of torch. The message
    has the reason."""


def stream_of(tensor: Tensor) -> int:
    """Return the handle of the current stream. Raises ValueError for a tensor on another device than the current device."""
    device = tensor.get_device()
    if device != torch._C._cuda_getDevice():
        raise ValueError(
            f"kernels run on the current device, cuda:{torch.cuda.current_device()}, and got a tensor on {tensor.device}; "
            f"call inside torch.cuda.device({device})"
        )
    return torch._C._cuda_getCurrentRawStream(device)


def launch(kernel: str, on: Tensor, *arguments: Any) -> None:
    """Launch the kernel with this name in csrc/bindings.cpp on the current stream of the device of `on`."""
    stream = stream_of(on)
    if not _recorded(kernel, arguments, CURRENT):
        getattr(loader.load(), kernel)(*arguments, stream)


def _recorded(kernel: str, arguments: tuple[Any, ...], lane: int) -> bool:
    """Append a launch to the active recording, and return whether a recording is active."""
    recording = _RECORDING.get()
    if recording is not None:
        recording.append((kernel, arguments, lane))
    return recording is not None


class Lane:
    """Side stream with high priority, for small kernels. `stream`: CUDA handle of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.cuda.Stream(device, priority=-1)
        self.stream, self._fork = self._kept.cuda_stream, new_event()

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Launch a kernel on the side stream."""
        if not _recorded(kernel, arguments, self.stream):
            getattr(loader.load(), kernel)(*arguments, self.stream)

    def follow(self, on: Tensor) -> None:
        """Let the side stream wait for all previous launches on the current stream of the device of `on`."""
        launch(MARK, on, self._fork)
        self.launch(AWAIT, self._fork)

    def mark(self, event: int) -> None:
        """Record an event on the side stream, for `await_mark`."""
        self.launch(MARK, event)


def new_event() -> int:
    """Return the handle of a new CUDA event, which can be recorded any number of times and is never freed."""
    event: int = loader.load().new_event()
    return event


def await_mark(event: int, on: Tensor) -> None:
    """Let the current stream of the device of `on` wait for the last record of an event."""
    launch(AWAIT, on, event)


def run_plan(plan: Any, addresses: tuple[int, ...], stream: int) -> None:
    """Run a GEMM plan of `gemms`."""
    if not _recorded(GEMM, (plan, *addresses), CURRENT):
        plan.run(*addresses, stream)


class Call:
    """Recorded function call, which a replay runs between launches.

    start   function of tensors, which returns a list of work handles with a method `wait()`
    kinds   shape, strides and dtype of each tensor; a replay passes tensors of the same kinds
    """

    def __init__(self, start: Callable[..., list[Any]], tensors: tuple[Tensor, ...]) -> None:
        self.start, self.kinds = start, [(tuple(each.shape), each.stride(), each.dtype) for each in tensors]


class _Answer(NamedTuple):
    """Work handle that `call` returns inside a recording; `wait()` is recorded too. `arguments`: the `Call` and the addresses
    of its tensors."""

    arguments: tuple[Any, ...]

    def wait(self) -> None:
        if not _recorded(ANSWER, self.arguments, CURRENT):
            raise NotPlain("waits for a call outside of the recording")


def call(start: Callable[..., list[Any]], *tensors: Tensor) -> list[Any]:
    """Run `start(*tensors)`, which starts other work than a launch and returns work handles with a method `wait()`.

    A recording does not run `start`: every replay runs `start` on tensors of the same shapes, strides and dtypes.
    """
    if _RECORDING.get() is None:
        return start(*tensors)
    arguments = (Call(start, tensors), *[each.data_ptr() for each in tensors])
    _recorded(CALL, arguments, CURRENT)
    return [_Answer(arguments)]


def by_torch(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> Tensor:
    """Run `compute(*tensors, out=out)`, an operation of torch, and return `out`. Inside a recording, the operation is
    recorded as a `Call`."""
    call(partial(_into, compute), out, *tensors)
    return out


def _into(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> list[Any]:
    compute(*tensors, out=out)
    return []


@contextmanager
def recording() -> Iterator[Launched]:
    """Context manager that records the launches of this thread instead of running them; yields the recording."""
    launched: Launched = []
    token = _RECORDING.set(launched)
    try:
        yield launched
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Return whether launches of this thread are recorded."""
    return _RECORDING.get() is not None


def capturing() -> bool:
    """Return whether the current stream captures a CUDA graph. Returns False before torch initializes CUDA, because torch
    raises on a machine without a driver."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
