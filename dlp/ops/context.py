"""OperationContext: what one forward of one basic op keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor

Saved = Tensor | None | Callable[[], Tensor]


class OperationContext:
    """requires_grad: there will be a backward; needs_dx: it makes the gradient of the op's input; given: tensors of this pass
    alone, dropped behind it; left: what a backward leaves to `end_backward`; shared: addresses of gradients that several
    outputs have. Attributes of an op's own hold what is no tensor and the same for every
    call with tensors of these shapes."""

    requires_grad = True
    needs_dx = True
    to_save: tuple[Saved, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    dirty: tuple[Tensor, ...] = ()
    given: tuple[Any, ...] = ()
    left: Sequence[Tensor] = ()
    shared: Set[int] = frozenset()

    def save_for_backward(self, *tensors: Saved) -> None:
        """What backward finds as `saved_tensors`. A function among them is called when the forward of all ops is over: of what
        a later op makes on its way."""
        self.to_save = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Inputs that forward has written to; an output that is one of them says so to autograd."""
        self.dirty = tensors


OWN = frozenset(OperationContext.__annotations__) | {"requires_grad", "needs_dx"}  # what is no attribute of an op's own
