"""The state of delayed scaling: one table of slots, one slot a tensor that is cast with a delayed scale.

`scale` and `staging` are one fp32 tensor each over all slots, so that one all-reduce agrees on everything and casts
read and max views into them. Histories are kept per length and algorithm, [L, n] each, so that an update is a few
vectorised passes however many slots there are, and on a GPU one launch. No process group: who calls `update` has
reduced the staging row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.quantizer import ScaleSlot, SlotOptions

SlotState = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class _Kind:
    """Neighbouring slots with one history length and algorithm: their span in the table, history [L, n], target [n]."""

    span: slice
    history: Tensor
    target: Tensor
    options: SlotOptions


class SlotTable:
    """Slots by name. `names`: in table order. `scale`, `staging`: fp32 [slots], updated in place.

    The order follows from the names' order in `slots` and their options, so equal models have equal tables.
    """

    def __init__(self, slots: Mapping[str, SlotOptions], device: torch.device | str = "cpu") -> None:
        kinds: dict[tuple[int, object], list[str]] = {}
        for name, options in slots.items():
            kinds.setdefault((options.amax_history_len, options.amax_compute_algo), []).append(name)
        self.options = dict(slots)
        self.names = tuple(name for members in kinds.values() for name in members)
        self.scale = torch.ones(len(self.names), device=device)
        self.staging = torch.zeros(len(self.names), device=device)
        self._update: Callable[[], None] | None = None
        self._index = {name: i for i, name in enumerate(self.names)}
        self._kinds = [self._kind([slots[name] for name in members], members[0]) for members in kinds.values()]

    def __getstate__(self) -> dict[str, Any]:
        """An update is prepared for the tensors of one table."""
        return vars(self) | {"_update": None}

    def _kind(self, options: Sequence[SlotOptions], first: str) -> _Kind:
        start, device = self._index[first], self.scale.device
        target = torch.tensor([slot.fp8_max * 2.0**-slot.margin for slot in options], device=device)
        history = torch.zeros(options[0].amax_history_len, len(options), device=device)
        return _Kind(slice(start, start + len(options)), history, target, options[0])

    def slot(self, name: str) -> ScaleSlot:
        """What a cast of this tensor reads and writes: views that stay valid over updates."""
        i = self._index[name]
        return ScaleSlot(self.scale[i], self.staging[i])

    def index(self, name: str) -> int:
        """The place of a slot in `scale` and `staging`."""
        return self._index[name]

    def update(self, reduced: Tensor) -> None:
        """The step boundary: `reduced` fp32 [slots], the staging row after its MAX all-reduce, enters the histories,
        the scales follow from them, and staging starts again at 0. One launch on a GPU, if `reduced` is `staging`."""
        if reduced is not self.staging:
            self.staging.copy_(reduced)
        self._update = self._update or ops.delayed_updates([self._slots(kind) for kind in self._kinds])
        self._update()

    def _slots(self, kind: _Kind) -> ops.DelayedSlots:
        """What an update reads and writes: tensors that stay where they are."""
        scale, staging = self.scale[kind.span], self.staging[kind.span]
        return ops.DelayedSlots(kind.history, scale, staging, kind.target, staging, kind.options.amax_compute_algo)

    def state_dict(self) -> SlotState:
        """name -> scale [] and history [L] (oldest second, newest last; the first is the empty staging row), copies."""
        return {
            name: {"scale": self.scale[kind.span][i].clone(), "history": kind.history[:, i].clone()}
            for kind in self._kinds
            for i, name in enumerate(self.names[kind.span])
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over a state by slot name; ValueError where names or history lengths differ."""
        self.load_merged([state])

    def load_merged(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Takes over the states of ranks that had different scales: the maximum of their histories, and the scales
        that follow from it (the smallest of theirs where it says nothing). One state is taken as it is."""
        for state in states:
            self._check(state)
        for kind in self._kinds:
            names = self.names[kind.span]
            history = torch.stack([torch.stack([state[name]["history"] for name in names], 1) for state in states])
            scale = torch.stack([torch.stack([state[name]["scale"] for name in names]) for state in states])
            kind.history.copy_(history.amax(0))
            self.scale[kind.span].copy_(scale.amin(0))
            if len(states) > 1:
                self.scale[kind.span].copy_(
                    ops.delayed_scale(
                        kind.history[1:], self.scale[kind.span], kind.target, kind.options.amax_compute_algo
                    )
                )
        self.staging.zero_()

    def adopt(self, other: SlotTable) -> None:
        """Takes over what another table holds, staging included, of slots that both have with the same options."""
        held = {name: (kind, i) for kind in other._kinds for i, name in enumerate(other.names[kind.span])}
        for kind in self._kinds:
            for i, name in enumerate(self.names[kind.span]):
                if other.options.get(name) == self.options[name]:
                    old, at = held[name]
                    kind.history[:, i] = old.history[:, at]
                    self.scale[self.index(name)] = other.scale[other.index(name)]
                    self.staging[self.index(name)] = other.staging[other.index(name)]

    def _check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        if missing := sorted(set(self.names) - state.keys()):
            raise ValueError(f"saved scaling state has no slot {missing[0]!r} ({len(missing)} missing in all)")
        if unknown := sorted(state.keys() - set(self.names)):
            raise ValueError(
                f"saved scaling state has a slot {unknown[0]!r} that the model lacks ({len(unknown)} in all)"
            )
        for kind in self._kinds:
            for name in self.names[kind.span]:
                saved, wanted = len(state[name]["history"]), len(kind.history)
                if saved != wanted:
                    raise ValueError(
                        f"slot {name!r} was saved with amax_history_len {saved}, the recipe has {wanted}; "
                        f"set amax_history_len = {saved}"
                    )
