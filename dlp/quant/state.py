"""State of delayed scaling: a table with one slot for each tensor that is cast with a delayed scale.

    scale      fp32 [slots]   scales that casts read
    staging    fp32 [slots]   maximum of the amaxes since the last update; 0 if there was no cast
    history    fp32 [L, n]    amaxes of earlier steps, oldest first, for the n slots with the same history length L and amax
                              algorithm; row 0 is always 0. A column skips the steps in which the slot was not used

`scale` and `staging` are one tensor each for all slots, and casts use views of these tensors. One all-reduce of `staging` is
therefore enough for all scales. An update is a few vectorized operations for any number of slots; on a GPU it is one launch.

`ScalingState` is the state of one model. It contains neither layers nor process groups: slots have names, and the caller of
`update` passes a function that reduces `staging` over ranks. Casts of x and w in backward and in recomputation use the scales
of the forward of the same microbatch (`ForwardScales`), even if the table has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.quantizer import ScaleSlot, SlotOptions

SlotState = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class _Kind:
    """The n consecutive slots of a table that have the same history length and algorithm.

    span      indices of the slots in the table
    history   fp32 [L, n]
    target    fp32 [n], fp8_max * 2^-margin of each slot, to which the scale maps the amax
    options   options of the first slot; history length and algorithm are valid for all n slots
    """

    span: slice
    history: Tensor
    target: Tensor
    options: SlotOptions


class SlotTable:
    """Table of slots.

    names     names of the slots, in the order of the table
    options   options of each slot, by name
    scale     fp32 [slots], updated in place
    staging   fp32 [slots], updated in place

    The order of the table depends only on the order of names in `slots` and on the options, so that equal models have equal
    tables on all ranks.
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
        """Return the state for a copy or pickle, without the cached update function, which is bound to the tensors of this
        table."""
        return vars(self) | {"_update": None}

    def _kind(self, options: Sequence[SlotOptions], first: str) -> _Kind:
        start, device = self._index[first], self.scale.device
        target = torch.tensor([slot.fp8_max * 2.0**-slot.margin for slot in options], device=device)
        history = torch.zeros(options[0].amax_history_len, len(options), device=device)
        return _Kind(slice(start, start + len(options)), history, target, options[0])

    def slot(self, name: str) -> ScaleSlot:
        """Return the slot with this name, as views of the table, which stay valid after updates."""
        place = self.place(name)
        return ScaleSlot(self.scale[place], self.staging[place])

    def place(self, name: str) -> int | slice:
        """Return the index of a slot in `scale` and `staging`. For a scale of two numbers, return a slice of two indices: the
        next slot of the table has the second number (`dlp.parallel.linear.spec.delayed_slots`)."""
        i, numbers = self._index[name], self.options[name].numbers
        return i if numbers == 1 else slice(i, i + numbers)

    def index(self, name: str) -> int:
        """Return the index of a slot in `scale` and `staging`."""
        return self._index[name]

    def update(self, reduced: Tensor) -> None:
        """Append `reduced` to the histories, compute the scales from the histories, and zero `staging`. A slot for which
        `reduced` is 0 was not used: its history and scale do not change.

        reduced   fp32 [slots], `staging` after the MAX all-reduce over ranks. Passing the tensor `staging` itself saves a copy
        """
        if reduced is not self.staging:
            self.staging.copy_(reduced)
        self._update = self._update or ops.delayed_updates([self._slots(kind) for kind in self._kinds])
        self._update()

    def _slots(self, kind: _Kind) -> ops.DelayedSlots:
        """Return the tensors that an update of these slots reads and writes, as views of the table."""
        scale, staging = self.scale[kind.span], self.staging[kind.span]
        return ops.DelayedSlots(kind.history, scale, staging, kind.target, staging, kind.options.amax_compute_algo)

    def state_dict(self) -> SlotState:
        """Return for each name copies of scale [], history [L] and target [].

        Entry 0 of the history is 0, entry 1 is the oldest amax. The scale maps the amax to the target, fp8_max *
        2^-margin.
        """
        return {
            name: {
                "scale": self.scale[kind.span][i].clone(),
                "history": kind.history[:, i].clone(),
                "target": kind.target[i].clone(),
            }
            for kind in self._kinds
            for i, name in enumerate(self.names[kind.span])
        }

    def load_merged(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Merge and load the states of ranks with different scales. A single state is loaded unchanged. Each state must have
        all slots of this table, and these slots must fit (`fits`).

        The merged history is the maximum over the ranks, and scales are computed from the merged history. A slot whose merged
        history contains only zeros gets the smallest scale of all ranks."""
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

    def fits(self, name: str, slot: Mapping[str, Tensor]) -> bool:
        """Return whether the saved slot `slot` has the history length and target of the slot `name` of this table. The tensors
        of the saved slot may have leading dimensions, for several ranks."""
        kind = next(kind for kind in self._kinds if self._index[name] in range(kind.span.start, kind.span.stop))
        target = kind.target[self._index[name] - kind.span.start]
        stated = slot.get("target", target)
        return slot["history"].shape[-1] == len(kind.history) and bool((stated == target).all())

    def load_known(self, state: Mapping[str, Mapping[str, Tensor]]) -> SlotState:
        """Load the slots of a state that exist in this table and fit (`fits`). Return the other slots of the state."""
        known = {name for name in self.names if name in state and self.fits(name, state[name])}
        if known:
            fresh = self.state_dict()
            self.load_merged([{name: state[name] if name in known else fresh[name] for name in self.names}])
        return {name: dict(slot) for name, slot in state.items() if name not in known}

    def adopt(self, other: SlotTable) -> None:
        """Copy scale, staging and history from another table, for the slots that have the same name and options in both."""
        place = {name: (kind, i) for kind in other._kinds for i, name in enumerate(other.names[kind.span])}
        for kind in self._kinds:
            for i, name in enumerate(self.names[kind.span]):
                if other.options.get(name) == self.options[name]:
                    old, at = place[name]
                    kind.history[:, i] = old.history[:, at]
                    self.scale[self.index(name)] = other.scale[other.index(name)]
                    self.staging[self.index(name)] = other.staging[other.index(name)]


class SlotUse(NamedTuple):
    """Description of one delayed scale, for the construction of `ScalingState`.

    options   options of the slot
    forward   True if forward casts with this scale (x, w), False if backward does (dy)
    agreed    whether ranks agree on the scale
    """

    options: SlotOptions
    forward: bool
    agreed: bool


class ScalingState:
    """Delayed scales of one model.

    table             the slots
    forward, agreed   bool [slots], see `SlotUse`
    unread            fp32 [], used as `staging` by casts whose amax must not be recorded
    any_agreed        whether ranks agree on any scale

    After a step boundary, `staging` contains the amaxes of the weights that the boundary cast.
    """

    def __init__(self, slots: Mapping[str, SlotUse], device: torch.device | str = "cpu") -> None:
        self.table = SlotTable({name: use.options for name, use in slots.items()}, device)
        uses = [slots[name] for name in self.table.names]
        self.forward = torch.tensor([use.forward for use in uses], dtype=torch.bool).to(device)
        self.agreed = torch.tensor([use.agreed for use in uses], dtype=torch.bool).to(device)
        self.unread = torch.zeros((), device=device)
        self.any_agreed = any(use.agreed for use in uses)
        self._cast_by_forward = frozenset(name for name, use in slots.items() if use.forward)
        self._gone: dict[tuple[str, SlotOptions], Tensor] = {}  # last scales of slots that recipe changes removed
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Drop cached views and masks, and the `ForwardScales` of earlier forwards."""
        self._views: dict[str, ScaleSlot] = {}  # name -> cached views of the table
        self._masks: dict[tuple[bool, ...], Tensor] = {}  # mask of slots -> the same mask as a tensor, bool [slots]
        # Scales of the forwards since the last change of scales, by the argument `behind` of `hold`
        self._held: dict[Hashable, ForwardScales] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, without cached views and masks, and without `ForwardScales`."""
        return vars(self) | {"_views": {}, "_masks": {}, "_held": {}}

    @property
    def memory(self) -> list[Tensor]:
        """Tensors that casts with delayed scales read and write."""
        return [self.table.scale, self.table.staging, self.unread]

    def slot(
        self, name: str, record: bool, scales: ForwardScales | None = None, options: SlotOptions | None = None
    ) -> ScaleSlot:
        """Return the slot for a cast of one tensor.

        Args:
            name: name of the slot.
            record: whether the cast records its amax in the table.
            scales: scales of the forward that is recomputed or differentiated. They replace the scales of the table for casts
                of forward, if the table has changed since this forward.
            options: options that the cast expects. If the table has no slot with these options, a recipe change removed the
                slot while a backward was pending. Then the last scale of the removed slot is used, and the amax is not
                recorded.
        """
        if scales is not None and scales.values is not None and name in scales.state._cast_by_forward:
            return scales.slot(name)
        if options is not None and self.table.options.get(name) != options:
            return ScaleSlot(self._gone[name, options], self.unread)
        slot = self._views.get(name)
        if slot is None:
            slot = self._views[name] = self.table.slot(name)
        return slot if record else ScaleSlot(slot.scale, self.unread)

    def hold(self, behind: Hashable) -> ForwardScales:
        """Return the `ForwardScales` of a forward that begins now. Forwards with equal `behind` share one object until the
        scales change.

        behind   work that the caller runs after the backward of this forward, as a hashable value; None: no work"""
        found = self._held.get(behind)
        if found is None:
            found = self._held[behind] = ForwardScales(self, behind)
        return found

    def _release(self) -> None:
        """Copy the current scales for the forwards that ran with them. Must be called before the scales change."""
        if self._held:
            values = self.table.scale.clone()
            for each in self._held.values():
                each.values = values
            self._held.clear()

    def forget(self, names: Collection[str]) -> None:
        """Zero the entries of `staging` of the slots with these names."""
        if not names:
            return
        chosen = tuple(name in names for name in self.table.names)
        if chosen not in self._masks:  # cached, so that later steps copy nothing to the device and can be captured
            self._masks[chosen] = torch.tensor(chosen).to(self.table.staging.device)
        self.table.staging.masked_fill_(self._masks[chosen], 0.0)

    @contextmanager
    def restaging(self) -> Iterator[None]:
        """Context manager for tensors that are cast again. In `staging`, a new amax above 0 replaces the old amax of the
        tensor; other entries are unchanged."""
        staging = self.table.staging
        before = staging.clone()
        staging.zero_()
        yield
        staging.copy_(torch.where(staging > 0, staging, before))

    @torch.no_grad()
    def update(self, agree: Callable[[Tensor], Tensor] | None = None, forward: bool | None = None) -> None:
        """Update the scales of all slots, or only the scales of forward or backward.

        agree     function that returns the maxima of amaxes fp32 [slots] over the ranks that agree on scales; None: no
                  agreement
        forward   None: all slots; True: slots with which forward casts; False: slots with which backward casts
        """
        table, staging = self.table, self.table.staging
        if forward is not False:
            self._release()
        if forward is None:
            table.update(self._agreed(staging, agree))
            return
        chosen = self.forward == forward
        others, updated = torch.where(chosen, 0.0, staging), torch.where(chosen, staging, 0.0)
        table.update(self._agreed(updated, agree))
        staging.copy_(others)

    def _agreed(self, staged: Tensor, agree: Callable[[Tensor], Tensor] | None) -> Tensor:
        if agree is None or not self.any_agreed:
            return staged
        return torch.where(self.agreed, agree(staged), staged)

    def replaced_by(self, new: ScalingState) -> ScalingState:
        """Return `new`, the state after a recipe change. Slots that exist in both states keep scale, staging and history. The
        last scales of removed slots stay available for pending backwards (`slot`)."""
        self._release()
        new.table.adopt(self.table)
        old, now = self.table, new.table.options
        gone = {
            (name, old.options[name]): old.slot(name).scale for name in old.names if now.get(name) != old.options[name]
        }
        new._gone = {key: scale.clone() for key, scale in (self._gone | gone).items() if now.get(key[0]) != key[1]}
        return new


@dataclass(eq=False)
class ForwardScales:
    """Delayed scales with which one forward ran, for its backward and recomputation.

    state    the state with the table
    behind   the argument of `ScalingState.hold`
    values   fp32 [slots], copy of the scales of the forward, made before the scales of the table change; None: the table still
             has the scales of the forward
    """

    state: ScalingState
    behind: Hashable
    values: Tensor | None = None

    def slot(self, name: str) -> ScaleSlot:
        """Return the slot for a cast, with the scale that this forward used. Must be called only after the scales of the table
        have changed (`values` is not None). The cast does not record its amax again."""
        assert self.values is not None
        scale = self.values[self.state.table.place(name)]
        return ScaleSlot(scale, self.state.unread)
