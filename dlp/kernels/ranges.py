"""Ranges by name for who profiles: in torch's traces and, inside `torch.autograd.profiler.emit_nvtx()`, in NVIDIA's.

    with named_range("blocks.0.up.fprop"): ...

What is launched inside is `fprop` of that layer; "forward" and "backward" of launches that were captured, which are made at
once. A range is no operation, so that recordings and dispatch modes do not see it, and where nobody profiles it makes no
call of Python.
"""

from torch._C._profiler import _RecordFunctionFast

__all__ = ["named_range"]

named_range = _RecordFunctionFast
