"""NVTX ranges of one step for profilers of NVIDIA: one range per layer in forward, and per autograd operation.

    nsys profile --capture-range=cudaProfilerApi --pytorch=none torchrun ... --train.profile 20 --train.profiler nvtx

Only the step between cudaProfilerStart and cudaProfilerStop is captured. Hooks that exist in this step only mark layers;
compiled blocks have no ranges inside.
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
    """Call `push` with a layer's name before its forward and `pop` after it, for all layers of a model by depth.

    Ops and linears of dlp mark their launches themselves: with hooks an op would run alone, unlike in other steps."""
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
    """Run a step between the start and stop of the profiler, and wait for the step."""
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    ranges = layer_ranges(model, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    with ranges, torch.autograd.profiler.emit_nvtx():
        result = run()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()
    return result
