"""Activations, gated activations and LayerNorm, forward and backward: CUDA kernels, or the plain-torch reference on other
devices and for matrices whose columns are not adjacent.
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


@operation
def activation(x: Tensor, name: str) -> Tensor:
    """Return act(x) of x [rows, C], in the dtype of x; `name`: silu, gelu, relu, srelu, sigmoid or qgelu."""
    return reference.activation(x, name)


def activation_kernel(x: Tensor, name: str) -> Tensor:
    y = _like(x)
    cuda_producers.activation(x, name, y)
    return y


@operation
def activation_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Return dx = dy * act'(x) [rows, C] of dy and x [rows, C], in the dtype of the inputs."""
    return reference.activation_backward(dy, x, name)


def activation_backward_kernel(dy: Tensor, x: Tensor, name: str) -> Tensor:
    dx = _like(x)
    cuda_producers.activation(x, name, dx, dy)
    return dx


@operation
def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return act(gate) * up of gate and up [rows, C], in the dtype of the inputs."""
    return reference.gated(gate, up, name)


def gated_kernel(gate: Tensor, up: Tensor, name: str) -> Tensor:
    h = _like(gate)
    cuda_producers.gate(gate, up, name, h)
    return h


@operation
def gated_backward(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return dgate and dup [rows, C] of dh, gate and up [rows, C], in the dtype of the inputs."""
    return reference.gated_backward(dh, gate, up, name)


def gated_backward_kernel(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(gate)
    cuda_producers.gate_backward(dh, gate, up, name, dgate, dup)
    return dgate, dup


@operation
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [rows, C] in the dtype of x, mean and rstd fp32 [rows], of x [rows, C], weight and bias [C]."""
    return reference.layer_norm(x, weight, bias, eps)


def takes_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    return has_kernel(x) and weight.dtype == bias.dtype


def layer_norm_kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _like(x), *(torch.empty(len(x), device=x.device) for _ in range(2))
    cuda_producers.layer_norm(x, weight, bias, eps, mean, rstd, y)
    return y, mean, rstd


@operation
def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [rows, C] in the dtype of x, dweight and dbias fp32 [C], of dy and x [rows, C], weight [C], mean and rstd
    [rows]."""
    return reference.layer_norm_backward(dy, x, weight, mean, rstd)


def takes_norm_backward(dy: Tensor, x: Tensor, *_: Tensor) -> bool:
    return has_kernel(dy, x)


def layer_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _like(x), *(torch.empty(x.shape[1], device=x.device) for _ in range(2))
    cuda_producers.layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias
