"""RMSNorm, SwiGLU and column sums, forward and backward: CUDA kernels, or the plain-torch reference on other devices, for other
dtypes than bf16 and fp32, and for matrices whose columns are not adjacent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_producers, dispatch, reference
from dlp.kernels.registry import operation


def has_kernel(*matrices: Tensor) -> bool:
    """Return whether kernels can read these matrices without a copy."""
    return all(dispatch.has_kernel(x) and cuda.readable(x) for x in matrices)


def takes_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None) -> bool:
    return has_kernel(dy, x) and (add is None or has_kernel(add))


rms_norm = operation(reference.rms_norm)


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(len(x), device=x.device)
    cuda_producers.rms_norm(x, weight, eps, rstd, y=y)
    return y, rstd


rms_norm_backward = operation(reference.rms_norm_backward)


def rms_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape[1], device=x.device)
    cuda_producers.rms_norm_backward(dy, x, weight, rstd, dx, dweight, add)
    return dx, dweight


swiglu = operation(reference.swiglu)


def swiglu_kernel(gate: Tensor, up: Tensor) -> Tensor:
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    cuda_producers.swiglu(gate, up, h=h)
    return h


swiglu_backward = operation(reference.swiglu_backward)


def swiglu_backward_kernel(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    cuda_producers.swiglu_backward(dh, gate, up, dgate, dup)
    return dgate, dup


column_sums = operation(reference.column_sums)


def column_sums_kernel(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1], device=x.device)
    cuda_producers.column_sums(x, out)
    return out
