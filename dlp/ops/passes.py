"""What the directions of a fuser do: ops in order on lazy values, in reverse on gradients, and autograd's function of both.

forward    what ops keep is saved as one flat list
backward   down to the first op of which anyone needs a gradient
captured   a direction of which all is launches runs as one native call from its third time on (`dlp.ops.captured`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from dlp.ops.calls import FuserCall, Pass, Placed, once
from dlp.ops.captured import Flat, Kept
from dlp.ops.values import HANDED, INTEGERS, LAZY, MANY, Value, each, is_handed, overlap, tensor_of
from dlp.parallel.linear.autograd import layout_keys, multiplies_tf32, no_autocast, only_once, owned, past_functorch
from dlp.parallel.weight.local import held

NONE: dict[str, Any] = {}


def check_count(name: str, what: str, found: Any, expected: int) -> None:
    """RuntimeError where an op returns another number than it declares, or what is no tuple."""
    if not isinstance(found, tuple | list):
        raise RuntimeError(f"{name}: it returned a {type(found).__name__}; due is a tuple of {what}, {expected}")
    if len(found) != expected:
        raise RuntimeError(f"{name}: it returned {len(found)} {what}; it declares {expected}")


def check_shapes(name: str, op: Any, grads: Sequence[Any]) -> None:
    """RuntimeError for a gradient of a parameter that has another shape: autograd would sum it to the shape, where it can."""
    for parameter, grad in zip(() if hasattr(op, "core") else op.op_parameters(), grads, strict=False):
        if isinstance(grad, Tensor) and grad.shape != parameter.shape:
            raise RuntimeError(
                f"{name}: a parameter is {tuple(parameter.shape)}, and the gradient that it returned {tuple(grad.shape)}"
            )


def check_output(name: str, value: Value) -> None:
    """RuntimeError for an output that is no value."""
    for one in each(value):
        if not isinstance(one, Tensor) and not hasattr(one, "tensor"):
            raise RuntimeError(f"{name}: it returned a {type(one).__name__} as its output; due is a tensor")


def check_is_there(name: str, grad: Value) -> None:
    """RuntimeError for a gradient of the input that is none."""
    if grad is None:
        raise RuntimeError(
            f"{name}: it returned None as the gradient of its input, which ops before it need: return zeros where there is none"
        )


class Members:
    """The basic ops of a fuser, in order. `names`: theirs, for messages."""

    def __init__(self, ops: Sequence[Any], names: Sequence[str] | None) -> None:
        self.ops, self.named = tuple(ops), names is not None or len(ops) > 1
        self.names = list(names or (f"op {i} ({type(op).__name__})" for i, op in enumerate(self.ops)))
        self.extra_inputs = [op.num_extra_inputs for op in self.ops]
        self.extra_outputs = [op.num_extra_outputs for op in self.ops]
        self.no_kwargs = [NONE] * len(self.ops)
        self.none_grads = [none for op in self.ops for none in [op.none_grads] * op.num_extra_outputs]

    def check_count(self, place: int, what: str, found: Any, expected: int) -> None:
        check_count(self.names[place], what, found, expected)

    def check_keywords(self, kwargs: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for keywords of more or fewer ops than there are, TypeError for those of an op that takes none."""
        if len(kwargs) != len(self.ops):
            raise ValueError(f"basic_op_kwargs are of {len(kwargs)} basic ops; these are {', '.join(self.names)}")
        for name, op, its in zip(self.names, self.ops, kwargs, strict=True):
            if its and not op.takes_keywords:
                raise TypeError(f"{name}: it takes no keywords; got {', '.join(its)}")

    def check_floating(self, dtype: torch.dtype) -> None:
        """TypeError for an x of integers, where the first op does not say that it takes some."""
        if not (dtype.is_floating_point or INTEGERS in self.ops[0].takes):
            raise TypeError(f"{self.names[0]}: x must be floating point; got {dtype}: convert it before")

    def check_gradient(self, place: int, grad: Value, shapes: Sequence[Sequence[int]]) -> None:
        """RuntimeError for a gradient of the input that has another shape than that, or is none."""
        check_is_there(self.names[place], grad)
        found = [None if one is None else tuple(one.shape) for one in each(grad)]
        if len(found) != len(shapes) or any(one not in (None, its) for one, its in zip(found, shapes, strict=False)):
            raise RuntimeError(
                f"{self.names[place]}: its input is {_listed(shapes)}, and the gradient that it returned {_listed(found)}"
            )

    def at(self, places: Sequence[int], error: Exception) -> Exception:
        """An error of an op, with its name and place; one of a class of its own, as where memory ends, gets a note."""
        names = ", ".join(dict.fromkeys(self.names[i] for i in places))
        if self.named and type(error) in (ValueError, TypeError, RuntimeError):
            said = str(error).removeprefix(f"{names}: ").removeprefix(f"{type(self.ops[places[0]]).__name__}: ")
            return type(error)(f"{names}: {said}").with_traceback(error.__traceback__)
        if self.named:
            error.add_note(f"in {names}")
        return error


