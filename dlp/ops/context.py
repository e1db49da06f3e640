"""OperationContext: values that one forward of a basic op keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

Saved = Tensor | None | Callable[[], Tensor]


class OperationContext:
    """Record that forward of a basic operation keeps for backward.

    An operation may set further attributes: values that are not tensors and that are equal in all calls with tensors of these
    shapes.

    Attributes:
        requires_grad: whether there will be a backward.
        needs_dx: whether backward must return the gradient of the input.
        to_save: arguments of `save_for_backward`.
        saved_tensors: these tensors, in backward.
        dirty: inputs that forward has written to.
        pass_tensors: tensors that a linear reads in this pass only; dropped afterwards.
        deferred: tensors of a backward whose wgrad is delayed.
        shared_addresses: addresses of gradients that several outputs share.

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
        """Keep tensors for backward, which finds them in `saved_tensors`. For a tensor that exists only after a later op has
        run, such as rstd of a lazy norm, pass a function that returns the tensor: the function is called after the forward of
        all ops."""
        self.to_save = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Mark the inputs that forward has written to, for autograd."""
        self.dirty = tensors


# The attributes of the class; all others in an instance were set by an op, or by the fuser for a linear.
OWN = frozenset(OperationContext.__annotations__) | {"requires_grad", "needs_dx"}
