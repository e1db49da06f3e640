"""Meta kernels of fused optimizer steps with a learning rate in a tensor, as CUDA graphs need it, where torch has none.

torch traces the first step on sharded parameters (DTensor) with fake tensors. An operation without a meta kernel is traced by
running the operation on zeros on the CPU, in the unsharded sizes of all parameters, on every rank: for 4.5 billion parameters
50 seconds and 72 GB of host memory.
"""

from __future__ import annotations

from typing import Any

import torch

STEPS = tuple(f"aten::_fused_{name}_.tensor_lr" for name in ("adam", "adamw"))  # in place, no results
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _nothing(*tensors: Any, **options: Any) -> None:
    pass


def trace_without_running() -> None:
    """Register the meta kernels that torch lacks, once."""
    for step in STEPS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(step, "Meta"):
            _LIBRARY.impl(step.removeprefix("aten::"), _nothing)
