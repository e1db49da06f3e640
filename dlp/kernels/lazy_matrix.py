"""Lazy matrices: results of a norm or gate that the kernel of a cast computes instead of reading stored values.

    RmsNormed     x * rstd * weight
    AddedNormed   RMSNorm of the sum x + more, which is stored
    Gated         silu(gate) * up
    Summed        x; the cast also computes the column sums of x

Casts and amaxes of `dlp.kernels.ops` accept a lazy matrix in place of a tensor. A kernel with a producer (`cuda_producers`)
reads the inputs, x or gate and up, and computes each element before the cast. For other casts, and on a CPU, `value` computes
and stores the matrix once, and the cast reads it. The codes have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from dlp.kernels import cuda_producers
from dlp.kernels.cuda import MATRIX, Words
from dlp.kernels.producers import column_sums, has_kernel, rms_norm, swiglu
from dlp.kernels.registry import operation

Params = ParamSpec("Params")
Result = TypeVar("Result")

# Dtypes of casts with producers: the input, and the codes of activations and of gradients.
FUSED_DTYPE = torch.bfloat16
ACTIVATION_CODES = (torch.float8_e4m3fn,)
GRADIENT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
Source = tuple[Tensor, Words]  # the matrix that a kernel reads, and the arguments of its producer (MATRIX: no producer)


class LazyMatrix:
    """Matrix [rows, C] that a cast can compute from input matrices of the same shape and dtype.

    matrix   first input
    like     an input that is already stored, which gives shape, dtype and device
    """

    matrix: Tensor

    @property
    def like(self) -> Tensor:
        return self.matrix

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return self.like.get_device()

    def __len__(self) -> int:
        return len(self.like)

    @property
    def value(self) -> Tensor:
        """Values [rows, C], which the first read computes and stores."""
        raise NotImplementedError

    def amax(self) -> Tensor | None:
        """Return max |x| of this matrix as fp32 [], without storing the matrix; None if there is no such kernel."""
        return None

    def source(self, codes: torch.dtype | None = None) -> Source:
        """Return the input and the producer for a kernel that casts to the dtype `codes` (None: a kernel that computes the
        amax). If the kernel has no such producer, return the stored matrix and MATRIX."""
        raise NotImplementedError

    def summed_source(self, parts: Tensor, codes: torch.dtype | None) -> Source | None:
        """Return `source` for a cast that also writes column sums of tiles to `parts` (`cuda_producers.empty_parts`); None if
        there is no such kernel."""
        return None


def stored(x: Tensor | LazyMatrix) -> Tensor:
    """Return the matrix as a tensor [rows, C]; a lazy matrix is computed and stored."""
    return x if isinstance(x, Tensor) else x.value


def lazy_operation(
    reference: Callable[Concatenate[Tensor, Params], Result],
) -> Callable[Concatenate[Tensor | LazyMatrix, Params], Result]:
    """Decorator for an `operation` whose matrix may be lazy. Kernels get the lazy matrix itself, and the reference gets
    its values."""
    return operation(reference)  # type: ignore[return-value]


def opened(x: Tensor | LazyMatrix, codes: torch.dtype | None = None, *, makes: bool = True) -> Source:
    """Return `LazyMatrix.source` of a lazy matrix, or the tensor and MATRIX. `makes=False`: the kernel has no producers, and a
    lazy matrix is computed and stored first."""
    if isinstance(x, Tensor):
        return x, MATRIX
    return x.source(codes) if makes else (x.value, MATRIX)


def fuses(codes: torch.dtype | None, *matrices: Tensor, casts: Sequence[torch.dtype] = ACTIVATION_CODES) -> bool:
    """Return whether kernels that cast to `codes` (None: that compute the amax) have a producer for these matrices. `casts`:
    dtypes of codes for which casts with this producer are compiled."""
    known = codes is None or codes in casts
    return known and all(x.dtype == FUSED_DTYPE for x in matrices) and has_kernel(*matrices)


class Produced:
    """Result of an operation that is not computed yet. A cast kernel computes it while casting if possible, else `tensor()`.

    Args:
        matrix: lazy matrix [M, C].
        shape: shape [..., C] of the result.

    Shape:
        - `tensor()`: [..., C]

    Examples:
        >>> from dlp.kernels.ops import Activated
        >>> produced = ops.Produced(Activated(torch.zeros(16, 64), "relu"), (16, 64))
        >>> produced.tensor().shape
        torch.Size([16, 64])
    """

    __slots__ = ("matrix", "shape")

    def __init__(self, matrix: LazyMatrix, shape: Sequence[int]) -> None:
        self.matrix, self.shape = matrix, torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def dim(self) -> int:
        return len(self.shape)

    def tensor(self) -> Tensor:
        """Return the values [..., C], which the first call computes and stores."""
        return stored(self.matrix).view(self.shape)


class RmsNormed(LazyMatrix):
    """RMSNorm x * rstd * weight of x [rows, C] and weight [C]. `value` and `amax` compute rstd, fp32 [rows], in the same
    read of x; if neither was called, the first access to `rstd` computes it."""

    def __init__(self, x: Tensor, weight: Tensor, eps: float) -> None:
        self.matrix, self.weight, self.eps = x, weight, eps

    @cached_property
    def value(self) -> Tensor:
        y, self.rstd = rms_norm(self.matrix, self.weight, self.eps)
        return y

    @cached_property
    def rstd(self) -> Tensor:
        if fuses(None, self.matrix):
            return self._observed(None)
        return rms_norm(self.matrix, self.weight, self.eps)[1]

    def amax(self) -> Tensor | None:
        if not fuses(None, self.matrix):
            return None
        amax = torch.empty((), device=self.matrix.device)
        self.rstd = self._observed(amax)
        return amax

    def _observed(self, amax: Tensor | None) -> Tensor:
        rstd = torch.empty(len(self.matrix), device=self.matrix.device)
        cuda_producers.rms_norm(self.matrix, self.weight, self.eps, rstd, amax=amax)
        return rstd

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not fuses(codes, self.matrix):
            return self.value, MATRIX
        return self.matrix, cuda_producers.rms_norm_source(self.matrix, self.weight, self.rstd)


class AddedNormed(RmsNormed):
    """RMSNorm of the sum `matrix` = x + more [rows, C], which is rounded to the dtype of x. The first kernel that reads x and
    `more` (for rstd, the amax or the values) also writes `matrix`."""

    def __init__(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> None:
        self.x, self.more, self.weight, self.eps = x, more, weight, eps

    @property
    def like(self) -> Tensor:
        return self.x

    @cached_property
    def matrix(self) -> Tensor:  # type: ignore[override]
        if not fuses(None, self.x, self.more):
            return self.x + self.more
        self.rstd = self._observed(None)
        total: Tensor = vars(self)["matrix"]
        return total

    @cached_property
    def value(self) -> Tensor:
        if "matrix" in vars(self) or not fuses(None, self.x, self.more):
            y, self.rstd = rms_norm(self.matrix, self.weight, self.eps)
            return y
        y = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.rstd = self._observed(None, y)
        return y

    def amax(self) -> Tensor | None:
        if not fuses(None, self.x, self.more):
            return None
        amax = torch.empty((), device=self.device)
        self.rstd = self._observed(amax)
        return amax

    def _observed(self, amax: Tensor | None, y: Tensor | None = None) -> Tensor:
        if "matrix" in vars(self):
            return super()._observed(amax)
        rstd = torch.empty(len(self), device=self.device)
        total = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        cuda_producers.rms_norm(self.x, self.weight, self.eps, rstd, y=y, amax=amax, more=self.more, total=total)
        self.matrix = total
        return rstd


class Gated(LazyMatrix):
    """SwiGLU silu(gate) * up of gate and up [rows, C]."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self.matrix, self.up = gate, up

    @cached_property
    def value(self) -> Tensor:
        return swiglu(self.matrix, self.up)

    def amax(self) -> Tensor | None:
        if not fuses(None, self.matrix, self.up):
            return None
        amax = torch.empty((), device=self.matrix.device)
        cuda_producers.swiglu(self.matrix, self.up, amax=amax)
        return amax

    def source(self, codes: torch.dtype | None = None) -> Source:
        if not fuses(codes, self.matrix, self.up):
            return self.value, MATRIX
        return self.matrix, cuda_producers.swiglu_source(self.matrix, self.up)


