"""What the directions of a fuser do: ops in order on lazy values, in reverse on gradients, and autograd's function of both.

forward    what ops keep is saved as one flat list
backward   down to the first op of which anyone needs a gradient
captured   a direction of which all is launches runs as one native call from its third time on (`dlp.ops.captured`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dlp.ops.captured import Direction, Flat, Returned
from dlp.ops.values import HANDED, LAZY, MANY, Value, each, is_handed, tensor_of
from dlp.parallel.linear.autograd import no_autocast, past_functorch
from dlp.parallel.weight.local import held


class Members:
    """The basic ops of a fuser, in order. `names`: theirs, for messages."""

    def __init__(self, ops: Sequence[Any], names: Sequence[str] | None) -> None:
        self.ops, self.named = tuple(ops), names is not None
        self.names = list(names or (f"op {i} ({type(op).__name__})" for i, op in enumerate(self.ops)))
        self.extra_inputs = [op.num_extra_inputs for op in self.ops]
        self.extra_outputs = [op.num_extra_outputs for op in self.ops]
        self.none_grads = [none for op in self.ops for none in [op.none_grads] * op.num_extra_outputs]

    def check_count(self, place: int, what: str, found: int, expected: int) -> None:
        """RuntimeError where an op returns another number than it declares."""
        if found != expected:
            raise RuntimeError(f"{self.names[place]}: it returned {found} {what}; it declares {expected}")

    def at(self, places: Sequence[int], error: Exception) -> Exception:
        """An error of an op, with its name and place; one of a class of its own, as where memory ends, gets a note."""
        names = ", ".join(dict.fromkeys(self.names[i] for i in places))
        if self.named and type(error) in (ValueError, TypeError, RuntimeError):
            said = str(error).removeprefix(f"{type(self.ops[places[0]]).__name__}: ")
            return type(error)(f"{names}: {said}").with_traceback(error.__traceback__)
        if self.named:
            error.add_note(f"in {names}")
        return error


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
    ends               places of the ops that finish their backward behind its launches
    notes              what is not fused, and why
    asked              places of the ops that have an answer to what is asked in each call
    without            those of the ops that need less than all gradients
    """

    forward: Sequence[Placed]
    backward: Sequence[Placed]
    needs_dx: Sequence[bool]
    learns: Sequence[bool]
    quantizers: Sequence[tuple[Any, Any]]
    shards: Sequence[Any]
    ends: Sequence[int]
    notes: Sequence[str]
    captured: tuple[Direction, Direction]
    asked: Mapping[str, Sequence[int]]
    num_parameters: Sequence[int]
    without: Sequence[int]


@dataclass
class Run:
    """One forward, and the backward that belongs to it. `ranges`: how many tensors each op saves; `captured`: how its launches
    were, where they ran."""

    members: Members
    plan: FuserPlan
    ctxs: list[Any]
    kwargs: Sequence[Mapping[str, Any]]
    many_in: bool
    num_inputs: int
    num_parameters: Sequence[int]
    bounds: Sequence[Any]
    num_outputs: int = 1
    many_out: bool = False
    ranges: list[int] = field(default_factory=list)
    captured: Returned | None = None


def admitted(members: Members, placed: Placed, value: Value) -> Value:
    """The value as an op takes it: stored, where it does not say that it takes more. ValueError for a tuple it cannot take."""
    takes = placed.op.takes
    if isinstance(value, tuple):
        if MANY not in takes:
            raise ValueError(
                f"{members.names[placed.places[0]]}: it takes one tensor and is given {len(value)}: of siblings, only "
                f"ops that say so, as Bias, SwiGLU and GEGLU, take several"
            )
        return tuple([_single(takes, one) for one in value])
    return _single(takes, value)


def _single(takes: frozenset[str], value: Any) -> Any:
    if is_handed(value):
        return value if HANDED in takes else value.tensor()
    return value if isinstance(value, Tensor) or LAZY in takes else tensor_of(value)


# Forward


