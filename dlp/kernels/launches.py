"""Where kernels start: on torch's current stream, or in a recording, out of which `captured.py` makes captured launches.

A recording takes down what is launched, with all arguments but the stream, and launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import loader

Launched = list[tuple[str, tuple[Any, ...]]]
GEMM = "gemm"  # what a recording calls the run of a plan; its arguments are the plan and addresses

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
    stream, recording = stream_of(on), _RECORDING.get()
    if recording is None:
        getattr(loader.load(), kernel)(*arguments, stream)
    else:
        recording.append((kernel, arguments))


def run_plan(plan: Any, addresses: tuple[int, ...], stream: int) -> None:
    """Run a plan of `gemms`."""
    recording = _RECORDING.get()
    if recording is None:
        plan.run(*addresses, stream)
    else:
        recording.append((GEMM, (plan, *addresses)))


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
