"""What makes a linear's x, RMSNorm and SwiGLU, their gradients, and sums of columns: by the CUDA kernels where the device
has them, else by the reference. Matrices whose columns are not adjacent run the reference, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_producers, dispatch, reference
from dlp.kernels.registry import operation


def has_kernel(*matrices: Tensor) -> bool:
    """Whether kernels can read these as they lie."""
    return all(dispatch.has_kernel(x) and cuda.readable(x) for x in matrices)


def is_readable(x: Tensor, *_: Any) -> bool:
    return cuda.readable(x)


def takes_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None) -> bool:
    return has_kernel(dy, x) and (add is None or has_kernel(add))


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, C], weight [C] -> y [rows, C] in the dtype of x, rstd fp32 [rows]; see the reference."""
    return reference.rms_norm(x, weight, eps)


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(len(x), device=x.device)
    cuda_producers.rms_norm(x, weight, eps, rstd, y=y)
    return y, rstd


@operation
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy, x [rows, C], weight [C], rstd [rows] -> dx [rows, C] in the dtype of x, to which `add` of its shape and dtype is
    added, dweight fp32 [C]."""
    return reference.rms_norm_backward(dy, x, weight, rstd, add)


def rms_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape[1], device=x.device)
    cuda_producers.rms_norm_backward(dy, x, weight, rstd, dx, dweight, add)
    return dx, dweight


@operation
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [rows, C] -> silu(gate) * up in their dtype."""
    return reference.swiglu(gate, up)


def swiglu_kernel(gate: Tensor, up: Tensor) -> Tensor:
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    cuda_producers.swiglu(gate, up, h=h)
    return h


@operation
def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dh, gate, up [rows, C] -> dgate, dup [rows, C] in their dtype."""
    return reference.swiglu_backward(dh, gate, up)


def swiglu_backward_kernel(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    cuda_producers.swiglu_backward(dh, gate, up, dgate, dup)
    return dgate, dup


@operation
def column_sums(x: Tensor) -> Tensor:
    """x [rows, C] -> fp32 [C], in the order of the reference."""
    return reference.column_sums(x)


def column_sums_kernel(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1], device=x.device)
    cuda_producers.column_sums(x, out)
    return out
