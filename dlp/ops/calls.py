"""Records that a fuser keeps between calls, and the state of one call.

    FuserPlan    which ops run in which direction; one for each state of the fuser (recipes, who needs gradients, dtype, ...)
    FuserCall    one for each set of shapes, strides and dtypes: its plan, its linears, its captured launches
    Pass         one forward, and the backward that belongs to it

The first call with such tensors makes the `FuserCall`. Further calls find it by a key of all that a pass depends on
(`OperationFuser._run`), and ask the ops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.captured import Direction, ReplayEntry, ReplayResults
from dlp.ops.context import OperationContext
from dlp.parallel.linear.plan import reads_w
from dlp.parallel.linear.state import BoundSpec


class Placed(NamedTuple):
    """An op of one direction, and the indices of its basic ops in the fuser."""

    op: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class FuserPlan:
    """Operations that a fuser runs in one of its states.

    forward, backward   the ops of each direction, in the order of forward
    needs_dx            by basic op: whether the gradient of its input is needed
    needs_backward      by basic op: whether a gradient of it, or of an op before it, is needed
    quantizers          by basic op: (of the op before, which will cast dx; of the op behind, which will cast y); None: no cast
    shards              ops that have DTensors among their own parameters
    sums                the coalesced sums of gradients over tp (`tp_sums`) of ops that need gradients
    with_end_backward   indices of the linears whose `end_backward` is called after a backward
    notes               lines for the printed plan: what is not fused, and why
    captured            the captured launches of forward and of backward
    num_parameters      by basic op
    """

    forward: Sequence[Placed]
    backward: Sequence[Placed]
    needs_dx: Sequence[bool]
    needs_backward: Sequence[bool]
    quantizers: Sequence[tuple[Any, Any]]
    shards: Sequence[Any]
    sums: Sequence[Any]
    with_end_backward: Sequence[int]
    notes: Sequence[str]
    captured: tuple[Direction, Direction]
    num_parameters: Sequence[int]


class LinearCall(NamedTuple):
    """A linear of a fuser, and the spec that it runs under.

    place      its index among the basic ops
    weights    where its weights are among the tensors of a pass
    needs_dw   by weight: whether its gradient is needed
    """

    op: Any
    place: int
    bound: BoundSpec
    weights: slice
    needs_dw: Sequence[bool]


class ResultLayout(NamedTuple):
    """How the flat list that a forward returns is divided: outputs, extra outputs, tensors that the ops save.

    num_outputs   1, or as many as the tuple of siblings has
    many          the output is a tuple
    num_saved     by basic op
    num_results   outputs and extra outputs
    """

    num_outputs: int = 1
    many: bool = False
    num_saved: Sequence[int] = ()
    num_results: int = 1


@dataclass(eq=False)
class FuserCall:
    """Record that calls of a fuser with tensors of equal shapes, strides and dtypes share. The record holds no tensors.

    members             the basic ops (`dlp.ops.passes.Members`)
    dtype               of x
    many, num_inputs    whether x is a tuple of siblings, and of how many tensors
    layouts             for each tensor of a pass the DTensorSpec, None for a plain one; empty if all are plain
    bounds              the specs of the linears
    backward_linears    the linears that run in backward: (index among the linears, the linear, whether its dgrad reads w)
    forward, backward   captured launches, of backward by the layout of its gradients
    """

    members: Any
    linears: Sequence[LinearCall]
    dtype: torch.dtype
    many: bool
    num_inputs: int
    layouts: Sequence[Any]
    bounds: Sequence[BoundSpec] = ()
    backward_linears: Sequence[tuple[int, LinearCall, bool]] = ()
    forward: ReplayEntry | None = None
    backward: dict[Any, ReplayEntry] = field(default_factory=dict)
    plan: FuserPlan = None  # type: ignore[assignment]  # set by `follow`: a plan is made of the contexts of such a call

    def follow(self, plan: FuserPlan) -> None:
        """Run by this plan."""
        self.plan, self.bounds = plan, [each.bound for each in self.linears]
        self.backward_linears = [
            (i, each, reads_w(each.bound.spec.recipe, plan.needs_dx[each.place], any(each.needs_dw)))
            for i, each in enumerate(self.linears)
            if plan.needs_backward[each.place]
        ]


def layouts_of(tensors: Sequence[Any]) -> list[Any]:
    """For each tensor its DTensorSpec, None for a plain one; empty if all are plain."""
    spread = any(isinstance(tensor, DTensor) for tensor in tensors)
    return [t._spec if isinstance(t, DTensor) else None for t in tensors] if spread else []


@dataclass(eq=False, slots=True)
class Pass:
    """One forward of a fuser, and the backward that belongs to it.

    record             whether autograd records
    scales             by linear: the scales of its session when forward ran
    weight_parts       by linear: its weights as they were cast before the pass (`WeightParts`); None: it casts them itself
    given              this rank's tensors: inputs, parameters, extra inputs. Dropped after forward, as are the next four
    parts              by linear: the tensors that its fprop reads of its weights
    reads, addresses   all of `given` and `parts` without repetition, and their addresses
    same               where some are repeated: for each, its index in `reads` (`deduplicated`)
    kwargs             keywords of ops, by op; None: no op has some
    ctxs               the contexts of the ops; None: launches were replayed, and no op has run
    replayed           the results of the captured launches of forward; None: they did not run
    moved              saved-tensor hooks may bring saved tensors back in other memory
    layout             how the results of forward are divided
    """

    call: FuserCall
    record: bool
    scales: Sequence[Any]
    weight_parts: Sequence[Any]
    given: Sequence[Any]
    parts: Sequence[Sequence[Tensor]]
    reads: Sequence[Tensor]
    addresses: Sequence[int]
    same: tuple[int, ...] = ()
    kwargs: Sequence[Mapping[str, Any]] | None = None
    ctxs: list[Any] | None = None
    replayed: ReplayResults | None = None
    moved: bool = True
    layout: ResultLayout = ResultLayout()

    def contexts(self) -> list[Any]:
        """The contexts of the ops, as forward has left them: made now if launches were replayed."""
        if self.ctxs is None:
            self.ctxs = [OperationContext() for _ in self.call.members.ops]
            for i, each in enumerate(self.call.linears):
                ctx: Any = self.ctxs[each.place]
                ctx.bound, ctx.record, ctx.scales = each.bound, self.record, self.scales[i]
                ctx.dtype, ctx.weight_parts, ctx.needs_dw = self.call.dtype, self.weight_parts[i], each.needs_dw
                ctx.pass_tensors = self.given[each.weights], self.parts[i] if self.parts else ()
            plan = self.call.plan
            for i, ctx in enumerate(self.ctxs if plan else ()):
                ctx.requires_grad, ctx.needs_dx = plan.needs_backward[i], plan.needs_dx[i]
            for ctx, own in zip(self.ctxs, self.replayed.attributes, strict=True) if self.replayed else ():
                vars(ctx).update(own)
        return self.ctxs

    def drop(self) -> None:
        """Release the tensors that only forward reads."""
        self.given = self.parts = self.reads = self.addresses = ()
        for ctx in self.ctxs or ():
            ctx.pass_tensors = ctx.dirty = ()


def deduplicated(
    reads: Sequence[Tensor], addresses: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[int], tuple[int, ...]]:
    """One tensor for each address, the addresses, and for each given tensor the index of the one with its address; no indices
    where all addresses differ."""
    if len(set(addresses)) == len(addresses):
        return reads, addresses, ()
    distinct = dict(zip(addresses, reads, strict=True))
    order = {address: i for i, address in enumerate(distinct)}
    return list(distinct.values()), list(distinct), tuple([order[address] for address in addresses])
