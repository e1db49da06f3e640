"""Kinds of values that the ops of a fuser pass to each other.

    Tensor     [..., C]
    Produced   [..., C], lazy: not computed yet; the cast of the next linear may compute it (`dlp.kernels.lazy_matrix`)
    Handed     [..., C], quantized: the rowwise and the columnwise operand for the next linear (`dlp.ops.handed`)
    tuple      one of these values for each sibling

`BasicOperation.takes` names the kinds that an op takes besides tensors. Before an op that does not take them, the fuser stores
lazy values and decodes quantized values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import Produced

LAZY, MANY, HANDED, INTEGERS = "lazy", "many", "handed", "integers"  # elements of `BasicOperation.takes`
Grads = Sequence[Sequence[Tensor | None]]  # gradients by basic operation; None: no gradient
Tensors = Tensor | tuple[Tensor, ...]  # one tensor, or a tuple for siblings or extra outputs
Value = Any  # Tensor | Produced | Handed | tuple of these types


def one_tensor(x: Tensors) -> Tensor:
    """Return x; raise AssertionError if it is a tuple of siblings."""
    assert isinstance(x, Tensor), "this operation takes one tensor"
    return x


def tensor_of(value: Value) -> Tensor:
    """Return the value as a tensor [..., C]: compute and store a lazy value. A `Handed` is a tensor, and stays quantized."""
    return value if isinstance(value, Tensor) else value.tensor()


def is_handed(value: Value) -> bool:
    """Whether a value is a `dlp.ops.handed.Handed`, which is quantized."""
    return hasattr(value, "operands")


def rows_of(value: Value) -> Any:
    """Return the value as a matrix [M, C]: the `LazyMatrix` of a lazy value, the decoded values of a `Handed`."""
    if isinstance(value, Produced):
        return value.matrix
    if is_handed(value):
        value = value.tensor()
    return value if value.dim() == 2 else value.reshape(value.shape[:-1].numel(), value.shape[-1])


def each(value: Value) -> tuple[Any, ...]:
    """Return the values of siblings as a tuple; a single value as a tuple of length 1."""
    return value if isinstance(value, tuple) else (value,)


def like_tuple(values: Sequence[Any], like: Value) -> Value:
    """Return `values` as a tuple if `like` is a tuple, else the only value; the inverse of `each`."""
    return tuple(values) if isinstance(like, tuple) else values[0]


def with_leading_dims(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape y [M, N] to [..., N], with the leading dimensions of `shape` [..., C] except the first, which is computed from M,
    since a gather or reduce-scatter may have changed it."""
    return y.view(-1, *shape[1:-1], y.shape[-1])


def share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap. A range extends from the first to the last element."""
    first, last = sorted((_bytes(one), _bytes(other)))
    return last[0] < first[1] and last[0] < last[1]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses at which the memory range of a tensor begins and ends; equal for a tensor without elements."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (span * tensor.element_size() if tensor.numel() else 0)
