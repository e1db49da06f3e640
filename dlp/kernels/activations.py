"""Activations, alone and as gates, LayerNorm, and their gradients: by the CUDA kernels where the device has them, else by the
reference. Matrices whose columns are not adjacent run the reference, too.
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
    """x [rows, C] -> act(x) in its dtype; `name`: silu, gelu, relu, srelu, sigmoid or qgelu."""
    return reference.activation(x, name)


def activation_kernel(x: Tensor, name: str) -> Tensor:
    y = _like(x)
    cuda_producers.activation(x, name, y)
    return y


@operation
def activation_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """dy, x [rows, C] -> dx [rows, C] in their dtype."""
    return reference.activation_backward(dy, x, name)


def activation_backward_kernel(dy: Tensor, x: Tensor, name: str) -> Tensor:
    dx = _like(x)
    cuda_producers.activation(x, name, dx, dy)
    return dx


@operation
def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """gate, up [rows, C] -> act(gate) * up in their dtype."""
    return reference.gated(gate, up, name)


def gated_kernel(gate: Tensor, up: Tensor, name: str) -> Tensor:
    h = _like(gate)
    cuda_producers.gate(gate, up, name, h)
    return h


@operation
def gated_backward(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """dh, gate, up [rows, C] -> dgate, dup [rows, C] in their dtype."""
    return reference.gated_backward(dh, gate, up, name)


def gated_backward_kernel(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(gate)
    cuda_producers.gate_backward(dh, gate, up, name, dgate, dup)
    return dgate, dup


@operation
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, C], weight, bias [C] -> y [rows, C] in the dtype of x, mean and rstd fp32 [rows]; see the reference."""
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
    """dy, x [rows, C], weight [C], mean, rstd [rows] -> dx [rows, C] in the dtype of x, dweight, dbias fp32 [C]."""
    return reference.layer_norm_backward(dy, x, weight, mean, rstd)


def takes_norm_backward(dy: Tensor, x: Tensor, *_: Tensor) -> bool:
    return has_kernel(dy, x)


def layer_norm_backward_kernel(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _like(x), *(torch.empty(x.shape[1], device=x.device) for _ in range(2))
    cuda_producers.layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias
