"""Named ranges for profilers: in torch's traces and, inside `torch.autograd.profiler.emit_nvtx()`, in NVIDIA's.

    with named_range("blocks.0.up.fprop"): ...

The launches inside belong to `fprop` of this layer. Captured launches, which are one native call, have a range "forward" or
"backward". A range is no torch operation: recordings and dispatch modes do not see ranges. Without a profiler, a range makes no
Python call.
"""

from torch._C._profiler import _RecordFunctionFast

__all__ = ["named_range"]

named_range = _RecordFunctionFast
