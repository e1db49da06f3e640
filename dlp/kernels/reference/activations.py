"""Activations, gated activations and LayerNorm, forward and backward, in fp32 with one rounding at the end.

    silu      g * s(g), s(g) = 1 / (1 + exp(-g))
    gelu      g * t(g), t(g) = (1 + tanh(a (g + b g^3))) / 2, a = sqrt(2 / pi), b = 0.044715     arXiv 1606.08415
    qgelu     g * s(1.702 g)                                        arXiv 1606.08415, section 2
    relu      max(g, 0)            srelu   max(g, 0)^2            sigmoid   s(g)
    gated     act(gate) * up; SwiGLU: silu(gate) * up               Shazeer, arXiv 2002.05202
    layer_norm   y = (x - mean) * rstd * weight + bias of a row          Ba, Kiros and Hinton, arXiv 1607.06450

Sums run in a fixed order; exp and tanh differ between devices by units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlp.kernels.reference.fp8 import widen
from dlp.kernels.reference.producers import NORM_PARTS, _groups, _row_means, _sqrt, in_order, sum_parts

GELU_A, GELU_B = 0.7978845608028654, 0.044715
QGELU = 1.702
Slope = tuple[Tensor, Tensor]  # act(g), act'(g)


def _sigmoid(x: Tensor) -> Tensor:
    return (1 + (-x).exp()).reciprocal()


def _silu(g: Tensor) -> Slope:
    s = _sigmoid(g)
    return g * s, s * (1 + g * (1 - s))


def _gelu(g: Tensor) -> Slope:
    square = g * g
    t = torch.tanh(GELU_A * (g + GELU_B * (square * g)))
    inner = GELU_A * (1 + (3 * GELU_B) * square)
    return 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * ((1 - t * t) * inner)


def _qgelu(g: Tensor) -> Slope:
    scaled = QGELU * g
    s = _sigmoid(scaled)
    return g * s, s * (1 + scaled * (1 - s))


def _relu(g: Tensor) -> Slope:
    return g.relu(), (g > 0).float()


def _srelu(g: Tensor) -> Slope:
    kept = g.clamp_min(0)
    return kept * kept, 2 * kept


def _sigmoid_slope(g: Tensor) -> Slope:
    s = _sigmoid(g)
    return s, s * (1 - s)


ACTIVATIONS: dict[str, Callable[[Tensor], Slope]] = {
    "silu": _silu, "gelu": _gelu, "relu": _relu, "srelu": _srelu, "sigmoid": _sigmoid_slope,
    "qgelu": _qgelu,
}  # fmt: skip


def activation(x: Tensor, name: str) -> Tensor:
    """Return act(x) of x [rows, C], in the dtype of x; `name`: one of ACTIVATIONS."""
    return ACTIVATIONS[name](widen(x))[0].to(x.dtype)


def activation_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Return dx = dy * act'(x) of dy and x [rows, C], in the dtype of the inputs."""
    return (widen(dy) * ACTIVATIONS[name](widen(x))[1]).to(x.dtype)


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return act(gate) * up of gate and up [rows, C], in the dtype of the inputs."""
    return (ACTIVATIONS[name](widen(gate))[0] * widen(up)).to(gate.dtype)


def gated_backward(dh: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return dgate = dh * up * act'(gate) and dup = dh * act(gate) of matrices [rows, C], in the dtype of the inputs."""
    value, slope = ACTIVATIONS[name](widen(gate))
    d = widen(dh)
    return (d * widen(up) * slope).to(gate.dtype), (d * value).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return h = silu(gate) * up of gate and up [rows, C], in the dtype of the inputs."""
    return gated(gate, up, "silu")


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return dgate and dup of dh, gate and up [rows, C], in the dtype of the inputs."""
    return gated_backward(dh, gate, up, "silu")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, rstd): y [rows, C] in the dtype of x, mean fp32 [rows], rstd fp32 [rows].

    x is [rows, C], weight and bias are [C]."""
    wide = widen(x)
    mean = _row_means(wide)
    centred = wide - mean[:, None]
    rstd = _sqrt(_row_means(centred * centred) + eps).reciprocal()
    return (centred * rstd[:, None] * weight.float() + bias.float()).to(x.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias): dx [rows, C] in the dtype of x, dweight fp32 [C], dbias fp32 [C].

    dy and x are [rows, C], weight is [C], mean and rstd are [rows].

    With g = dy * weight and n = (x - mean) * rstd: dx = (g - mean(g) - n * mean(g * n)) * rstd, dweight is the sum of dy * n
    over rows, and dbias is the sum of dy over rows.
    """
    wide, n = widen(dy), (widen(x) - mean[:, None]) * rstd[:, None]
    g = wide * weight.float()
    dx = (g - _row_means(g)[:, None] - n * _row_means(g * n)[:, None]) * rstd[:, None]
    dweight, dbias = (sum_parts(in_order(_groups(part, NORM_PARTS), 0)) for part in (wide * n, wide))
    return dx.to(x.dtype), dweight, dbias
