"""Meta kernels of torch's fused Adam and AdamW with a tensor as learning rate. CUDA graphs need a tensor as learning rate.

torch traces the first optimizer step on sharded parameters (DTensor) with fake tensors. torch lacks these meta kernels, and
without them every rank would run the step on zeros on the CPU, with the unsharded sizes of all parameters. For billions of
parameters this run is slow and takes tens of GB of host memory.
"""

from __future__ import annotations

from typing import Any

import torch

# Ops that write in place and return nothing
STEPS = tuple(f"aten::_fused_{name}_.tensor_lr" for name in ("adam", "adamw"))
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _nothing(*tensors: Any, **options: Any) -> None:
    pass


def trace_without_running() -> None:
    """Register the meta kernels that torch lacks. Further calls do nothing."""
    for step in STEPS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(step, "Meta"):
            _LIBRARY.impl(step.removeprefix("aten::"), _nothing)
