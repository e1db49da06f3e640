"""Which forward a recomputation repeats.

A layer that runs in an activation checkpoint runs again in backward, perhaps after other forwards, and then under what the
first run had: its spec, and its delayed scales. What a layer ran under is kept for each checkpoint it ran in, in the order
of its calls, and goes with the checkpoint.

This is the only file that touches what is private in torch.utils.checkpoint. One with `use_reentrant=False` works by hooks
on saved tensors, on a stack of this thread while its function runs, and they know its frame. One with `use_reentrant=True`
leaves nothing to know it by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from inspect import unwrap
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

Ran = TypeVar("Ran")
_FRAME, _FRAME_AGAIN = "frame", "target_frame_ref"  # what the hooks of a first run and of a recomputation refer to


class Checkpoint(NamedTuple):
    """A checkpoint whose function is running. `hook` stands for this run of it; `again`: it is a recomputation."""

    frame: Any
    hook: Any
    again: bool


def running() -> list[Checkpoint]:
    """The checkpoints around what runs now, outermost first."""
    hooks = torch._C._autograd
    if hooks._top_saved_tensors_default_hooks(True) is None:
        return []
    pairs = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        pairs.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(pairs):
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return [found for pack, _ in reversed(pairs) if (found := _checkpoint(pack)) is not None]


def _checkpoint(pack: Any) -> Checkpoint | None:
    """That of a hook, if it is one of a checkpoint."""
    inner = unwrap(pack)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None)
    if code is None or not cells or inner.__module__ != checkpoint.__name__:
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if _FRAME_AGAIN in held:
        return Checkpoint(held[_FRAME_AGAIN](), pack, True)
    return Checkpoint(held[_FRAME], pack, False) if _FRAME in held else None


class Recomputations(Generic[Ran]):
    """What was run in checkpoints, by who ran it."""

    def __init__(self) -> None:
        self._ran: WeakKeyDictionary[Any, dict[Hashable, list[Ran]]] = WeakKeyDictionary()
        self._again: WeakKeyDictionary[Any, Counter[Hashable]] = WeakKeyDictionary()

    def keep(self, who: Hashable, ran: Ran, checkpoints: Sequence[Checkpoint]) -> None:
        """This ran in these checkpoints."""
        for each in checkpoints:
            if not each.again:
                self._ran.setdefault(each.frame, {}).setdefault(who, []).append(ran)

    def next(self, who: Hashable, checkpoints: Sequence[Checkpoint]) -> Ran | None:
        """What the innermost recomputation now repeats; None where nobody can tell."""
        again = next((each for each in reversed(checkpoints) if each.again), None)
        if again is None:
            return None
        kept, count = self._ran.get(again.frame, {}).get(who, ()), self._again.setdefault(again.hook, Counter())
        count[who] += 1
        return kept[count[who] - 1] if count[who] <= len(kept) else None