class Summed(LazyMatrix):
    """Matrix x [rows, C], which may be lazy. The cast of x also computes the column sums of x; for x = dy these are the
    gradient of the bias."""

    def __init__(self, x: Tensor | LazyMatrix) -> None:
        self.x = x
        self._parts: Tensor | None = None

    @property
    def like(self) -> Tensor:
        return self.x if isinstance(self.x, Tensor) else self.x.like

    @property
    def matrix(self) -> Tensor:  # type: ignore[override]
        return stored(self.x)

    @property
    def value(self) -> Tensor:
        return self.matrix

    def amax(self) -> Tensor | None:
        return None if isinstance(self.x, Tensor) else self.x.amax()

    def source(self, codes: torch.dtype | None = None) -> Source:
        if isinstance(self.x, LazyMatrix):
            parts = cuda_producers.empty_parts(self.like)
            source = self.x.summed_source(parts, codes)
            if source is not None:
                self._parts = parts
                return source
            if codes is None:
                return self.x.source(None)
        if codes is None or self.matrix.dtype != FUSED_DTYPE or not has_kernel(self.matrix):
            return self.matrix, MATRIX
        self._parts = cuda_producers.empty_parts(self.matrix)
        return self.matrix, cuda_producers.column_sums_source(self.matrix, self._parts)

    def sums(self) -> Tensor:
        """Return the column sums of x, fp32 [C], after the cast: the sum over the tiles if the cast wrote column sums of tiles,
        else `column_sums` of x."""
        if self._parts is None:
            return column_sums(self.matrix)
        out = torch.empty(self.shape[1], device=self.device)
        cuda_producers.sum_parts(self._parts, out)
        return out