def _listed(shapes: Sequence[Any]) -> str:
    return ", ".join(map(str, shapes))


def admitted(members: Members, placed: Placed, value: Value) -> Value:
    """The value as an op takes it: stored, where it does not say that it takes more. ValueError for a tuple it cannot take."""
    takes = placed.op.takes
    check_many(members, placed.places[0], takes, value)
    if isinstance(value, tuple):
        return tuple([_single(takes, one) for one in value])
    return _single(takes, value)


def check_many(members: Members, place: int, takes: frozenset[str], value: Value) -> None:
    """ValueError for a tuple that this op cannot take."""
    if isinstance(value, tuple) and MANY not in takes:
        raise ValueError(
            f"{members.names[place]}: it takes one tensor and is given {len(value)}: of siblings, only ops that say so, as "
            f"Bias, SwiGLU and GEGLU, take several"
        )


def _single(takes: frozenset[str], value: Any) -> Any:
    if is_handed(value):
        return value if HANDED in takes else value.tensor()
    return value if isinstance(value, Tensor) or LAZY in takes else tensor_of(value)


# Forward


def forward(run: Pass, tensors: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The outputs and extra outputs, what the ops save, flat, and the inputs that they have written to."""
    call, reads, flat = run.call, run.reads, None
    kept = None if run.kwargs is not None else call.forward
    if kept is not None:
        flat = call.plan.captured[0].again(kept, call.bounds, reads, run.addresses)
    if flat is None:
        flat, kept = _forward_by_ops(run, tensors)
    if kept is None:
        dirty = [tensor for ctx in run.ctxs or () for tensor in ctx.dirty]
    else:
        run.returned, dirty = kept.returned, [reads[at] for at in kept.returned.dirty]
        run.layout = kept.returned.attributes[0]["layout"]
    count = run.layout[3]
    return flat[:count], flat[count:], dirty  # type: ignore[return-value]


def _forward_by_ops(run: Pass, tensors: Sequence[Any]) -> tuple[Flat, Kept | None]:
    """The same, flat, and the launches that did it, if they were captured."""
    call, ctxs = run.call, run.contexts()
    inputs, extras = tensors[: call.num_inputs], tensors[call.num_inputs + sum(call.plan.num_parameters) :]

    def compute() -> Flat:
        with _Local(call.plan.shards):
            return _forward_ops(run, inputs, extras)

    if run.kwargs is not None:
        return compute(), None
    flat, kept = call.plan.captured[0].run(ctxs, call.bounds, run.reads, run.addresses, (run.same,), compute)
    if kept is not None and kept is not call.forward:
        call.forward = kept
        call.back.clear()
    return flat, kept


def _forward_ops(run: Pass, inputs: Sequence[Any], extras: Sequence[Tensor]) -> Flat:
    plan, members, ctxs = run.call.plan, run.call.members, run.contexts()
    kwargs = run.kwargs or members.no_kwargs
    value: Value = tuple(inputs) if run.call.many else inputs[0]
    given, by_op = iter(extras), []
    for count in members.extra_inputs:
        by_op.append([next(given) for _ in range(count)])
    extra_outputs: list[Sequence[Tensor]] = [()] * len(ctxs)
    for placed in plan.forward:
        first, last = placed.places[0], placed.places[-1]
        value = admitted(members, placed, value)
        meta: Any = ctxs[first]
        meta.in_shapes = [tuple(one.shape) for one in each(value)]
        try:
            found = placed.op.fuser_forward(
                [ctxs[i] for i in placed.places], value,
                basic_op_extra_inputs=[by_op[i] for i in placed.places],
                prev_op_grad_output_quantizer=plan.quantizers[first][0],
                next_op_input_quantizer=plan.quantizers[last][1], basic_op_kwargs=[kwargs[i] for i in placed.places],
            )  # fmt: skip
        except Exception as error:
            raise members.at(placed.places, error) from None
        members.check_count(first, "results, output and extra outputs of each basic op,", found, 2)
        value, extra = found
        check_output(members.names[last], value)
        members.check_count(first, "tuples of extra outputs", extra, len(placed.places))
        for i, its in zip(placed.places, extra, strict=True):
            members.check_count(i, "extra outputs", its, members.extra_outputs[i])
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
    _check_written(members.names, ctxs, saved, ranges)
    meta = ctxs[0]
    meta.layout = run.layout = len(outputs), isinstance(value, tuple), ranges, len(results)
    return [*results, *saved]


def _check_written(names: Sequence[str], ctxs: Sequence[Any], saved: Sequence[Any], ranges: Sequence[int]) -> None:
    """ValueError where an op has written to what an op before it keeps, of which backward would read the new values."""
    written = [(place, tensor) for place, ctx in enumerate(ctxs) for tensor in ctx.dirty]
    keepers = [place for place, count in enumerate(ranges) for _ in range(count)] if written else ()
    for place, tensor in written:
        for keeper, kept in zip(keepers, saved, strict=False):
            if keeper < place and kept is not None and overlap(kept, tensor):
                raise ValueError(
                    f"{names[place]}: it writes to a tensor that {names[keeper]} keeps for backward: set in_place=False, or "
                    f"give it a copy"
                )


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


def backward(run: Pass, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Flat:
    """The gradients of inputs, parameters and extra inputs."""
    call = run.call
    plan, given, parts = call.plan, [*grads, *saved], list[Sequence[Tensor]]()
    # Whether all but the gradients lies as forward has left it
    alike = run.returned is not None and not (run.moved or plan.ends)
    for i, linear, reads in call.learning:
        session, sides = linear.bound.session, run.sides[i]
        session.scales = run.scales[i]
        session.in_layer_backward(linear.bound)
        its: Sequence[Tensor] = ()
        if reads and sides is not None:
            its = sides.columnwise
        elif reads:
            its = linear.op.operands_back(_saved(run, saved)[linear.place])
            alike = alike and not its
        parts.append(its)
        given += its
    for sums in plan.sums:
        sums.check_announced()
    every = [tensor for tensor in given if tensor is not None]
    there = () if len(every) == len(given) else tuple([tensor is not None for tensor in given])
    addresses = [tensor.data_ptr() for tensor in every]
    flat, layout = None, None
    if alike:
        own = [grad for grad in grads if grad is not None]
        distinct, its_addresses, same = once(every, addresses)
        layout = there, same, multiplies_tf32(every[0]), *layout_keys(own, addresses[: len(own)])
        kept = call.back.get(layout)
        if kept is not None:
            flat = plan.captured[1].again(kept, call.bounds, distinct, its_addresses)
    if flat is None:
        ctxs = _saved(run, saved)
        for (_, linear, _), its in zip(call.learning, parts, strict=True):
            ctxs[linear.place].given = its
        flat, kept = _backward_by_ops(run, grads, there, every, addresses)
        if kept is not None and layout is not None:
            call.back[layout] = kept
    for _, linear, _ in call.learning:
        linear.bound.session.scales = None
    return flat


def _saved(run: Pass, saved: Sequence[Tensor]) -> list[Any]:
    """The contexts of the ops, with what these have saved."""
    ctxs, at = run.contexts(), 0
    for ctx, count in zip(ctxs, run.layout[2], strict=True):
        ctx.saved_tensors = tuple(saved[at : at + count])
        at += count
    return ctxs


def _backward_by_ops(
    run: Pass, grads: Sequence[Tensor | None], there: tuple[bool, ...], given: Sequence[Tensor], addresses: Sequence[int]
) -> tuple[Flat, Kept | None]:  # fmt: skip
    """The gradients, of contexts that have what was saved, and the launches that made them, if they were captured. `given`: all
    that is read but gradients that wgrads are added to."""
    call, ctxs, plan, states = run.call, run.contexts(), run.call.plan, list[Any]()
    for _, linear, _ in call.learning:
        ctx = ctxs[linear.place]
        ctx.into = linear.op.targets(ctx) if linear.place in plan.ends else ()
        states += [None if to is None else (to.overwrite, to.tensor.dtype) for to in ctx.into]
        given = [*given, *[to.tensor for to in ctx.into if to is not None]]
    addresses = [*addresses, *[tensor.data_ptr() for tensor in given[len(addresses) :]]]

    def compute() -> Flat:
        with _Local(plan.shards):
            return _backward_ops(run, ctxs, grads)

    reads, addresses, same = once(given, addresses)
    flat, kept = plan.captured[1].run(ctxs, call.bounds, reads, addresses, (there, same, *states), compute)
    if plan.ends:
        _end(call, ctxs, flat)
    for ctx in ctxs:
        ctx.saved_tensors = ctx.given = ()
    return flat, kept


def _end(call: FuserCall, ctxs: Sequence[Any], found: Flat) -> None:
    """What linears do behind the launches of a backward; takes what they have left off the gradients."""
    plan, members = call.plan, call.members
    first = call.num_inputs + sum(plan.num_parameters) + sum(members.extra_inputs)
    left, at = iter(found[first:]), call.num_inputs
    del found[first:]
    for i, count in enumerate(plan.num_parameters):
        if i in plan.ends:
            ctx, grads = ctxs[i], found[at : at + count]
            members.ops[i].end_backward(ctx, grads, [next(left) for _ in range(ctx.num_left)])
            found[at : at + count] = grads
        at += count


def _backward_ops(run: Pass, ctxs: Sequence[Any], grads: Sequence[Tensor | None]) -> Flat:
    plan, members = run.call.plan, run.call.members
    outputs, many, _, _ = run.layout
    value: Value = tuple(grads[:outputs]) if many else grads[0]
    of_extra, by_op = iter(grads[outputs:]), []
    for count in members.extra_outputs:
        by_op.append([next(of_extra) for _ in range(count)])
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    shared = {address for address in addresses if addresses.count(address) > 1}
    for ctx in ctxs:
        ctx.shared = shared
    of_parameters: list[Sequence[Any]] = [[None] * count for count in plan.num_parameters]
    of_inputs: list[Sequence[Any]] = [[None] * count for count in members.extra_inputs]
    for placed in reversed(plan.backward):
        if not any(plan.learns[i] for i in placed.places):
            break
        value = admitted(members, placed, value)
        try:
            found = placed.op.fuser_backward(
                [ctxs[i] for i in placed.places], value, basic_op_grad_extra_outputs=[by_op[i] for i in placed.places]
            )
        except Exception as error:
            raise members.at(placed.places, error) from None
        first, count = placed.places[0], len(placed.places)
        members.check_count(first, "results, gradients of input, of parameters and of extra inputs,", found, 3)
        value, parameters, extras = found
        if plan.needs_dx[first] and (shapes := getattr(ctxs[first], "in_shapes", None)) is not None:
            members.check_gradient(first, value, shapes)
        members.check_count(first, "tuples of gradients of parameters", parameters, count)
        members.check_count(first, "tuples of gradients of extra inputs", extras, count)
        for i, its, more in zip(placed.places, parameters, extras, strict=True):
            members.check_count(i, "gradients of parameters", its, len(of_parameters[i]))
            members.check_count(i, "gradients of extra inputs", more, len(of_inputs[i]))
            check_shapes(members.names[i], members.ops[i], its)
            of_parameters[i], of_inputs[i] = its, more
    dxs: list[Any] = [None] * run.call.num_inputs
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
    def forward(ctx: Any, run: Pass, *tensors: Any) -> tuple[Tensor, ...]:
        results, saved, dirty = forward(run, tensors)
        results = list(owned(results, tensors))
        run.drop()
        known, written = {*map(id, tensors)}, {id(tensor): tensor for tensor in dirty}
        returned = []
        for i, result in enumerate(results):  # an output is no input, nor another output, unless it was written to
            if id(result) in written:
                returned.append(written.pop(id(result)))
            elif id(result) in known:
                results[i] = result.view_as(result)
            known.add(id(result))
        if returned:
            ctx.mark_dirty(*returned)
        for tensor in written.values():  # nobody may read it in backward as it was
            increment_version(tensor)
        if written:  # views of these, made where there is no autograd
            saved = [each if each is None or not each._is_view() else each.detach() for each in saved]
        ctx.run = run
        ctx.like = [(result.shape, result.dtype, result.device) for result in results]
        run.moved = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Callable[..., tuple[Any, ...]] = _backward_once if torch.is_grad_enabled() else _backward
        if torch._C._is_any_autocast_enabled():
            with no_autocast(grads):
                return run(ctx, *grads)
        return run(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    run: Pass = ctx.run
    call = run.call
    if any([grad is None for grad in grads]):
        count, several, _, _ = run.layout
        takes_none = [several and call.plan.backward[-1].op.none_grads] * count + call.members.none_grads
        grads = tuple([
            grad if grad is not None or none else torch.zeros(like[0], dtype=like[1], device=like[2])
            for grad, none, like in zip(grads, takes_none, ctx.like, strict=True)
        ])  # fmt: skip
    found: list[Any] = backward(run, grads, ctx.saved_tensors)
    for place, layout in enumerate(call.layouts):
        if layout is not None and found[place] is not None:
            found[place] = DTensor(found[place], layout, requires_grad=False)
    return None, *[grad if need else None for grad, need in zip(found, ctx.needs_input_grad[1:], strict=True)]


_backward_once = only_once(_backward)
apply_fused = past_functorch(FuserFn)
