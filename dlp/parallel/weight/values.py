"""What the casts of a step boundary read: weights as they are stored, or copies in the dtype and of the size that casts
want. Copies are kept from step to step, since launches know where they lie, and are renewed all at once: weights that are
only rounded in one multi-tensor call, padded ones in another.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Values:
    """The copies of one model, by the names of its weights."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._asked: dict[str, tuple[Tensor, Tensor]] = {}  # this time: the copy, and what it is made from

    def of(self, name: str, weight: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """The values of a weight [N, K] in `dtype`, with zeros appended up to `shape`: itself where it is that already,
        else a copy, which has them after the next `renew`."""
        if weight.dtype == dtype and weight.shape == shape:
            return weight
        kept = self._kept.get(name)
        if kept is None or (kept.dtype, kept.shape, kept.device) != (dtype, shape, weight.device):
            kept = torch.zeros(shape, dtype=dtype, device=weight.device)
        self._asked[name] = kept, weight
        return kept

    def renew(self) -> None:
        """Copy what was asked for since the last time, and forget what was not."""
        pairs = list(self._asked.values())
        for padded in (False, True):
            chosen = [(kept, weight) for kept, weight in pairs if (kept.shape != weight.shape) == padded]
            if chosen:
                torch._foreach_copy_([kept[: len(w), : w.shape[1]] for kept, w in chosen], [w for _, w in chosen])
        self._kept, self._asked = {name: kept for name, (kept, _) in self._asked.items()}, {}
