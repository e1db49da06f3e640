"""What travels between the ops of one fuser: tensors, matrices that are still to be made, quantized tensors, tuples of these.

    Tensor     [..., C]
    Produced   [..., C], a matrix that the cast behind it may make on its way (`LazyMatrix`): it is stored where nothing does
    Handed     [..., C], quantized already: both operands of a linear behind it
    tuple      several, of siblings: one weight each

An op is given what it says it takes (`BasicOperation.takes`); for the others a value is stored first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlp.kernels.ops import LazyMatrix, stored

LAZY, MANY, HANDED = "lazy", "many", "handed"  # what an op may take beside a tensor


class Produced:
    """A matrix that is made when it is read, with the leading dimensions that it has outside."""

    __slots__ = ("matrix", "shape")

    def __init__(self, matrix: LazyMatrix, shape: Sequence[int]) -> None:
        self.matrix, self.shape = matrix, torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def tensor(self) -> Tensor:
        """The values themselves, computed once."""
        return stored(self.matrix).view(self.shape)


Value = Any  # Tensor | Produced | Handed | tuple of these


def tensor_of(value: Value) -> Tensor:
    """The values [..., C]; what is handed on stays so."""
    return value if isinstance(value, Tensor) else value.tensor()


def is_handed(value: Value) -> bool:
    """Whether it is quantized already (`dlp.ops.handed`)."""
    return hasattr(value, "operands")


def rows_of(value: Value) -> Any:
    """[M, C]: a matrix, or what makes one."""
    if isinstance(value, Produced):
        return value.matrix
    if is_handed(value):
        value = value.tensor()
    return value if value.dim() == 2 else value.reshape(-1, value.shape[-1])


def each(value: Value) -> tuple[Any, ...]:
    """The values of a tuple, or the one there is."""
    return value if isinstance(value, tuple) else (value,)


def joined(values: Sequence[Any], like: Value) -> Value:
    """Several values as a tuple where `like` is one."""
    return tuple(values) if isinstance(like, tuple) else values[0]
