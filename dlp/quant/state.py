"""The state of delayed scaling: a table with one slot for each tensor that is cast with a delayed scale.

    scale      fp32 [slots]   the multiplier of casts
    staging    fp32 [slots]   the maxima of amaxes since the last update; 0 where nothing was cast
    history    fp32 [L, n]    for each history length and algorithm, of its n slots

`scale` and `staging` are one tensor each over all slots, so that one all-reduce agrees on everything, and casts use views of
them. An update is a few vectorised passes for any number of slots, on a GPU one launch.

`ScalingState` is all of it for one model. It knows neither layers nor process groups: it maps names to slots, and the caller of
`update` passes the reduction of the staging row. Casts of x and w in backward, and those of a recomputation, use the scales of
their own forward (`ForwardScales`), even if the table has changed since.
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
    """The slots with one history length and algorithm, which are neighbours in the table: their span, history [L, n], target
    [n]."""

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
        """The slot of this tensor: views of the table, which stay valid over updates."""
        i = self._index[name]
        return ScaleSlot(self.scale[i], self.staging[i])

    def index(self, name: str) -> int:
        """The index of a slot in `scale` and `staging`."""
        return self._index[name]

    def update(self, reduced: Tensor) -> None:
        """Update the scales. `reduced` fp32 [slots], the staging row after its MAX all-reduce, enters the histories, scales are
        computed from these, and staging is zeroed. One launch on a GPU, if `reduced` is `staging`."""
        if reduced is not self.staging:
            self.staging.copy_(reduced)
        self._update = self._update or ops.delayed_updates([self._slots(kind) for kind in self._kinds])
        self._update()

    def _slots(self, kind: _Kind) -> ops.DelayedSlots:
        """The tensors that an update reads and writes; their memory stays."""
        scale, staging = self.scale[kind.span], self.staging[kind.span]
        return ops.DelayedSlots(kind.history, scale, staging, kind.target, staging, kind.options.amax_compute_algo)

    def state_dict(self) -> SlotState:
        """name -> copies of scale [], of history [L] (oldest second, newest last; the first is the empty staging row) and of
        target [], the value onto which the scale maps the amax: fp8_max * 2^-margin."""
        return {
            name: {
                "scale": self.scale[kind.span][i].clone(),
                "history": kind.history[:, i].clone(),
                "target": kind.target[i].clone(),
            }
            for kind in self._kinds
            for i, name in enumerate(self.names[kind.span])
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a state by slot name. ValueError where names, history lengths or targets differ."""
        self.load_merged([state])

    def load_merged(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Load the states of ranks that had different scales: the maximum of their histories, and the scales computed from it,
        or, where a history is empty, the smallest of their scales. A single state is loaded as it is."""
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

    def fits(self, name: str, slot: Mapping[str, Tensor]) -> bool:
        """Whether a saved slot, of one rank or of several, has the history length and the target of the slot of this name."""
        kind = next(kind for kind in self._kinds if self._index[name] in range(kind.span.start, kind.span.stop))
        target = kind.target[self._index[name] - kind.span.start]
        stated = slot.get("target", target)
        return slot["history"].shape[-1] == len(kind.history) and bool((stated == target).all())

    def load_known(self, state: Mapping[str, Mapping[str, Tensor]]) -> SlotState:
        """Load the slots of a state that this table has, and that fit; returns the others."""
        known = {name for name in self.names if name in state and self.fits(name, state[name])}
        if known:
            fresh = self.state_dict()
            self.load_merged([{name: state[name] if name in known else fresh[name] for name in self.names}])
        return {name: dict(slot) for name, slot in state.items() if name not in known}

    def adopt(self, other: SlotTable) -> None:
        """Copy scale, staging and history of the slots that another table has with the same options."""
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
            for name, target in zip(self.names[kind.span], kind.target.tolist(), strict=True):
                saved, wanted = len(state[name]["history"]), len(kind.history)
                if saved != wanted:
                    raise ValueError(
                        f"slot {name!r} was saved with amax_history_len {saved}, the recipe has {wanted}; "
                        f"set amax_history_len = {saved}"
                    )
                stated = float(state[name].get("target", target))
                if stated != target:
                    raise ValueError(
                        f"slot {name!r} was saved with scales that map the amax onto {stated:g}, and the recipe maps it onto "
                        f"{target:g} (the largest value of its format, times 2^-margin); set fp8_format and margin as saved"
                    )


class SlotUse(NamedTuple):
    """How one delayed scale is used. forward: by casts of forward, else of backward; agreed: ranks share it."""

    options: SlotOptions
    forward: bool
    agreed: bool


class ScalingState:
    """The delayed scales of one model.

    forward, agreed   bool [slots], see `SlotUse`
    unread            where casts record amaxes that do not count

    After a step boundary, staging starts with the amaxes of the weights that the boundary cast.
    """

    def __init__(self, slots: Mapping[str, SlotUse], device: torch.device | str = "cpu") -> None:
        self.table = SlotTable({name: use.options for name, use in slots.items()}, device)
        uses = [slots[name] for name in self.table.names]
        self.forward = torch.tensor([use.forward for use in uses], dtype=torch.bool).to(device)
        self.agreed = torch.tensor([use.agreed for use in uses], dtype=torch.bool).to(device)
        self.unread = torch.zeros((), device=device)
        self.any_agreed = any(use.agreed for use in uses)
        self._cast_by_forward = frozenset(name for name, use in slots.items() if use.forward)
        self._gone: dict[tuple[str, SlotOptions], Tensor] = {}  # scales of slots that recipe changes have taken away
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset what is known of forwards that read the scales."""
        self._views: dict[str, ScaleSlot] = {}  # of the table, by name
        self._masks: dict[tuple[bool, ...], Tensor] = {}  # bool [slots], as they were needed
        self._held: dict[Hashable, ForwardScales] = {}  # of forwards that have run with these scales

    def __getstate__(self) -> dict[str, Any]:
        """A copy has scales of its own, and no forwards that are still to be differentiated."""
        return vars(self) | {"_views": {}, "_masks": {}, "_held": {}}

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that casts read and write."""
        return [self.table.scale, self.table.staging, self.unread]

    def slot(
        self, name: str, record: bool, scales: ForwardScales | None = None, options: SlotOptions | None = None
    ) -> ScaleSlot:
        """The slot for a cast of one tensor. record: its amax counts; scales: of the forward that is recomputed or
        differentiated, which replace those of the table; options: that the cast expects. A slot of other options than the
        table has was taken away by a recipe change under a pending backward: its scale is its last one, and its amax does not
        count."""
        if scales is not None and scales.values is not None and name in scales.state._cast_by_forward:
            return scales.slot(name)
        if options is not None and self.table.options.get(name) != options:
            return ScaleSlot(self._gone[name, options], self.unread)
        slot = self._views.get(name)
        if slot is None:
            slot = self._views[name] = self.table.slot(name)
        return slot if record else ScaleSlot(slot.scale, self.unread)

    def hold(self, behind: Hashable) -> ForwardScales:
        """The scales of a forward that begins now; see `ForwardScales`."""
        found = self._held.get(behind)
        if found is None:
            found = self._held[behind] = ForwardScales(self, behind)
        return found

    def _release(self) -> None:
        """Before the scales change: forwards that ran with them keep a copy."""
        if self._held:
            values = self.table.scale.clone()
            for each in self._held.values():
                each.values = values
            self._held.clear()

    def forget(self, names: Collection[str]) -> None:
        """Drop the staged amaxes of these slots."""
        if not names:
            return
        chosen = tuple(name in names for name in self.table.names)
        if (
            chosen not in self._masks
        ):  # kept, so that a step like others copies nothing to the device and can be captured
            self._masks[chosen] = torch.tensor(chosen).to(self.table.staging.device)
        self.table.staging.masked_fill_(self._masks[chosen], 0.0)

    @contextmanager
    def restaging(self) -> Iterator[None]:
        """A context in which tensors are cast again: their amaxes replace those that were staged of them."""
        staging = self.table.staging
        before = staging.clone()
        staging.zero_()
        yield
        staging.copy_(torch.where(staging > 0, staging, before))

    @torch.no_grad()
    def update(self, agree: Callable[[Tensor], Tensor] | None = None, forward: bool | None = None) -> None:
        """Update the scales of all slots, or of those that forward (or backward) casts.

        agree     amaxes fp32 [slots] -> their maxima over the ranks that share scales; None: no other rank does
        forward   None: all slots; True: those of forward; False: those of backward
        """
        table, staging = self.table, self.table.staging
        if forward is not False:
            self._release()
        if forward is None:
            table.update(self._agreed(staging, agree))
            return
        chosen = self.forward == forward
        kept, mine = torch.where(chosen, 0.0, staging), torch.where(chosen, staging, 0.0)
        table.update(self._agreed(mine, agree))
        staging.copy_(kept)

    def _agreed(self, staged: Tensor, agree: Callable[[Tensor], Tensor] | None) -> Tensor:
        if agree is None or not self.any_agreed:
            return staged
        return torch.where(self.agreed, agree(staged), staged)

    def replaced_by(self, new: ScalingState) -> ScalingState:
        """`new`, a state for other slots, in which slots that are in both keep their scales and histories."""
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
    """The delayed scales of one forward, for its backward and its recomputation: the table, until that changes, then a copy,
    `values` fp32 [slots]. `behind`: what must happen after its backward, which only the caller of `hold` interprets."""

    state: ScalingState
    behind: Hashable
    values: Tensor | None = None

    def slot(self, name: str) -> ScaleSlot:
        """The slot of a cast after the table has changed; its amax is not recorded, since it has been."""
        assert self.values is not None
        scale = self.values[self.state.table.index(name)]
        return ScaleSlot(scale, self.state.unread)
