"""Ranges by name for who profiles: in torch's traces and, inside `torch.autograd.profiler.emit_nvtx()`, in NVIDIA's.

Where nobody profiles nothing is entered, and while launches are captured nothing is, either: a range is none of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_OFF: AbstractContextManager[Any] = nullcontext()


def profiled() -> bool:
    """Whether somebody profiles."""
    return profiler._is_profiler_enabled


def named_range(layer: str, what: str) -> AbstractContextManager[Any]:
    """What is launched inside is `what` of this layer: "blocks.0.up.fprop"; "forward" and "backward" of launches that were
    captured, which are made at once."""
    if not profiled() or torch._C._len_torch_dispatch_stack():
        return _OFF
    return profiler.record_function(f"{layer}.{what}")
