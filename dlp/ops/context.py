"""OperationContext: what one forward of one basic op keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Saved = Tensor | None | Callable[[], Tensor]


class OperationContext:
    """requires_grad: there will be a backward; needs_dx: it makes the gradient of the op's input; own: its parameters, when
    it begins; given: tensors of this pass alone, dropped behind it; left: what a backward leaves to `end_backward`; shared:
    addresses of gradients that several outputs have. Attributes of an op's own hold what is no tensor and the same for every
    call with tensors of these shapes."""

    def __init__(self, requires_grad: bool = True, needs_dx: bool = True) -> None:
        self.requires_grad, self.needs_dx = requires_grad, needs_dx
        self.to_save: tuple[Saved, ...] = ()
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty: tuple[Tensor, ...] = ()
        self.given: tuple[Any, ...] = ()
        self.left: Sequence[Tensor] = ()
        self.own: Sequence[Tensor] = ()
        self.shared: set[int] = set()

    def save_for_backward(self, *tensors: Saved) -> None:
        """What backward finds as `saved_tensors`. A function among them is called when the forward of all ops is over: of what
        a later op makes on its way."""
        self.to_save = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Inputs that forward has written to; an output that is one of them says so to autograd."""
        self.dirty = tensors
