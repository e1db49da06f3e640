"""The casts of a step boundary, made together: every matrix is observed, ranks agree once, every matrix is cast.

    observe    what casts need to know; of all matrices that share a quantizer in one launch
    agree      one MAX all-reduce a group for all that was observed; those whose rows lie on several ranks first
    cast       into operands that stay where they are; all that share a quantizer in one launch, each from one read

A launch reads a table of addresses in device memory. It is written when a matrix, an operand or a delayed scale has
moved, which happens in the first steps, after a load and after a swap; a step in between only launches, so it can be
captured in a CUDA graph. Where a quantizer offers no batch, where operands are still to be allocated, or where no kernel
reads a matrix, it is observed and cast by itself, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.kernels import ops
from dlp.quant.quantizer import Amaxes, OneRead, Origin, Quantizer, ScaleSlot, Wanted, caps_of, flagged, one_read

Groups = tuple[ProcessGroup | None, ProcessGroup | None]  # that agree, the second on what the first has agreed on
NOBODY: Groups = (None, None)


class Cast(NamedTuple):
    """One read of `matrix` [rows, columns]: by `row` its operand, by `col` that of its transpose, None for one that is not
    wanted; both only where `one_read` makes both. `groups`: who agrees on what is observed for each of them. `slot`,
    `at`: as quantizers take them; `flag`: see `flagged`. `into`: the operands, where there are some already."""

    matrix: Tensor
    row: Quantizer | None
    col: Quantizer | None
    groups: tuple[Groups, Groups] = (NOBODY, NOBODY)
    slot: ScaleSlot | None = None
    at: tuple[Origin, ...] = ()
    into: Wanted = (None, None)
    flag: Tensor | None = None

    @property
    def both(self) -> OneRead | None:
        return one_read(self.row, self.col) if self.row is not None and self.col is not None else None

    def observe(self) -> Amaxes:
        both, row, col = self.both, self.row, self.col
        if both is not None:
            return both.observe(self.matrix)
        if row is not None:
            return row.observe(self.matrix), None
        return None, None if col is None else col.observe(self.matrix.t())

    def make(self, amaxes: Amaxes) -> Wanted:
        """The operands, by agreed amaxes."""
        more: dict[str, Any] = {} if self.slot is None else {"slot": self.slot}
        both, row, col, (out, out_t) = self.both, self.row, self.col, self.into
        quantizer = row or col
        assert quantizer is not None
        more |= flagged(quantizer, self.matrix, self.flag)
        if both is not None:
            more |= {"at": (self.at[0], self.at[1])} if self.at else {}
            return both.cast(self.matrix, amaxes, outs=(out, out_t) if out and out_t else None, **more)
        more |= {"at": self.at[0]} if self.at else {}
        if row is not None:
            return row.cast(self.matrix, amaxes[0], out=out, **more), None
        return None, None if col is None else col.cast(self.matrix.t(), amaxes[1], out=out_t, **more)

    def batch(self) -> Quantizer | None:
        """The quantizer whose batch this cast can be part of; None: it is made by itself."""
        wanted = [(q, into) for q, into in zip((self.row, self.col), self.into, strict=True) if q is not None]
        quantizer = wanted[0][0]
        if self.at or not caps_of(quantizer).one_launch or any(q != quantizer or into is None for q, into in wanted):
            return None
        return quantizer if ops.has_batches(self.matrix) else None

    def addresses(self) -> tuple[int, ...]:
        """All that a launch reads or writes."""
        parts = [part for operand in self.into if operand is not None for part in operand.parts]
        beside = [] if self.slot is None else [self.slot.scale, self.slot.staging]
        beside += [] if self.flag is None else [self.flag]
        return tuple(tensor.data_ptr() for tensor in (self.matrix, *parts, *beside))


_Batched = dict[tuple[Quantizer, torch.dtype], list[tuple[int, Cast]]]


class CastsTogether:
    """Makes casts; keeps the launches that it has prepared for them."""

    def __init__(self) -> None:
        self._made_for: list[tuple[Quantizer, tuple[int, ...]]] = []
        self._launches: list[ops.Launches] = []

    @torch.no_grad()
    def make(self, casts: Sequence[Cast]) -> list[Wanted]:
        """All ranks call it with casts in the same order; returns their operands, `into` where that was given."""
        batched = _by_quantizer(casts)
        self._prepare(batched)
        amaxes: dict[int, Amaxes] = {}
        for members, launches in zip(batched.values(), self._launches, strict=True):
            for launch in launches.observe:
                launch()
            amaxes |= zip((i for i, _ in members), launches.amaxes, strict=True)
        observed = [amaxes[i] if i in amaxes else cast.observe() for i, cast in enumerate(casts)]
        agreed = _agreed(casts, observed)
        _write_back([pair for i in amaxes for pair in zip(observed[i], agreed[i], strict=True)])
        for launch in (launch for launches in self._launches for launch in launches.cast):
            launch()
        return [cast.into if i in amaxes else cast.make(agreed[i]) for i, cast in enumerate(casts)]

    def _prepare(self, batched: _Batched) -> None:
        wanted = [(quantizer, cast.addresses()) for (quantizer, _), members in batched.items() for _, cast in members]
        if wanted != self._made_for:
            self._launches, self._made_for = _prepared(batched), wanted


def _by_quantizer(casts: Sequence[Cast]) -> _Batched:
    """Those that are cast in one launch, with their places."""
    batched: _Batched = {}
    for i, cast in enumerate(casts):
        quantizer = cast.batch()
        if quantizer is not None:
            batched.setdefault((quantizer, cast.matrix.dtype), []).append((i, cast))
    return batched


def _prepared(batched: _Batched) -> list[ops.Launches]:
    made = []
    for (quantizer, _), members in batched.items():
        prepare = quantizer.batch  # type: ignore[attr-defined]
        casts = [cast for _, cast in members]
        made.append(
            prepare(
                [cast.matrix for cast in casts],
                [cast.into for cast in casts],
                [cast.slot for cast in casts],
                [cast.flag for cast in casts],
            )  # fmt: skip
        )
    return made


def _agreed(casts: Sequence[Cast], observed: list[Amaxes]) -> list[Amaxes]:
    """What was observed; where a cast asks for it, the maximum over the first group, then over the second."""
    for turn in range(len(NOBODY)):
        by_group: dict[ProcessGroup, dict[int, Tensor]] = {}  # by identity: one value may serve both orientations
        for cast, amaxes in zip(casts, observed, strict=True):
            for groups, amax in zip(cast.groups, amaxes, strict=True):
                group = groups[turn]
                if group is not None and amax is not None:
                    by_group.setdefault(group, {})[id(amax)] = amax
        new = {
            key: value for group, its in by_group.items()
            for key, value in zip(its, agree(list(its.values()), group), strict=True)
        }  # fmt: skip
        observed = [(_found(new, row), _found(new, col)) for row, col in observed]
    return observed


def _found(new: dict[int, Tensor], amax: Tensor | None) -> Tensor | None:
    return new.get(id(amax), amax)


def _write_back(amaxes: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
    """Agreed values to where launches read them."""
    changed = {id(own): (own, new) for own, new in amaxes if own is not None and new is not None and own is not new}
    if changed:
        owns, news = zip(*changed.values(), strict=True)
        torch._foreach_copy_(owns, news)