def forward(run: Run, tensors: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and extra outputs, and what the ops save, flat."""
    plan, ops = run.plan, run.members.ops
    inputs = tensors[: run.num_inputs]
    extras = tensors[run.num_inputs + sum(run.num_parameters) :]

    def compute() -> Flat:
        with _Local(plan.shards):
            return _forward_ops(run, inputs, extras)

    given = [*inputs, *extras]
    for i in plan.asked["reads"]:
        given += ops[i].reads(run.ctxs[i])
    flat: Any
    flat, run.captured = plan.captured[0].run(run.ctxs, run.bounds, given, (), compute)
    for i in plan.asked["reads"]:
        run.ctxs[i].given = ()
    meta: Any = run.ctxs[0]
    run.num_outputs, run.many_out, run.ranges, count = meta.layout
    return flat[:count], flat[count:]


def _forward_ops(run: Run, inputs: Sequence[Any], extras: Sequence[Tensor]) -> Flat:
    plan, members, ctxs = run.plan, run.members, run.ctxs
    value: Value = tuple(inputs) if run.many_in else inputs[0]
    given, by_op = iter(extras), []
    for count in members.extra_inputs:
        by_op.append([next(given) for _ in range(count)])
    extra_outputs: list[Sequence[Tensor]] = [()] * len(ctxs)
    for placed in plan.forward:
        first, last = placed.places[0], placed.places[-1]
        value = admitted(members, placed, value)
        try:
            value, extra = placed.op.fuser_forward(
                [ctxs[i] for i in placed.places], value,
                basic_op_extra_inputs=[by_op[i] for i in placed.places],
                prev_op_grad_output_quantizer=plan.quantizers[first][0],
                next_op_input_quantizer=plan.quantizers[last][1], basic_op_kwargs=[run.kwargs[i] for i in placed.places],
            )  # fmt: skip
        except Exception as error:
            raise members.at(placed.places, error) from None
        members.check_count(first, "tuples of extra outputs", len(extra), len(placed.places))
        for i, its in zip(placed.places, extra, strict=True):
            members.check_count(i, "extra outputs", len(its), members.extra_outputs[i])
            extra_outputs[i] = its
    outputs = [tensor_of(one) for one in each(value)]
    results = [*outputs, *[tensor_of(one) for its in extra_outputs for one in its]]
    saved: list[Tensor | None] = []
    ranges = []
    for ctx in ctxs:
        kept = ctx.to_save if ctx.requires_grad else ()
        ranges.append(len(kept))
        saved += [tensor() if callable(tensor) and not isinstance(tensor, Tensor) else tensor for tensor in kept]
        ctx.to_save = ()
    meta: Any = ctxs[0]
    meta.layout = len(outputs), isinstance(value, tuple), ranges, len(results)
    return [*results, *saved]


class _Local:
    """Inside, these ops find this rank's plain tensors in the place of their DTensors."""

    def __init__(self, ops: Sequence[Any]) -> None:
        self.ops = ops

    def __enter__(self) -> None:
        self.before = [dict(op._parameters) for op in self.ops]
        for op in self.ops:
            for name, parameter in op._parameters.items():
                if isinstance(parameter, DTensor):
                    op._parameters[name] = held(parameter)

    def __exit__(self, *error: Any) -> None:
        for op, parameters in zip(self.ops, self.before, strict=True):
            op._parameters.update(parameters)


# Backward


def backward(run: Run, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Flat:
    """The gradients of inputs, parameters and extra inputs."""
    plan, ops = run.plan, run.members.ops
    at = 0
    for ctx, count in zip(run.ctxs, run.ranges, strict=True):
        ctx.saved_tensors = tuple(saved[at : at + count])
        at += count
    for i in plan.asked["begin_backward"]:
        ops[i].begin_backward(run.ctxs[i])

    def compute() -> Flat:
        with _Local(plan.shards):
            return _backward_ops(run, grads)

    reads = [*grads, *saved]
    for i in plan.asked["reads_back"]:
        reads += ops[i].reads_back(run.ctxs[i])
    given = [tensor for tensor in reads if tensor is not None]
    there = () if len(given) == len(reads) else tuple([tensor is not None for tensor in reads])
    states = tuple([tuple(ops[i].state_back(run.ctxs[i])) for i in plan.ends])
    found, _ = plan.captured[1].run(run.ctxs, run.bounds, given, (there, states), compute, run.captured)
    if plan.ends:
        _end(run, found)
    for ctx in run.ctxs:
        ctx.saved_tensors = ctx.given = ()
    return found


def _end(run: Run, found: Flat) -> None:
    """What ops do behind the launches of a backward; takes what they have left off the gradients."""
    first = run.num_inputs + sum(run.num_parameters) + sum(run.members.extra_inputs)
    left, at = iter(found[first:]), run.num_inputs
    del found[first:]
    for i, count in enumerate(run.num_parameters):
        if i in run.plan.ends:
            ctx, grads = run.ctxs[i], found[at : at + count]
            run.members.ops[i].end_backward(ctx, grads, [next(left) for _ in range(ctx.num_left)])
            found[at : at + count] = grads
        at += count


def _backward_ops(run: Run, grads: Sequence[Tensor | None]) -> Flat:
    plan, members, ctxs = run.plan, run.members, run.ctxs
    value: Value = tuple(grads[: run.num_outputs]) if run.many_out else grads[0]
    of_extra, by_op = iter(grads[run.num_outputs :]), []
    for count in members.extra_outputs:
        by_op.append([next(of_extra) for _ in range(count)])
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    shared = {address for address in addresses if addresses.count(address) > 1}
    for ctx in ctxs:
        ctx.shared = shared
    of_parameters: list[Sequence[Any]] = [[None] * count for count in run.num_parameters]
    of_inputs: list[Sequence[Any]] = [[None] * count for count in members.extra_inputs]
    for placed in reversed(plan.backward):
        if not any(plan.learns[i] for i in placed.places):
            break
        value = admitted(members, placed, value)
        try:
            value, parameters, extras = placed.op.fuser_backward(
                [ctxs[i] for i in placed.places], value, basic_op_grad_extra_outputs=[by_op[i] for i in placed.places]
            )
        except Exception as error:
            raise members.at(placed.places, error) from None
        for i, its, more in zip(placed.places, parameters, extras, strict=True):
            members.check_count(i, "gradients of parameters", len(its), len(of_parameters[i]))
            members.check_count(i, "gradients of extra inputs", len(more), len(of_inputs[i]))
            of_parameters[i], of_inputs[i] = its, more
    dxs: list[Any] = [None] * run.num_inputs
    if plan.needs_dx[0]:
        dxs = [tensor_of(one) for one in each(value)]
    left: list[Tensor] = []
    for ctx in [ctxs[i] for i in plan.ends]:
        left += ctx.left
        ctx.num_left, ctx.left = len(ctx.left), ()
    flat = [*dxs, *[one for its in of_parameters for one in its], *[one for its in of_inputs for one in its], *left]
    return [None if one is None else tensor_of(one) for one in flat]


class FuserFn(torch.autograd.Function):
    """`apply(run, *inputs, *parameters, *extra inputs)` -> outputs and extra outputs."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Any) -> tuple[Tensor, ...]:
        results, saved = forward(run, tensors)
        dirty = [tensor for each in run.ctxs for tensor in each.dirty]
        for each_ctx in run.ctxs:
            each_ctx.dirty = ()
        outs, known = list[Tensor](), {*map(id, tensors)}
        clean = {*map(id, dirty)}
        for result in results:  # an output is no input, nor another output, unless it was written to
            outs.append(result.view_as(result) if id(result) in known and id(result) not in clean else result)
            known.add(id(result))
        if dirty:
            ctx.mark_dirty(*dirty)
        ctx.run, ctx.layouts = run, ()
        if run.plan.shards:
            ctx.layouts = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]
        ctx.like = [(result.shape, result.dtype, result.device) for result in results]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Callable[..., tuple[Any, ...]] = _backward_once if torch.is_grad_enabled() else _backward
        if torch._C._is_any_autocast_enabled():
            with no_autocast(grads):
                return run(ctx, *grads)
        return run(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    run: Run = ctx.run
    takes_none = [False] * run.num_outputs + run.members.none_grads
    given = [
        grad if grad is not None or none else torch.zeros(like[0], dtype=like[1], device=like[2])
        for grad, none, like in zip(grads, takes_none, ctx.like, strict=True)
    ]
    found: list[Any] = list(backward(run, given, ctx.saved_tensors))
    for place, layout in enumerate(ctx.layouts):
        if layout is not None and found[place] is not None:
            found[place] = DTensor(found[place], layout, requires_grad=False)
    return None, *[grad if need else None for grad, need in zip(found, ctx.needs_input_grad[1:], strict=True)]


_backward_once = once_differentiable(_backward)
apply_fused = past_functorch(FuserFn)
