"""Values that ops of one fuser pass to each other.

    Tensor     [..., C]
    Produced   [..., C], lazy: a result that the cast of the next linear may compute (`dlp.kernels.lazy_matrix`)
    Handed     [..., C], quantized already: both operands for the next linear (`dlp.ops.handed`)
    tuple      values of siblings, one for each weight

`BasicOperation.takes` names the values that an op takes besides tensors. For other ops the fuser first stores lazy values and
decodes quantized values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import Produced

LAZY, MANY, HANDED, INTEGERS = "lazy", "many", "handed", "integers"  # elements of `BasicOperation.takes`
Grads = Sequence[Sequence[Tensor | None]]  # gradients by basic operation; None: no gradient
Tensors = Tensor | tuple[Tensor, ...]  # one tensor for one weight; a tuple for siblings or extra outputs
Value = Any  # Tensor | Produced | Handed | tuple of these types


def one_tensor(x: Tensors) -> Tensor:
    """Return x, which must be one tensor and not a tuple of siblings."""
    assert isinstance(x, Tensor), "this operation takes one tensor"
    return x


def tensor_of(value: Value) -> Tensor:
    """The value as a tensor [..., C]: a lazy value is computed and stored; a `Handed` is a tensor, and stays quantized."""
    return value if isinstance(value, Tensor) else value.tensor()


def is_handed(value: Value) -> bool:
    """Whether a value is a `dlp.ops.handed.Handed`, quantized already."""
    return hasattr(value, "operands")


def rows_of(value: Value) -> Any:
    """The value as a matrix [M, C]: the `LazyMatrix` of a lazy value; a quantized value is decoded."""
    if isinstance(value, Produced):
        return value.matrix
    if is_handed(value):
        value = value.tensor()
    return value if value.dim() == 2 else value.reshape(value.shape[:-1].numel(), value.shape[-1])


def each(value: Value) -> tuple[Any, ...]:
    """The values of siblings as a tuple; a single value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def like_tuple(values: Sequence[Any], like: Value) -> Value:
    """The inverse of `each`: `values` as a tuple if `like` is a tuple, else the only value."""
    return tuple(values) if isinstance(like, tuple) else values[0]


def with_leading_dims(y: Tensor, shape: Sequence[int]) -> Tensor:
    """y [M, N] as [..., N], with the leading dimensions of `shape` [..., C]. The first dimension follows from M, since a
    gather or reduce-scatter may have changed it."""
    return y.view(-1, *shape[1:-1], y.shape[-1])


def share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors overlap in memory, from the first to the last element of each."""
    first, last = sorted((_bytes(one), _bytes(other)))
    return last[0] < first[1] and last[0] < last[1]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The addresses at which the memory of a tensor begins and ends; equal for a tensor without elements."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (span * tensor.element_size() if tensor.numel() else 0)
