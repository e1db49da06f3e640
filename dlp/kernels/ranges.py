"""Named ranges for profilers: in torch's traces and, inside `torch.autograd.profiler.emit_nvtx()`, in NVIDIA's.

    with named_range("blocks.0.up.fprop"): ...

What is launched inside is `fprop` of that layer. Captured launches of a direction, which are one native call, are in a range
"forward" or "backward". A range is no operation, so that recordings and dispatch modes do not see it, and it makes no Python
call where no profiler runs.
"""

from torch._C._profiler import _RecordFunctionFast

__all__ = ["named_range"]

named_range = _RecordFunctionFast
