"""NVTX ranges of one step for NVIDIA's profilers: one range per layer in forward, and one per autograd operation.

    nsys profile --capture-range=cudaProfilerApi --pytorch=none torchrun ... --train.profile 20 --train.profiler nvtx

The profiler captures only the step between cudaProfilerStart and cudaProfilerStop. The ranges of layers come from hooks that
exist only in this step; inside of compiled blocks there are no ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from dlp import ops
from dlp.parallel.linear.modules import ConvertedLinear

T = TypeVar("T")


@contextlib.contextmanager
def layer_ranges(model: nn.Module, push: Callable[[str], Any], pop: Callable[[], Any]) -> Iterator[None]:
    """Return a context in which the forward of each module calls `push` with its name before, and `pop` after.

    Operations and converted linears of dlp get no hooks: they push ranges themselves, and an operation with hooks would not
    be fused."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, ops.FusibleOperation | ConvertedLinear):
            continue
        handles.append(module.register_forward_pre_hook(lambda module, args, name=name or "model": push(name) and None))
        handles.append(module.register_forward_hook(lambda module, args, out: pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def marked(run: Callable[[], T], model: nn.Module, device: torch.device) -> T:
    """Call `run` between start and stop of the profiler with NVTX ranges, and wait for the device. Returns the result of
    `run`."""
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    ranges = layer_ranges(model, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    with ranges, torch.autograd.profiler.emit_nvtx():
        result = run()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()
    return result
