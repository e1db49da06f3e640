"""Records that a fuser keeps between calls, and the state of one call.

    FuserPlan    the ops of each pass; one plan for each state of the fuser (recipes, gradients needed, dtype, ...)
    FuserCall    one record for each set of shapes, strides and dtypes: plan, linears, captured launches
    Pass         state of one forward and its backward

The first call with a set of shapes creates the `FuserCall`. Further calls find the record by a key of all that a pass depends
on (`OperationFuser._run`), without calling methods of the ops.
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
    """An op of one pass, and the indices of its basic ops in the fuser."""

    op: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class FuserPlan:
    """Operations that a fuser runs in one state.

    forward, backward   the ops of each pass, in the order of forward
    needs_dx            by basic op: whether the gradient of the input is needed
    needs_backward      by basic op: whether this op, or an op before it, needs a gradient
    quantizers          by basic op: (quantizers with which the previous op will cast dx, quantizers with which the next op
                        will cast y); None: no cast
    shards              ops whose parameters include DTensors
    sums                the coalesced sums of gradients over tp (`tp_sums`) of ops that need gradients
    with_end_backward   indices of the linears whose `end_backward` is called after a backward
    notes               lines for the printed plan: patterns that are not fused, with reasons
    captured            the captured launches of forward and of backward
    num_parameters      by basic op: number of parameters
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
    """A linear of a fuser, with the active spec.

    place      index among the basic ops
    weights    indices of the weights among the tensors of a pass
    needs_dw   by weight: whether the gradient is needed
    """

    op: Any
    place: int
    bound: BoundSpec
    weights: slice
    needs_dw: Sequence[bool]


class ResultLayout(NamedTuple):
    """Layout of the flat list that a forward returns: outputs, extra outputs, saved tensors of the ops.

    num_outputs   1, or the number of siblings
    many          the output is a tuple
    num_saved     by basic op: number of saved tensors
    num_results   number of outputs and extra outputs
    """

    num_outputs: int = 1
    many: bool = False
    num_saved: Sequence[int] = ()
    num_results: int = 1


@dataclass(eq=False)
class FuserCall:
    """Record that calls of a fuser with tensors of equal shapes, strides and dtypes share. The record holds no tensors.

    members             the basic ops (`dlp.ops.passes.Members`)
    dtype               dtype of x
    many, num_inputs    whether x is a tuple of siblings, and the number of tensors
    layouts             for each tensor of a pass the DTensorSpec, None for a plain tensor; empty if all are plain
    bounds              the specs of the linears
    backward_linears    the linears that run in backward: (index among the linears, the linear, whether its dgrad reads w)
    forward, backward   captured launches; for backward by the layout of the gradients
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
        """Use this plan."""
        self.plan, self.bounds = plan, [each.bound for each in self.linears]
        self.backward_linears = [
            (i, each, reads_w(each.bound.spec.recipe, plan.needs_dx[each.place], any(each.needs_dw)))
            for i, each in enumerate(self.linears)
            if plan.needs_backward[each.place]
        ]


def layouts_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the DTensorSpec of each tensor, None for a plain tensor; or an empty list if all tensors are plain."""
    spread = any(isinstance(tensor, DTensor) for tensor in tensors)
    return [t._spec if isinstance(t, DTensor) else None for t in tensors] if spread else []


@dataclass(eq=False, slots=True)
class Pass:
    """State of one forward of a fuser and its backward.

    record             whether autograd records
    scales             by linear: the scales of the session when forward ran
    weight_parts       by linear: the operands of the weights, cast before the pass (`WeightParts`); None: the pass casts the
                       weights
    given              this rank's tensors: inputs, parameters, extra inputs. This field and the next four are dropped after
                       forward
    parts              by linear: the parts of the weights that fprop reads
    reads, addresses   all of `given` and `parts` without repetition, and their addresses
    same               for each tensor of `given` and `parts` the index in `reads` (`deduplicated`); empty without repetition
    kwargs             keywords of the ops, by op; None: no keywords
    ctxs               the contexts of the ops; None: launches were replayed, and no op has run
    replayed           the results of the captured launches of forward; None: they did not run
    moved              saved-tensor hooks may return saved tensors in other memory
    layout             the `ResultLayout` of forward
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
        """The contexts of the ops after forward; created here if launches were replayed."""
        if self.ctxs is None:
            self.ctxs = [OperationContext() for _ in self.call.members.ops]
            for i, each in enumerate(self.call.linears):
                ctx: Any = self.ctxs[each.place]
                ctx.bound, ctx.record, ctx.scales = each.bound, self.record, self.scales[i]
                ctx.dtype, ctx.weight_parts, ctx.needs_dw = self.call.dtype, self.weight_parts[i], each.needs_dw
                ctx.pass_tensors = self.given[each.weights], self.parts[i] if self.parts else ()
            plan = self.call.plan
            for i, ctx in enumerate(self.ctxs if plan else ()):
                ctx.requires_grad, ctx.needs_dx, ctx.record = plan.needs_backward[i], plan.needs_dx[i], self.record
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
    """One tensor for each address, the addresses, and for each given tensor the index of the tensor with this address; no
    indices if all addresses differ."""
    if len(set(addresses)) == len(addresses):
        return reads, addresses, ()
    distinct = dict(zip(addresses, reads, strict=True))
    order = {address: i for i, address in enumerate(distinct)}
    return list(distinct.values()), list(distinct), tuple([order[address] for address in addresses])
