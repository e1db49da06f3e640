"""Activations, gated activations and LayerNorm, forward and backward: CUDA kernels, or the plain-torch reference on other
devices, for other dtypes than bf16 and fp32, and for matrices whose columns are not adjacent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda_producers, reference
from dlp.kernels.producers import has_kernel
from dlp.kernels.registry import operation


def are_readable(*given: Any, **named: Any) -> bool:
    return has_kernel(*[x for x in (*given, *named.values()) if isinstance(x, Tensor)])


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


activation = operation(reference.activation)


def activation_kernel(x: Tensor, name: str) -> Tensor:
    y = _like(x)
    cuda_producers.activation(x, name, y)
    return y


activation_backward = operation(reference.activation_backward)


def activation_backward_kernel(dy: Tensor, x: Tensor, name: str) -> Tensor:
    dx = _like(x)
    cuda_producers.activation(x, name, dx, dy)
    return dx


gated = operation(reference.gated)


def gated_kernel(gate: Tensor, up: Tensor, name: str) -> Tensor:
    h = _like(gate)
    cuda_producers.gate(gate, up, name, h)
    return h


gated_backward = operation(reference.gated_backward)


def gated_backward_kernel(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(gate)
    cuda_producers.gate_backward(dh, gate, up, name, dgate, dup)
    return dgate, dup


layer_norm = operation(reference.layer_norm)


def takes_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    return has_kernel(x) and weight.dtype == bias.dtype


def layer_norm_kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _like(x), *(torch.empty(len(x), device=x.device) for _ in range(2))
    cuda_producers.layer_norm(x, weight, bias, eps, mean, rstd, y=y)
    return y, mean, rstd


layer_norm_backward = operation(reference.layer_norm_backward)


def takes_norm_backward(dy: Tensor, x: Tensor, *_: Tensor) -> bool:
    return has_kernel(dy, x)


def layer_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _like(x), *(torch.empty(x.shape[1], device=x.device) for _ in range(2))
    cuda_producers.layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias
