"""Meta kernels of torch's fused Adam and AdamW for a learning rate that is a tensor, which CUDA graphs need.

torch traces the first optimizer step on sharded parameters (DTensor) with fake tensors. torch lacks these meta kernels, and
would trace the step by running it on zeros on the CPU, with the unsharded sizes of all parameters, on every rank. For billions
of parameters this is slow and takes tens of GB of host memory.
"""

from __future__ import annotations

from typing import Any

import torch

STEPS = tuple(f"aten::_fused_{name}_.tensor_lr" for name in ("adam", "adamw"))  # write in place, return nothing
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _nothing(*tensors: Any, **options: Any) -> None:
    pass


def trace_without_running() -> None:
    """Register the meta kernels that torch lacks. Further calls do nothing."""
    for step in STEPS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(step, "Meta"):
            _LIBRARY.impl(step.removeprefix("aten::"), _nothing)
