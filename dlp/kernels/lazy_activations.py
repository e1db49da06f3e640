"""Lazy matrices (`lazy_matrix`) of LayerNorm, activations, gated activations, and gradients of activations.

    LayerNormed      (x - mean) * rstd * weight + bias
    Activated        act(x)
    GatedBy          act(gate) * up
    ActivationGrad   dy * act'(x)
    GatedGrad        dgate = dh * up * act'(gate) or dup = dh * act(gate); `GatedGrads` computes both in one read

x, dy, gate, up and dh are [rows, C]; `name` is the name of the activation. Results are bitwise equal to the functions in
activations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dlp.kernels import cuda_producers
from dlp.kernels.activations import activation, activation_backward, gated, gated_backward, layer_norm
from dlp.kernels.cuda import MATRIX
from dlp.kernels.lazy_matrix import GRADIENT_CODES, LazyMatrix, Source, fuses, stored
from dlp.kernels.producers import swiglu_backward

# Whether casts compute `Activated`, `GatedBy` and `ActivationGrad` by default.
IN_CASTS = False


class _Stored(LazyMatrix):
    """Lazy matrix without a producer: casts read the stored values."""

    def source(self, codes: torch.dtype | None = None) -> Source:
        return self.value, MATRIX


class LayerNormed(LazyMatrix):
    """LayerNorm (x - mean) * rstd * weight + bias, with weight and bias [C]. `value` and `amax` compute mean and rstd, fp32
    [rows], in the same read of x; if neither was called, the first access to `mean` or `rstd` computes both."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.matrix, self.weight, self.bias, self.eps = x, weight, bias, eps

    @cached_property
    def value(self) -> Tensor:
        y, *self._moments = layer_norm(self.matrix, self.weight, self.bias, self.eps)
        return y

    @cached_property
    def _moments(self) -> Sequence[Tensor]:
        """mean and rstd, fp32 [rows]."""
        if self._fuses(None):
            return self._observed(None)
        return layer_norm(self.matrix, self.weight, self.bias, self.eps)[1:]

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def rstd(self) -> Tensor:
        return self._moments[1]

    def amax(self) -> Tensor | None:
        if not self._fuses(None):
            return None
        amax = torch.empty((), device=self.device)
        self._moments = self._observed(amax)
        return amax

    def _observed(self, amax: Tensor | None) -> Sequence[Tensor]:
        mean, rstd = (torch.empty(len(self.matrix), device=self.device) for _ in range(2))
        cuda_producers.layer_norm(self.matrix, self.weight, self.bias, self.eps, mean, rstd, amax=amax)
        return mean, rstd

    def _fuses(self, codes: torch.dtype | None) -> bool:
        return self.weight.dtype == self.bias.dtype and fuses(codes, self.matrix)

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not self._fuses(codes):
            return self.value, MATRIX
        return self.matrix, cuda_producers.layer_norm_source(self.matrix, self.weight, self.bias, self.mean, self.rstd)


class Activated(LazyMatrix):
    """Activation act(x). `in_cast`: whether casts with this producer compute the values; if False, values are stored first."""

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
    """Gated activation act(gate) * up; `in_cast` as in `Activated`."""

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
    """Gradient dy * act'(x); a lazy dy is stored first; `in_cast` as in `Activated`."""

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
    """Both gradients of act(gate) * up, from dh, gate and up. The first access to `values` computes and stores both; the
    kernels of `gate_grads` cast both gradients without storing them."""

    def __init__(self, dh: Tensor | LazyMatrix, gate: Tensor, up: Tensor, name: str) -> None:
        self.dh, self.gate, self.up, self.name = dh, gate, up, name
        self.dtype = gate.dtype

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return self.gate.get_device()

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """Gradients dgate and dup [rows, C]."""
        dh = stored(self.dh)
        if self.name == "silu":
            return swiglu_backward(dh, self.gate, self.up)
        return gated_backward(dh, self.gate, self.up, self.name)


class GatedGrad(_Stored):
    """One gradient of `GatedGrads`. `which`: 0 for dgate, 1 for dup."""

    def __init__(self, grads: GatedGrads, which: int) -> None:
        self.grads, self.which, self.matrix = grads, which, grads.gate

    def of_both(self, other: GatedGrad) -> bool:
        """Return whether this is dgate and `other` is dup of the same `GatedGrads`."""
        return self.grads is other.grads and (self.which, other.which) == (0, 1)

    @property
    def value(self) -> Tensor:
        return self.grads.values[self.which]
