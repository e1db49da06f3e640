"""Matrices that a cast makes on its way: they stand where casts and amaxes of `dlp.kernels.ops` take a tensor.

    RmsNormed   x * rstd * weight
    AddedNormed the same of x + more, which is stored
    Gated       silu(gate) * up
    Summed      a gradient as it is, the sums of whose columns are taken beside its cast

A kernel that can makes their elements from what it reads, so that they are never stored. For any other cast, and on a
CPU, they are computed by themselves, once. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dlp.kernels import cuda_producers
from dlp.kernels.cuda import MATRIX, Words
from dlp.kernels.producers import column_sums, has_kernel, rms_norm, swiglu

FUSED_DTYPE = torch.bfloat16  # of what producers inside casts read
ACTIVATION_CODES = (torch.float8_e4m3fn,)  # that activations are cast to there
GRADIENT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
Source = tuple[Tensor, Words]


class LazyMatrix:
    """A matrix [rows, C] that a cast can make from others; `matrix` is the first of them, of its shape and dtype, and `like`
    any such tensor that is there."""

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
        """The matrix itself, computed and stored."""
        raise NotImplementedError

    def amax(self) -> Tensor | None:
        """max |x| of the matrix as fp32 [], without storing it; None where that has to be."""
        return None

    def source(self, codes: torch.dtype | None = None) -> Source:
        """What a kernel that casts to `codes`, or that observes (None), is given: a matrix, and what it makes of it (words
        of `cuda_producers`; none: the matrix is as it is)."""
        raise NotImplementedError

    def summed_source(self, parts: Tensor, codes: torch.dtype | None) -> Source | None:
        """The same of a cast that takes the sums of columns as well (`cuda_producers.empty_parts`); None: it takes none."""
        return None


def stored(x: Tensor | LazyMatrix) -> Tensor:
    """The matrix itself."""
    return x if isinstance(x, Tensor) else x.value


def opened(x: Tensor | LazyMatrix, codes: torch.dtype | None = None, *, makes: bool = True) -> Source:
    """`LazyMatrix.source`, or where the kernel does not make what it casts the matrix itself; a tensor is itself."""
    if isinstance(x, Tensor):
        return x, MATRIX
    return x.source(codes) if makes else (x.value, MATRIX)


def fuses(codes: torch.dtype | None, *matrices: Tensor, casts: Sequence[torch.dtype] = ACTIVATION_CODES) -> bool:
    """Whether a kernel that casts to `codes`, one of `casts`, or that observes (None), makes what it casts of these."""
    known = codes is None or codes in casts
    return known and all(x.dtype == FUSED_DTYPE for x in matrices) and has_kernel(*matrices)


class Produced:
    """A matrix that is made when it is read, with the leading dimensions that it has outside: [..., C]."""

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
        """The values themselves, computed once."""
        return stored(self.matrix).view(self.shape)


class RmsNormed(LazyMatrix):
    """x * rstd * weight, of x [rows, C] and weight [C]. rstd fp32 [rows] is computed when it is first needed: in the read
    that takes the amax, where that is asked for."""

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
    """That of the sum of x and more [rows, C], which is rounded to their dtype: `matrix`, written in the read that first needs
    its rows."""

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
    """silu(gate) * up, of gate and up [rows, C]."""

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
    """x [rows, C] as it is, which may be still to be made; its cast takes the sums of its columns, which is what the bias of a
    linear gets."""

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
            found = self.x.summed_source(parts, codes)
            if found is not None:
                self._parts = parts
                return found
            if codes is None:
                return self.x.source(None)
        if codes is None or self.matrix.dtype != FUSED_DTYPE or not has_kernel(self.matrix):
            return self.matrix, MATRIX
        self._parts = cuda_producers.empty_parts(self.matrix)
        return self.matrix, cuda_producers.column_sums_source(self.matrix, self._parts)

    def sums(self) -> Tensor:
        """`column_sums` of x: of the tiles of its cast, after that, where it was one that takes them."""
        if self._parts is None:
            return column_sums(self.matrix)
        out = torch.empty(self.shape[1], device=self.device)
        cuda_producers.sum_parts(self._parts, out)
        return out
