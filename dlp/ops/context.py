"""OperationContext: values that the forward of a basic op stores for its backward, as `ctx` in torch.autograd.Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

Saved = Tensor | None | Callable[[], Tensor]


class OperationContext:
    """Values that the forward of a basic operation stores for its backward, as `ctx` in torch.autograd.Function.

    An operation may set further attributes. Their values must not be tensors, and must be equal in all calls with tensors of
    the same shapes.

    Attributes:
        requires_grad: whether the backward of this operation will run.
        needs_dx: whether backward must return the gradient of the input.
        to_save: tensors passed to `save_for_backward`, until they are saved.
        saved_tensors: the saved tensors, in backward.
        dirty: inputs that forward has written to (`mark_dirty`).
        pass_tensors: weights and operands that a linear reads in the current pass; empty in other operations.
        deferred: operands of a delayed wgrad, in the backward of a linear with delay_wgrad.
        shared_addresses: addresses of gradient tensors that autograd passed for more than one output: do not write to them.

    Examples:
        >>> ctx = ops.OperationContext()
        >>> ctx.save_for_backward(torch.ones(2))
        >>> len(ctx.to_save)
        1
    """

    requires_grad = True
    needs_dx = True
    to_save: tuple[Saved, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    dirty: tuple[Tensor, ...] = ()
    pass_tensors: tuple[Any, ...] = ()
    deferred: Sequence[Tensor] = ()
    shared_addresses: Set[int] = frozenset()

    if TYPE_CHECKING:  # further attributes, which operations set

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

    def save_for_backward(self, *tensors: Saved) -> None:
        """Save tensors for backward, where they are in `saved_tensors`. For a tensor that a later operation computes, such as
        rstd of a norm that the next cast computes, pass a function that returns the tensor. The function is called after the
        forward of all operations."""
        self.to_save = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Tell autograd which inputs forward has written to."""
        self.dirty = tensors


# Names of the attributes of the class. Other attributes of an instance were set by an op, or by the fuser for a linear.
OWN = frozenset(OperationContext.__annotations__) | {"requires_grad", "needs_dx"}
