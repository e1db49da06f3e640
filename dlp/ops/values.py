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

from torch import Tensor

from dlp.kernels.ops import Produced

LAZY, MANY, HANDED, INTEGERS = "lazy", "many", "handed", "integers"  # what an op may take beside a tensor
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


def like_leading(y: Tensor, shape: Sequence[int]) -> Tensor:
    """[rows, N] -> [..., N] with the leading dimensions of `shape` [..., C] but the first, along which ranks join or cut."""
    return y.view(-1, *shape[1:-1], y.shape[-1])


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they have bytes between first and last in common."""
    first, last = sorted((_bytes(one), _bytes(other)))
    return last[0] < first[1] and last[0] < last[1]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The address of the first, and behind the last; equal: there are none."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (span * tensor.element_size() if tensor.numel() else 0)
