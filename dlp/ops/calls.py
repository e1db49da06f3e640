"""Records that a fuser keeps between calls, and the state of one call.

    FuserPlan    the fused ops of forward and backward; one plan for each state of the fuser (recipes, gradients needed, ...)
    FuserCall    plan, linears and captured launches; one record for each state and each set of shapes, strides and dtypes
    Pass         state of one forward and its backward

The first call with a set of shapes creates a `FuserCall`. Later calls look the `FuserCall` up by a key, which contains
everything that a pass depends on (`OperationFuser._run`), and do not plan again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.captured import PlanPass, ReplayEntry, ReplayResults
from dlp.ops.context import OperationContext
from dlp.parallel.linear.plan import reads_w
from dlp.parallel.linear.state import BoundSpec


class Placed(NamedTuple):
    """An op (basic or fused) of one pass, and the indices of its basic ops in the fuser (`places`)."""

    op: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class FuserPlan:
    """Plan for one state of a fuser: recipes, train or eval mode, dtype, and the tensors that need gradients.

    forward, backward   the ops of each pass; both lists are in the order of forward
    needs_dx            for each basic op: whether the gradient of its input is needed
    needs_backward      for each basic op: whether its input, parameters or extra inputs need a gradient
    quantizers          for each basic op: (the quantizers with which the previous op will cast dx, the quantizers with which
                        the next op will cast y); None: that op does not cast
    shards              ops whose parameters include DTensors
    sums                `tp_sums` (`PartialGradients`) of the ops that need gradients and have partial gradients over tp
    with_end_backward   basic-op indices of the linears whose `end_backward` is called after a backward
    notes               lines for the printed plan: patterns that are not fused, with reasons
    captured            forward and backward, each with its captured launches
    num_parameters      for each basic op: number of parameters
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
    captured: tuple[PlanPass, PlanPass]
    num_parameters: Sequence[int]


class LinearCall(NamedTuple):
    """A linear of a fuser, with the spec under which it runs in a `FuserCall`.

    op         the `ops.BasicLinear`
    place      index of the op among the basic ops of the fuser
    bound      the spec: recipe, style, overlap
    weights    slice of the weights in the list of tensors of a pass (inputs, parameters, extra inputs)
    needs_dw   for each weight: whether the gradient is needed
    """

    op: Any
    place: int
    bound: BoundSpec
    weights: slice
    needs_dw: Sequence[bool]


class ResultLayout(NamedTuple):
    """Layout of the flat list that a forward returns: outputs, extra outputs, saved tensors of the ops.

    num_outputs   number of outputs: 1, or one for each sibling
    many          whether the output is a tuple of siblings
    num_saved     for each basic op: number of tensors saved for backward
    num_results   number of outputs plus number of extra outputs
    """

    num_outputs: int = 1
    many: bool = False
    num_saved: Sequence[int] = ()
    num_results: int = 1


@dataclass(eq=False)
class FuserCall:
    """Record shared by all calls of a fuser in one state with tensors of equal shapes, strides and dtypes. It has no tensors.

    members             the basic ops (`dlp.ops.passes.Members`)
    linears             the linears among the basic ops
    dtype               dtype of x
    many                whether x is a tuple of siblings
    num_inputs          number of tensors in x: 1, or one for each sibling
    layouts             for each tensor of a pass its DTensorSpec, None for a plain tensor; empty if all tensors are plain
    bounds              for each linear its spec
    backward_linears    for each linear that runs in backward: (index in `linears`, the linear, whether its dgrad reads w)
    forward             captured launches of forward; None: none yet
    backward            captured launches of backward, by a key of the gradients' layout
    plan                the plan that the calls follow; None until `follow` is called
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
    plan: FuserPlan = None  # type: ignore[assignment]  # `follow` sets it, since planning reads contexts of this call

    def follow(self, plan: FuserPlan) -> None:
        """Set the plan, and the fields that are derived from it: `bounds` and `backward_linears`."""
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

    call               the `FuserCall`, which all calls with tensors of these shapes, strides and dtypes share
    record             whether gradients are enabled (`torch.is_grad_enabled()`)
    scales             for each linear: the `ForwardState` (scales and random counter) of this forward, which backward restores
    weight_parts       for each linear: the operands of its weights (`WeightParts`), if they were cast before the pass; else
                       None
    given              this rank's tensors: inputs, parameters, extra inputs
    parts              for each linear: the tensors (codes and scales) of the weights that fprop reads
    reads, addresses   the tensors of `given` and `parts` without repetition, and their addresses
    same               for each tensor of `given` and `parts` its index in `reads` (`deduplicated`); empty: none is repeated
    kwargs             for each op: keyword arguments of the caller; None: no keywords
    ctxs               for each op: its context; None: not created yet (`contexts`)
    replayed           description of the results of the captured launches, if forward replayed them; None: the ops ran
    moved              whether saved-tensor hooks are active, so that saved tensors may come back in other memory
    layout             the `ResultLayout` of forward

    `drop` releases given, parts, reads and addresses after forward.
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
        """Return the contexts of the ops; create them in the first call. After a replay they get the attributes that the ops
        set when the launches were recorded."""
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
        """Release the references to tensors that only forward reads."""
        self.given = self.parts = self.reads = self.addresses = ()
        for ctx in self.ctxs or ():
            ctx.pass_tensors = ctx.dirty = ()


def deduplicated(
    reads: Sequence[Tensor], addresses: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[int], tuple[int, ...]]:
    """Remove repeated tensors. Return a list with one tensor for each address, a list of the addresses, and for each tensor of
    `reads` its index in these lists. The indices are empty if all addresses differ."""
    if len(set(addresses)) == len(addresses):
        return reads, addresses, ()
    distinct = dict(zip(addresses, reads, strict=True))
    order = {address: i for i, address in enumerate(distinct)}
    return list(distinct.values()), list(distinct), tuple([order[address] for address in addresses])
