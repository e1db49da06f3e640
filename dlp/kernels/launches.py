"""Where kernels start: on torch's current stream, on a lane beside it, or in a recording, out of which `captured.py` makes
captured launches.

    current stream   ─ gemm ─ mark ─────── gemm ──────────── await ─ sum
                               └► await ─ copies ─ mark ──────┘
    lane             ─────────────────────────────────

A recording takes down what is launched, with all arguments, and launches nothing. What no kernel of ours does, a collective of
NCCL or a sum of torch, is a `call` between launches.
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
    """What is taken down does more than launch; the message says what."""


def stream_of(tensor: Tensor) -> int:
    """The current stream, for kernels on the current device. ValueError where `tensor` lies on another one."""
    device = tensor.get_device()
    if device != torch._C._cuda_getDevice():
        raise ValueError(
            f"kernels run on the current device, cuda:{torch.cuda.current_device()}, and got a tensor on {tensor.device}; "
            f"call inside torch.cuda.device({device})"
        )
    return torch._C._cuda_getCurrentRawStream(device)


def launch(kernel: str, on: Tensor, *arguments: Any) -> None:
    """Start a kernel of csrc/bindings.cpp, by name, on the device of `on`."""
    stream = stream_of(on)
    if not _recorded(kernel, arguments, CURRENT):
        getattr(loader.load(), kernel)(*arguments, stream)


def _recorded(kernel: str, arguments: tuple[Any, ...], lane: int) -> bool:
    """Take a launch down, if launches are."""
    recording = _RECORDING.get()
    if recording is not None:
        recording.append((kernel, arguments, lane))
    return recording is not None


class Lane:
    """A stream beside the current one, whose small kernels go before those of others. `stream`: its handle."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.cuda.Stream(device, priority=-1)
        self.stream, self._fork = self._kept.cuda_stream, new_event()

    def launch(self, kernel: str, *arguments: Any) -> None:
        """Start a kernel here."""
        if not _recorded(kernel, arguments, self.stream):
            getattr(loader.load(), kernel)(*arguments, self.stream)

    def follow(self, on: Tensor) -> None:
        """What is launched here from now on comes after what the current stream, of the device of `on`, has been given."""
        launch(MARK, on, self._fork)
        self.launch(AWAIT, self._fork)

    def mark(self, event: int) -> None:
        """A point here, which `await_mark` makes the current stream wait for."""
        self.launch(MARK, event)


def new_event() -> int:
    """A point in a stream, to be marked and awaited, and marked again; it is never given back."""
    event: int = loader.load().new_event()
    return event


def await_mark(event: int, on: Tensor) -> None:
    """The current stream, of the device of `on`, waits for a mark."""
    launch(AWAIT, on, event)


def run_plan(plan: Any, addresses: tuple[int, ...], stream: int) -> None:
    """Run a plan of `gemms`."""
    if not _recorded(GEMM, (plan, *addresses), CURRENT):
        plan.run(*addresses, stream)


class Call:
    """Something that is started on tensors between launches, and awaited. `start`: tensors like these -> works, to be awaited.
    `kinds`: shape, stride and dtype of each tensor."""

    def __init__(self, start: Callable[..., list[Any]], tensors: tuple[Tensor, ...]) -> None:
        self.start, self.kinds = start, [(tuple(each.shape), each.stride(), each.dtype) for each in tensors]


class _Answer(NamedTuple):
    """In a recording: the work of a call."""

    arguments: tuple[Any, ...]

    def wait(self) -> None:
        if not _recorded(ANSWER, self.arguments, CURRENT):
            raise NotPlain("awaits a call after it has ended")


def call(start: Callable[..., list[Any]], *tensors: Tensor) -> list[Any]:
    """`start(*tensors)`, the works of something that is no launch. What is recorded starts it with each of its own calls, on
    tensors like these."""
    if _RECORDING.get() is None:
        return start(*tensors)
    arguments = (Call(start, tensors), *[each.data_ptr() for each in tensors])
    _recorded(CALL, arguments, CURRENT)
    return [_Answer(arguments)]


def by_torch(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> Tensor:
    """`compute(*tensors, out=out)`, an operation of torch -> out. What is recorded calls it between its launches."""
    call(partial(_into, compute), out, *tensors)
    return out


def _into(compute: Callable[..., Any], out: Tensor, *tensors: Tensor) -> list[Any]:
    compute(*tensors, out=out)
    return []


@contextmanager
def recording() -> Iterator[Launched]:
    """Inside, on this thread, launches are taken down."""
    launched: Launched = []
    token = _RECORDING.set(launched)
    try:
        yield launched
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Whether launches are taken down on this thread."""
    return _RECORDING.get() is not None
