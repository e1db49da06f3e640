"""More matrices that a cast may make on its way (`lazy_matrix`): what LayerNorm and activations make, and their gradients.

    LayerNormed      (x - mean) * rstd * weight + bias
    Activated        act(x)
    GatedBy          act(gate) * up
    ActivationGrad   dy * act'(x)
    GatedGrad        one of dh * up * act'(gate) and dh * act(gate), which a `GatedGrads` makes together

The bits are those of the functions of `activations`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dlp.kernels import cuda_producers
from dlp.kernels.activations import activation, activation_backward, gated, gated_backward, layer_norm
from dlp.kernels.cuda import MATRIX
from dlp.kernels.lazy_matrix import GRADIENT_CODES, LazyMatrix, Source, fuses, stored
from dlp.kernels.producers import swiglu_backward

IN_CASTS = False  # casts make activations and their gradients: nobody has measured yet whether that is faster


class _Stored(LazyMatrix):
    """One that no cast makes: it is stored where it is read."""

    def source(self, codes: torch.dtype | None = None) -> Source:
        return self.value, MATRIX


class LayerNormed(_Stored):
    """Of x [rows, C], weight and bias [C]. mean and rstd, fp32 [rows], come with the values."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.matrix, self.weight, self.bias, self.eps = x, weight, bias, eps

    @cached_property
    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        return layer_norm(self.matrix, self.weight, self.bias, self.eps)

    @property
    def value(self) -> Tensor:
        return self.made[0]

    @property
    def mean(self) -> Tensor:
        return self.made[1]

    @property
    def rstd(self) -> Tensor:
        return self.made[2]


class Activated(LazyMatrix):
    """Of x [rows, C]; `name`: of the activation. `in_cast`: casts that can make it do."""

    def __init__(self, x: Tensor, name: str, in_cast: bool = IN_CASTS) -> None:
        self.matrix, self.name, self.in_cast = x, name, in_cast

    @cached_property
    def value(self) -> Tensor:
        return activation(self.matrix, self.name)

    def amax(self) -> Tensor | None:
        if not (self.in_cast and fuses(None, self.matrix)):
            return None
        amax = torch.empty((), device=self.device)
        cuda_producers.activation(self.matrix, self.name, amax=amax)
        return amax

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not (self.in_cast and fuses(codes, self.matrix)):
            return self.value, MATRIX
        return self.matrix, cuda_producers.activation_source(self.name)


class GatedBy(LazyMatrix):
    """Of gate and up [rows, C]; `name`: of the activation of the gate; `in_cast` as above."""

    def __init__(self, gate: Tensor, up: Tensor, name: str, in_cast: bool = IN_CASTS) -> None:
        self.matrix, self.up, self.name, self.in_cast = gate, up, name, in_cast

    @cached_property
    def value(self) -> Tensor:
        return gated(self.matrix, self.up, self.name)

    def amax(self) -> Tensor | None:
        if not (self.in_cast and fuses(None, self.matrix, self.up)):
            return None
        amax = torch.empty((), device=self.device)
        cuda_producers.gate(self.matrix, self.up, self.name, amax=amax)
        return amax

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not (self.in_cast and fuses(codes, self.matrix, self.up)):
            return self.value, MATRIX
        return self.matrix, cuda_producers.beside_source(self.matrix, self.up, self.name)


class ActivationGrad(LazyMatrix):
    """Of dy [rows, C], which may be still to be made itself, and x; `in_cast` as above."""

    def __init__(self, dy: Tensor | LazyMatrix, x: Tensor, name: str, in_cast: bool = IN_CASTS) -> None:
        self.dy, self.matrix, self.name, self.in_cast = dy, x, name, in_cast

    @cached_property
    def value(self) -> Tensor:
        return activation_backward(stored(self.dy), self.matrix, self.name)

    def _fuses(self, codes: torch.dtype | None) -> bool:
        return self.in_cast and fuses(codes, self.matrix, stored(self.dy), casts=GRADIENT_CODES)

    def amax(self) -> Tensor | None:
        if not self._fuses(None):
            return None
        amax = torch.empty((), device=self.device)
        cuda_producers.activation(self.matrix, self.name, dy=stored(self.dy), amax=amax)
        return amax

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not self._fuses(codes):
            return self.value, MATRIX
        return self.matrix, cuda_producers.beside_source(self.matrix, stored(self.dy), self.name, slope=True)

    def summed_source(self, parts: Tensor, codes: torch.dtype | None) -> Source | None:
        if codes is None or not self._fuses(codes):
            return None
        words = cuda_producers.beside_source(self.matrix, stored(self.dy), self.name, slope=True, parts=parts)
        return self.matrix, words


class GatedGrads:
    """The two gradients of a gate, made together when either is first read, or cast together (`gate_grads`)."""

    def __init__(self, dh: Tensor | LazyMatrix, gate: Tensor, up: Tensor, name: str) -> None:
        self.dh, self.gate, self.up, self.name = dh, gate, up, name
        self.dtype = gate.dtype

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return self.gate.get_device()

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        dh = stored(self.dh)
        if self.name == "silu":
            return swiglu_backward(dh, self.gate, self.up)
        return gated_backward(dh, self.gate, self.up, self.name)


class GatedGrad(_Stored):
    """One of `GatedGrads`: of the gate (0) or of up (1)."""

    def __init__(self, grads: GatedGrads, which: int) -> None:
        self.grads, self.which, self.matrix = grads, which, grads.gate

    def of_both(self, other: GatedGrad) -> bool:
        """Whether this is the gradient of the gate, and the other that of up."""
        return self.grads is other.grads and (self.which, other.which) == (0, 1)

    @property
    def value(self) -> Tensor:
        return self.grads.values[self.which]
