"""Values: what ops of one fuser pass to each other.

    Tensor     [..., C]
    Produced   [..., C], lazy: a result that the cast of the linear behind it may compute (`dlp.kernels.lazy_matrix`)
    Handed     [..., C], quantized already: both operands for the linear behind it (`dlp.ops.handed`)
    tuple      of siblings, one value for each weight

`BasicOperation.takes` says which of them an op takes beside tensors. For other ops the fuser stores lazy values and decodes
quantized ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import Produced

LAZY, MANY, HANDED, INTEGERS = "lazy", "many", "handed", "integers"  # elements of `BasicOperation.takes`
Grads = Sequence[Sequence[Tensor | None]]  # of each basic operation, None: no gradient
Tensors = Tensor | tuple[Tensor, ...]  # of one weight, or of siblings and extra outputs
Value = Any  # Tensor | Produced | Handed | tuple of these


def one_tensor(x: Tensors) -> Tensor:
    """Return x, which must be one tensor and not a tuple of siblings."""
    assert isinstance(x, Tensor), "this operation takes one tensor"
    return x


def tensor_of(value: Value) -> Tensor:
    """The value as a tensor [..., C]: a lazy one is computed and stored; a `Handed` is a tensor, and stays quantized."""
    return value if isinstance(value, Tensor) else value.tensor()


def is_handed(value: Value) -> bool:
    """Whether a value is a `dlp.ops.handed.Handed`, quantized already."""
    return hasattr(value, "operands")


def rows_of(value: Value) -> Any:
    """The value as a matrix [M, C]: the `LazyMatrix` of a lazy one; a quantized one is decoded."""
    if isinstance(value, Produced):
        return value.matrix
    if is_handed(value):
        value = value.tensor()
    return value if value.dim() == 2 else value.reshape(value.shape[:-1].numel(), value.shape[-1])


def each(value: Value) -> tuple[Any, ...]:
    """The values of siblings as a tuple; of one value the tuple of it."""
    return value if isinstance(value, tuple) else (value,)


def like_tuple(values: Sequence[Any], like: Value) -> Value:
    """The inverse of `each`: `values` as a tuple if `like` is a tuple, else the only one of them."""
    return tuple(values) if isinstance(like, tuple) else values[0]


def with_leading_dims(y: Tensor, shape: Sequence[int]) -> Tensor:
    """y [M, N] as [..., N], with the leading dimensions of `shape` [..., C]. The first of these follows from M, since a gather
    or a reduce-scatter along it has changed it."""
    return y.view(-1, *shape[1:-1], y.shape[-1])


def share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether the memory between the first and the last element of one overlaps that of the other."""
    first, last = sorted((_bytes(one), _bytes(other)))
    return last[0] < first[1] and last[0] < last[1]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The addresses where the memory of a tensor begins and ends; equal if it has no elements."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (span * tensor.element_size() if tensor.numel() else 0)
