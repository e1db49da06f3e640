"""What siblings share: the first call with an x computes the y of all, the others bring the same x and collect theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlp.parallel.model.autocast import active_region


def moment(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What the y of these tensors depends on beside who they are: their values, as far as torch counts changes in place
    (it does not for tensors made in inference mode, nor in a graph that it compiles), and how a layer runs now."""
    now = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    if torch.compiler.is_dynamo_compiling():
        return now
    try:
        return *now, active_region(), *[given._version for given in inputs]
    except RuntimeError:  # of inference mode
        return *now, active_region()


class SharedCall:
    """The y_i that one call has made and nobody has collected yet."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The weights changed: nobody may collect the rest."""
        self._inputs: tuple[Tensor, ...] = ()
        self._moment: tuple[Any, ...] = ()
        self._ys: dict[int, Tensor] = {}

    def holds(self, index: int, now: tuple[Any, ...]) -> bool:
        """Whether this member's y is there and would be the same if it were made now."""
        return index in self._ys and now == self._moment

    def reads(self, inputs: Sequence[Tensor]) -> bool:
        """Whether it was made of these tensors."""
        return all(given is first for given, first in zip(inputs, self._inputs, strict=True))

    def keep(self, inputs: tuple[Tensor, ...], now: tuple[Any, ...], ys: Sequence[Tensor]) -> None:
        self._inputs, self._moment, self._ys = inputs, now, dict(enumerate(ys))

    def collect(self, index: int) -> Tensor:
        y = self._ys.pop(index)
        if not self._ys:
            self.forget()
        return y
