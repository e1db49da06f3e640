"""What does not change between calls of a fuser with like tensors, and what one pass has beside.

    FuserPlan    which ops run in which direction, in one state of a fuser
    FuserCall    made by the first call with such tensors: a plan, its linears as they run, the launches that were captured
    Pass         one forward, and the backward that belongs to it

A further call looks up its `FuserCall` by all that a pass depends on, and no op is asked anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.captured import Direction, Kept, Returned
from dlp.ops.context import OperationContext
from dlp.parallel.linear.core import reads_w
from dlp.parallel.linear.state import BoundSpec


class Placed(NamedTuple):
    """An op of one direction, and the places of its basic ops."""

    op: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class FuserPlan:
    """What one state of a fuser runs.

    needs_dx, learns   by basic op: whether the gradient of its input, whether any of it or before it is needed
    quantizers         by basic op: those that will cast its dx (of the op before) and its y (of the op behind)
    shards             ops that read their own parameters, some of which are DTensors
    sums               what sums gradients of ops over tp
    ends               places of the linears that finish their backward behind its launches
    notes              what is not fused, and why
    """

    forward: Sequence[Placed]
    backward: Sequence[Placed]
    needs_dx: Sequence[bool]
    learns: Sequence[bool]
    quantizers: Sequence[tuple[Any, Any]]
    shards: Sequence[Any]
    sums: Sequence[Any]
    ends: Sequence[int]
    notes: Sequence[str]
    captured: tuple[Direction, Direction]
    num_parameters: Sequence[int]


class LinearCall(NamedTuple):
    """A linear of a fuser, as it runs. `place`: among the ops; `weights`: its own among the tensors of a pass, `learns`: which
    of them do."""

    op: Any
    place: int
    bound: BoundSpec
    weights: slice
    learns: Sequence[bool]


@dataclass(eq=False)
class FuserCall:
    """A fuser, called with tensors like those at hand. It holds no tensors.

    dtype, many, num_inputs   of the input, which is a tuple or not
    learning                  places, among the linears, of those of which backward makes a gradient, and whether it reads w
    layouts                   of tensors that are DTensors; none: there are no such
    forward, back             captured launches: of forward, and of backward by how its gradients lie
    """

    members: Any
    linears: Sequence[LinearCall]
    dtype: torch.dtype
    many: bool
    num_inputs: int
    layouts: Sequence[Any]
    bounds: Sequence[BoundSpec] = ()
    learning: Sequence[tuple[int, LinearCall, bool]] = ()
    forward: Kept | None = None
    back: dict[Any, Kept] = field(default_factory=dict)
    plan: FuserPlan = None  # type: ignore[assignment]  # made of the contexts that such a call has

    def follow(self, plan: FuserPlan) -> None:
        self.plan, self.bounds = plan, [each.bound for each in self.linears]
        self.learning = [
            (i, each, reads_w(each.bound.spec.recipe, plan.needs_dx[each.place], any(each.learns)))
            for i, each in enumerate(self.linears)
            if plan.learns[each.place]
        ]


def layouts_of(tensors: Sequence[Any]) -> list[Any]:
    spread = any(isinstance(tensor, DTensor) for tensor in tensors)
    return [t._spec if isinstance(t, DTensor) else None for t in tensors] if spread else []


@dataclass(eq=False, slots=True)
class Pass:
    """One forward of a fuser, and the backward that belongs to it.

    scales, sides      by linear: of its session, and the operands that there were before, if there were
    given, parts       of forward: this rank's tensors, and by linear what it reads of its weights
    reads, addresses   these without repetition; `same`: of which each one is (`once`)
    kwargs             of ops, where some have some
    ctxs               of the ops, where they were needed
    returned           how the launches of forward were, where they ran
    moved              something may bring saved tensors back in other memory
    layout             how many outputs, whether they are a tuple, how many tensors each op saves, and results in all
    """

    call: FuserCall
    record: bool
    scales: Sequence[Any]
    sides: Sequence[Any]
    given: Sequence[Any]
    parts: Sequence[Sequence[Tensor]]
    reads: Sequence[Tensor]
    addresses: Sequence[int]
    same: tuple[int, ...] = ()
    kwargs: Sequence[Mapping[str, Any]] | None = None
    ctxs: list[Any] | None = None
    returned: Returned | None = None
    moved: bool = True
    layout: tuple[int, bool, Sequence[int], int] = (1, False, (), 1)

    def contexts(self) -> list[Any]:
        """Those of the ops, as forward has left them."""
        if self.ctxs is None:
            self.ctxs = [OperationContext() for _ in self.call.members.ops]
            for i, each in enumerate(self.call.linears):
                ctx: Any = self.ctxs[each.place]
                ctx.bound, ctx.record, ctx.scales = each.bound, self.record, self.scales[i]
                ctx.dtype, ctx.sides, ctx.learns = self.call.dtype, self.sides[i], each.learns
                ctx.given = self.given[each.weights], self.parts[i] if self.parts else ()
            plan = self.call.plan
            for ctx, learns, needs_dx in zip(self.ctxs, plan.learns, plan.needs_dx, strict=True) if plan else ():
                ctx.requires_grad, ctx.needs_dx = learns, needs_dx
            for ctx, own in zip(self.ctxs, self.returned.attributes, strict=True) if self.returned else ():
                vars(ctx).update(own)
        return self.ctxs

    def drop(self) -> None:
        """Let go of what forward alone reads."""
        self.given = self.parts = self.reads = self.addresses = ()
        for ctx in self.ctxs or ():
            ctx.given = ctx.dirty = ()


def once(reads: Sequence[Tensor], addresses: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[int], tuple[int, ...]]:
    """The tensors without those whose address another has, their addresses, and, where there are some, for each tensor the
    place of the one that stands for it."""
    if len(set(addresses)) == len(addresses):
        return reads, addresses, ()
    distinct = dict(zip(addresses, reads, strict=True))
    order = {address: i for i, address in enumerate(distinct)}
    return list(distinct.values()), list(distinct), tuple([order[address] for address in addresses])
