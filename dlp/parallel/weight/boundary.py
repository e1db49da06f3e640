"""The casts of a step boundary, of all weights of a model: their values are rounded together (`Values`), then observed, agreed
on and cast in one `CastBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.parallel.casts import Cast, CastBatch
from dlp.quant.quantizer import Wanted


class Values:
    """What these casts read: weights as they are stored, or copies in the dtype and of the size that casts want.

    The copies of one model, by the names of its weights, are kept from step to step, since launches know where they lie, and
    are renewed all at once: weights that are only rounded in one multi-tensor call, padded ones in another.
    """

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


class Castable(Protocol):
    """A weight, as the step boundary sees it (see `dlp.parallel.weight.local.Weight`)."""

    fresh: bool

    @property
    def owner(self) -> Any: ...

    def casts(self, values: Values) -> list[Cast]: ...

    def take(self, made: Sequence[Wanted]) -> None: ...

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None: ...


class WeightBatch:
    """What one model keeps for this from step to step."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


@torch.inference_mode(False)  # later boundaries write into what this one has made
@torch.no_grad()
def refresh(runtime: Any, weights: Sequence[Castable]) -> None:
    """Cast these weights of a model; all ranks call it together."""
    runtime.weight_batch = batch = runtime.weight_batch or WeightBatch()
    wanted = [(weight, casts) for weight in weights if (casts := weight.casts(batch.values))]
    batch.values.renew()
    made = iter(batch.casts.make([cast for _, casts in wanted for cast in casts]))
    for weight, casts in wanted:
        weight.take([next(made) for _ in casts])
    _share([staged for weight, _ in wanted if (staged := weight.staged()) is not None])
    for weight in weights:
        weight.fresh = True
    runtime.stale.cast(list(dict.fromkeys(weight.owner for weight, _ in wanted)))


def _share(staged: Sequence[tuple[ProcessGroup, list[Tensor]]]) -> None:
    """Agree on what casts have staged, over these groups."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for group, its in staged:
        by_group.setdefault(group, []).extend(its)
    for group, amaxes in by_group.items():
        torch._foreach_copy_(amaxes, agree(amaxes, group))
