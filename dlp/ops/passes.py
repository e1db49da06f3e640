"""Forward and backward of a fuser, which the autograd function `PassFunction` runs.

forward    runs the ops in order on values (`dlp.ops.values`), and saves the tensors of all ops as one flat list
backward   runs the ops in reverse order on gradients, down to the first op that needs a gradient

From the third call on, a captured pass replays its launches instead (`dlp.ops.captured`), and no op runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from dlp.ops.calls import FuserCall, Pass, Placed, ResultLayout, deduplicated
from dlp.ops.captured import Flat, ReplayEntry
from dlp.ops.values import HANDED, INTEGERS, LAZY, MANY, Value, each, is_handed, share_bytes, tensor_of
from dlp.parallel.weight.local import local_tensor
from dlp.runtime.function import Passes, base_of, layout_keys, multiplies_tf32, owned


def check_count(name: str, what: str, found: Any, expected: int) -> None:
    """Raise RuntimeError unless `found`, which an op returned, is a tuple or list of length `expected`. what: name of its
    elements, for the message."""
    if not isinstance(found, tuple | list):
        raise RuntimeError(
            f"{name}: the op returned a {type(found).__name__}; expected a tuple of {what.removesuffix(',')}, of length "
            f"{expected}"
        )
    if len(found) != expected:
        raise RuntimeError(f"{name}: the op returned {len(found)} {what}; expected {expected}, as declared")


def check_shapes(name: str, op: Any, grads: Sequence[Any]) -> None:
    """Raise RuntimeError for a parameter gradient whose shape is not that of the parameter. Autograd would silently sum a
    broadcast gradient to the shape of the parameter. Linears are not checked."""
    for parameter, grad in zip(() if hasattr(op, "core") else op.op_parameters(), grads, strict=False):
        if isinstance(grad, Tensor) and grad.shape != parameter.shape:
            raise RuntimeError(
                f"{name}: the op returned a gradient of shape {tuple(grad.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: return a gradient of the same shape"
            )


def check_output(name: str, value: Value) -> None:
    """Raise RuntimeError for an output that is neither a tensor nor a lazy or quantized value."""
    for one in each(value):
        if not isinstance(one, Tensor) and not hasattr(one, "tensor"):
            raise RuntimeError(f"{name}: the op returned a {type(one).__name__} as output; expected a tensor")


def check_not_none(name: str, grad: Value) -> None:
    """Raise RuntimeError if the gradient of the input is None."""
    if grad is None:
        raise RuntimeError(
            f"{name}: the op returned None as the gradient of the input, which earlier ops need: return zeros instead"
        )


class Members:
    """The basic ops of a fuser, in order, with checks of their inputs and outputs.

    names: for each op its name in the Sequential, for messages; None: messages give index and class.
    """

    def __init__(self, ops: Sequence[Any], names: Sequence[str] | None) -> None:
        self.ops, self.named = tuple(ops), names is not None or len(ops) > 1
        self.names = list(names or (f"op {i} ({type(op).__name__})" for i, op in enumerate(self.ops)))
        self.extra_inputs = [op.num_extra_inputs for op in self.ops]
        self.extra_outputs = [op.num_extra_outputs for op in self.ops]
        self.no_kwargs: list[Mapping[str, Any]] = [{}] * len(self.ops)
        self.none_grads = [none for op in self.ops for none in [op.none_grads] * op.num_extra_outputs]

    def check_count(self, place: int, what: str, found: Any, expected: int) -> None:
        check_count(self.names[place], what, found, expected)

    def check_keywords(self, kwargs: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError unless `kwargs` has one mapping for each op, TypeError for keywords of an op that takes none."""
        if len(kwargs) != len(self.ops):
            raise ValueError(
                f"basic_op_kwargs has {len(kwargs)} entries; expected one entry for each of {', '.join(self.names)}"
            )
        for name, op, keywords in zip(self.names, self.ops, kwargs, strict=True):
            if keywords and not op.takes_keywords:
                raise TypeError(f"{name}: the op takes no keywords; got {', '.join(keywords)}")

    def check_floating(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless x is floating-point, or the first op takes integers. dtype: dtype of x."""
        if not (dtype.is_floating_point or INTEGERS in self.ops[0].takes):
            raise TypeError(f"{self.names[0]}: x must be floating point; got {dtype}: convert x before the call")

    def check_gradient(self, place: int, grad: Value, shapes: Sequence[Sequence[int]]) -> None:
        """Raise RuntimeError if the gradient that an op returned for its input is None, or if the shapes differ from `shapes`,
        the shapes of the input (one for each sibling). The gradient of a single sibling may be None."""
        check_not_none(self.names[place], grad)
        returned = [None if one is None else tuple(one.shape) for one in each(grad)]
        pairs = zip(returned, shapes, strict=False)
        if len(returned) != len(shapes) or any(one not in (None, due) for one, due in pairs):
            raise RuntimeError(
                f"{self.names[place]}: the op returned a gradient of shape {_listed(returned)} for an input of shape "
                f"{_listed(shapes)}: return a gradient of the same shape"
            )

    def named_error(self, places: Sequence[int], error: Exception) -> Exception:
        """Return the error to raise in place of an op's error. If the fuser has names or several ops, the names are added to
        the message of a ValueError, TypeError or RuntimeError, and as a note to errors of other classes, such as torch's
        OutOfMemoryError."""
        names = ", ".join(dict.fromkeys(self.names[i] for i in places))
        if self.named and type(error) in (ValueError, TypeError, RuntimeError):
            message = str(error).removeprefix(f"{names}: ").removeprefix(f"{type(self.ops[places[0]]).__name__}: ")
            return type(error)(f"{names}: {message}").with_traceback(error.__traceback__)
        if self.named:
            error.add_note(f"in {names}")
        return error


def _listed(shapes: Sequence[Any]) -> str:
    return ", ".join(map(str, shapes))


def adapted(members: Members, placed: Placed, value: Value) -> Value:
    """Convert a value to a form that the op takes (`BasicOperation.takes`): store lazy values and decode quantized values, if
    the op does not take them. Raises ValueError for a tuple if the op takes one tensor."""
    takes = placed.op.takes
    check_many(members, placed.places[0], takes, value)
    if isinstance(value, tuple):
        return tuple([_adapted_one(takes, one) for one in value])
    return _adapted_one(takes, value)


def check_many(members: Members, place: int, takes: frozenset[str], value: Value) -> None:
    """Raise ValueError for a tuple of siblings, if the op does not take tuples."""
    if isinstance(value, tuple) and MANY not in takes:
        raise ValueError(
            f"{members.names[place]}: expected one tensor; got {len(value)} siblings, which only Bias, gates such as SwiGLU, "
            f"and ops with 'many' in `takes` accept"
        )


def _adapted_one(takes: frozenset[str], value: Any) -> Any:
    """Convert a single value as `adapted` does."""
    if is_handed(value):
        return value if HANDED in takes else value.tensor()
    return value if isinstance(value, Tensor) or LAZY in takes else tensor_of(value)


# Forward


def forward(ctx: Any, run: Pass, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute outputs and extra outputs from `tensors`: inputs, parameters and extra inputs. ctx: context of autograd; None:
    there will be no backward."""
    call, reads, flat = run.call, run.reads, None
    entry = None if run.kwargs is not None else call.forward
    if entry is not None:
        flat = call.plan.captured[0].replay(entry, call.bounds, reads, run.addresses)
    if flat is None:
        flat, entry = _forward_by_ops(run, tensors)
    if entry is None:
        dirty = [tensor for each in run.ctxs or () for tensor in each.dirty]
    else:
        run.replayed, dirty = entry.results, [reads[at] for at in entry.results.dirty]
        run.layout = entry.results.attributes[0]["layout"]
    count = run.layout.num_results
    results: list[Any] = flat[:count]
    if ctx is None:
        return tuple(results)

    results = list(owned(results, tensors))
    run.drop()
    known, written = {*map(id, tensors)}, {id(tensor): tensor for tensor in dirty}
    returned, saved = list[Tensor](), flat[count:]
    for i, result in enumerate(results):  # return an input or an earlier output as a view, unless an op wrote to it
        if id(result) in written:
            returned.append(written.pop(id(result)))
        elif id(result) in known:
            results[i] = result.view_as(result)
        known.add(id(result))
    if returned:
        ctx.mark_dirty(*returned)
    for tensor in written.values():  # so that backward raises if an op saved the tensor before the write
        increment_version(tensor)
    # If a saved view was made under no_grad and is written to, the error of autograd is about no_grad: save detached tensors
    saved = [each if each is None or not each._is_view() else each.detach() for each in saved]
    ctx.zeros_like = [(result.shape, result.dtype, result.device) for result in results]
    run.moved = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    ctx.save_for_backward(*saved)
    return tuple(results)


def _forward_by_ops(run: Pass, tensors: Sequence[Any]) -> tuple[Flat, ReplayEntry | None]:
    """Run the ops of forward, or captured launches. Return results and saved tensors as one flat list, and the captured
    launches that ran (None: the ops ran)."""
    call, ctxs = run.call, run.contexts()
    inputs, extras = tensors[: call.num_inputs], tensors[call.num_inputs + sum(call.plan.num_parameters) :]

    def compute() -> Flat:
        with _LocalParameters(call.plan.shards):
            return _forward_ops(run, inputs, extras)

    if run.kwargs is not None:
        return compute(), None
    flat, entry = call.plan.captured[0].run(ctxs, call.bounds, run.reads, run.addresses, (run.same,), compute)
    if entry is not None and entry is not call.forward:
        call.forward = entry
        call.backward.clear()
    return flat, entry


def _forward_ops(run: Pass, inputs: Sequence[Any], extras: Sequence[Tensor]) -> Flat:
    """Run the ops of forward. Return outputs, extra outputs and saved tensors as one flat list, and set `run.layout`."""
    plan, members, ctxs = run.call.plan, run.call.members, run.contexts()
    kwargs = run.kwargs or members.no_kwargs
    value: Value = tuple(inputs) if run.call.many else inputs[0]
    remaining = iter(extras)
    extras_by_op = [[next(remaining) for _ in range(count)] for count in members.extra_inputs]
    extra_outputs: list[Sequence[Tensor]] = [()] * len(ctxs)
    for placed in plan.forward:
        first, last = placed.places[0], placed.places[-1]
        value = adapted(members, placed, value)
        ctxs[first].in_shapes = [tuple(one.shape) for one in each(value)]
        try:
            results = placed.op.fuser_forward(
                [ctxs[i] for i in placed.places], value,
                basic_op_extra_inputs=[extras_by_op[i] for i in placed.places],
                prev_op_grad_output_quantizer=plan.quantizers[first][0],
                next_op_input_quantizer=plan.quantizers[last][1], basic_op_kwargs=[kwargs[i] for i in placed.places],
            )  # fmt: skip
        except Exception as error:
            raise members.named_error(placed.places, error) from None
        value, extra = _checked_outputs(members, placed.places, results)
        for i, of_op in zip(placed.places, extra, strict=True):
            extra_outputs[i] = of_op

    # All ops have run. Store the lazy values that no cast has computed; from here on all tensors to save exist.
    outputs = [tensor_of(one) for one in each(value)]
    results = [*outputs, *[tensor_of(one) for of_op in extra_outputs for one in of_op]]
    saved: list[Tensor | None] = []
    num_saved = []
    for ctx in ctxs:
        to_save = ctx.to_save if ctx.requires_grad else ()
        num_saved.append(len(to_save))
        saved += [tensor() if callable(tensor) and not isinstance(tensor, Tensor) else tensor for tensor in to_save]
        ctx.to_save = ()
    _check_written(members.names, ctxs, saved, num_saved)
    ctxs[0].layout = run.layout = ResultLayout(len(outputs), isinstance(value, tuple), num_saved, len(results))
    return [*results, *saved]


def _checked_outputs(members: Members, places: Sequence[int], results: Any) -> tuple[Value, Sequence[Sequence[Tensor]]]:
    """Return the output and the extra outputs in `results` of `fuser_forward`. Raises RuntimeError if their numbers differ from
    the numbers that the ops declare."""
    members.check_count(places[0], "results, output and extra outputs of each basic op,", results, 2)
    value, extra = results
    check_output(members.names[places[-1]], value)
    members.check_count(places[0], "tuples of extra outputs", extra, len(places))
    for i, of_op in zip(places, extra, strict=True):
        members.check_count(i, "extra outputs", of_op, members.extra_outputs[i])
    return value, extra


def _check_written(names: Sequence[str], ctxs: Sequence[Any], saved: Sequence[Any], num_saved: Sequence[int]) -> None:
    """Raise ValueError if an op has written to a tensor that an earlier op saves, since backward would read the new values."""
    written = [(writer, tensor) for writer, ctx in enumerate(ctxs) for tensor in ctx.dirty]
    savers = [saver for saver, count in enumerate(num_saved) for _ in range(count)] if written else ()
    for writer, tensor in written:
        for saver, other in zip(savers, saved, strict=False):
            if saver < writer and other is not None and share_bytes(other, tensor):
                raise ValueError(
                    f"{names[writer]}: the op writes to a tensor that {names[saver]} saves for backward: set in_place=False, "
                    f"or pass a copy"
                )


class _LocalParameters:
    """Context manager that replaces DTensor parameters of these ops by this rank's plain tensors."""

    def __init__(self, ops: Sequence[Any]) -> None:
        self.ops = ops

    def __enter__(self) -> None:
        self.before = [dict(op._parameters) for op in self.ops]
        for op in self.ops:
            for name, parameter in op._parameters.items():
                if isinstance(parameter, DTensor):
                    op._parameters[name] = local_tensor(parameter)

    def __exit__(self, *error: Any) -> None:
        for op, parameters in zip(self.ops, self.before, strict=True):
            op._parameters.update(parameters)


# Backward


def backward(run: Pass, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Flat:
    """Return the gradients of inputs, parameters and extra inputs, in this order; None for gradients that are not needed.

    grads: gradients of outputs and extra outputs; saved: tensors that forward has saved.
    """
    call = run.call
    plan, given, parts = call.plan, [*grads, *saved], list[Sequence[Tensor]]()
    # If forward replayed captured launches, saved tensors and weights have the same layouts as in the last backward, unless
    # saved-tensor hooks moved them. A key of the gradients alone is then enough to look up the captured launches of a backward
    # without main gradients and delayed wgrads.
    keyed_by_grads = run.replayed is not None and not (run.moved or plan.with_end_backward)
    for i, linear, reads_w in call.backward_linears:
        session, weight_parts = linear.bound.session, run.weight_parts[i]
        if run.scales[i] is session.now:
            session.scales = None
        else:
            session.resume(linear.bound.spec, run.scales[i])
        session.in_layer_backward(linear.bound.spec)
        read: Sequence[Tensor] = ()
        if reads_w and weight_parts is not None:
            read = weight_parts.columnwise
        elif reads_w:
            read = linear.op.operands_back(_contexts_of(run, saved)[linear.place])
            keyed_by_grads = keyed_by_grads and not read
        parts.append(read)
        given += read
    for sums in plan.sums:
        sums.check_announced()
    tensors = [tensor for tensor in given if tensor is not None]
    is_given = () if len(tensors) == len(given) else tuple([tensor is not None for tensor in given])
    addresses = [tensor.data_ptr() for tensor in tensors]
    flat, key = None, None
    if keyed_by_grads:
        own = [grad for grad in grads if grad is not None]
        reads, read_addresses, same = deduplicated(tensors, addresses)
        rounds = tensors[0].dtype is torch.float32 and multiplies_tf32(tensors[0])
        key = is_given, same, rounds, *layout_keys(own, addresses[: len(own)])
        entry = call.backward.get(key)
        if entry is not None:
            flat = plan.captured[1].replay(entry, call.bounds, reads, read_addresses)
    if flat is None:
        ctxs = _contexts_of(run, saved)
        for (_, linear, _), read in zip(call.backward_linears, parts, strict=True):
            ctxs[linear.place].pass_tensors = read
        flat, entry = _backward_by_ops(run, grads, is_given, tensors, addresses)
        if entry is not None and key is not None:
            call.backward[key] = entry
    for _, linear, _ in call.backward_linears:
        linear.bound.session.scales = None
        if linear.bound.session.drawn_again is not None:
            linear.bound.session.end_layer_backward()
    return flat


def _contexts_of(run: Pass, saved: Sequence[Tensor]) -> list[Any]:
    """Return the contexts of the ops, and set `saved_tensors` of each from the flat list of saved tensors."""
    ctxs, at = run.contexts(), 0
    for ctx, count in zip(ctxs, run.layout.num_saved, strict=True):
        ctx.saved_tensors = tuple(saved[at : at + count])
        at += count
    return ctxs


def _backward_by_ops(
    run: Pass, grads: Sequence[Tensor | None], is_given: tuple[bool, ...], given: Sequence[Tensor],
    addresses: Sequence[int],
) -> tuple[Flat, ReplayEntry | None]:  # fmt: skip
    """Run the ops of backward, or captured launches. Return the gradients as a flat list, and the captured launches that ran
    (None: the ops ran). `saved_tensors` of the contexts must be set.

    is_given           for each gradient, saved tensor and part of a weight: whether it is not None; empty: none is None
    given, addresses   the tensors that are not None, and their addresses; this function appends main gradients
    """
    call, ctxs, plan, states = run.call, run.contexts(), run.call.plan, list[Any]()
    for _, linear, _ in call.backward_linears:
        ctx = ctxs[linear.place]
        ctx.into = linear.op.targets(ctx) if linear.place in plan.with_end_backward else ()
        states += [None if to is None else (to.overwrite, to.tensor.dtype) for to in ctx.into]
        given = [*given, *[to.tensor for to in ctx.into if to is not None]]
    addresses = [*addresses, *[tensor.data_ptr() for tensor in given[len(addresses) :]]]

    def compute() -> Flat:
        with _LocalParameters(plan.shards):
            return _backward_ops(run, ctxs, grads)

    reads, addresses, same = deduplicated(given, addresses)
    flat, entry = plan.captured[1].run(ctxs, call.bounds, reads, addresses, (is_given, same, *states), compute)
    if plan.with_end_backward:
        _end_backwards(call, ctxs, flat)
    for ctx in ctxs:
        ctx.saved_tensors = ctx.pass_tensors = ()
    return flat, entry


def _end_backwards(call: FuserCall, ctxs: Sequence[Any], flat: Flat) -> None:
    """Call `end_backward` of the linears in `FuserPlan.with_end_backward`, and remove the operands of delayed wgrads from the
    end of the flat list."""
    plan, members = call.plan, call.members
    first = call.num_inputs + sum(plan.num_parameters) + sum(members.extra_inputs)
    deferred, at = iter(flat[first:]), call.num_inputs
    del flat[first:]
    for i, count in enumerate(plan.num_parameters):
        if i in plan.with_end_backward:
            ctx, grads = ctxs[i], flat[at : at + count]
            members.ops[i].end_backward(ctx, grads, [next(deferred) for _ in range(ctx.num_deferred)])
            flat[at : at + count] = grads
        at += count


def _backward_ops(run: Pass, ctxs: Sequence[Any], grads: Sequence[Tensor | None]) -> Flat:
    """Run the ops of backward. Return the gradients of inputs, parameters and extra inputs, and the operands of delayed wgrads,
    as one flat list."""
    plan, members = run.call.plan, run.call.members
    count = run.layout.num_outputs
    value: Value = tuple(grads[:count]) if run.layout.many else grads[0]
    remaining = iter(grads[count:])
    extras_by_op = [[next(remaining) for _ in range(count)] for count in members.extra_outputs]
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    shared = {address for address in addresses if addresses.count(address) > 1}
    for ctx in ctxs:
        ctx.shared_addresses = shared
    of_parameters: list[Sequence[Any]] = [[None] * count for count in plan.num_parameters]
    of_extras: list[Sequence[Any]] = [[None] * count for count in members.extra_inputs]
    for placed in reversed(plan.backward):
        if not any(plan.needs_backward[i] for i in placed.places):
            break
        value = adapted(members, placed, value)
        try:
            results = placed.op.fuser_backward(
                [ctxs[i] for i in placed.places], value,
                basic_op_grad_extra_outputs=[extras_by_op[i] for i in placed.places],
            )  # fmt: skip
        except Exception as error:
            raise members.named_error(placed.places, error) from None
        shapes = getattr(ctxs[placed.places[0]], "in_shapes", None) if plan.needs_dx[placed.places[0]] else None
        value, parameters, extras = _checked_grads(members, placed.places, results, shapes, plan.num_parameters)
        for i, of_op, of_extra in zip(placed.places, parameters, extras, strict=True):
            of_parameters[i], of_extras[i] = of_op, of_extra

    # All ops have run. Bias gradients, which casts computed as column sums, exist now. Store the gradients that are still lazy.
    dxs: list[Any] = [None] * run.call.num_inputs
    if plan.needs_dx[0]:
        dxs = [tensor_of(one) for one in each(value)]
    deferred: list[Tensor] = []
    for ctx in [ctxs[i] for i in plan.with_end_backward]:
        deferred += ctx.deferred
        ctx.num_deferred, ctx.deferred = len(ctx.deferred), ()
    flat = [*dxs, *chain.from_iterable(of_parameters), *chain.from_iterable(of_extras), *deferred]
    return [None if one is None else tensor_of(one) for one in flat]


def _checked_grads(
    members: Members, places: Sequence[int], results: Any, shapes: Sequence[Sequence[int]] | None,
    num_parameters: Sequence[int],
) -> tuple[Value, Sequence[Sequence[Any]], Sequence[Sequence[Any]]]:  # fmt: skip
    """Return the gradients of input, parameters and extra inputs in `results` of `fuser_backward`.

    shapes: shapes of the input; None: the gradient of the input is not needed. Raises RuntimeError for a wrong number of
    gradients, for gradients whose shapes differ from the input or the parameters, and if the needed gradient of the input is
    None.
    """
    first = places[0]
    members.check_count(first, "results, gradients of input, of parameters and of extra inputs,", results, 3)
    value, parameters, extras = results
    if shapes is not None:
        members.check_gradient(first, value, shapes)
    members.check_count(first, "tuples of gradients of parameters", parameters, len(places))
    members.check_count(first, "tuples of gradients of extra inputs", extras, len(places))
    for i, of_op, of_extra in zip(places, parameters, extras, strict=True):
        members.check_count(i, "gradients of parameters", of_op, num_parameters[i])
        members.check_count(i, "gradients of extra inputs", of_extra, members.extra_inputs[i])
        check_shapes(members.names[i], members.ops[i], of_op)
    return value, parameters, extras


def _recorded_backward(ctx: Any, run: Pass, grads: Sequence[Tensor | None]) -> Sequence[Any]:
    """Run `backward` for autograd: first replace gradients of outputs that are None by zeros, unless the op takes None
    (`BasicOperation.none_grads`); then return the gradients of DTensors as DTensors."""
    call = run.call
    if any([grad is None for grad in grads]):
        of_outputs = run.layout.many and call.plan.backward[-1].op.none_grads
        takes_none = [of_outputs] * run.layout.num_outputs + call.members.none_grads
        grads = tuple([
            grad if grad is not None or none else torch.zeros(shape, dtype=dtype, device=device)
            for grad, none, (shape, dtype, device) in zip(grads, takes_none, ctx.zeros_like, strict=True)
        ])  # fmt: skip
    results: list[Any] = _apart(backward(run, grads, ctx.saved_tensors))
    for i, spec in enumerate(call.layouts):
        if spec is not None and results[i] is not None:
            results[i] = DTensor(results[i], spec, requires_grad=False)
    return [grad if need else None for grad, need in zip(results, ctx.needs_input_grad[2:], strict=True)]


def _apart(grads: list[Any]) -> list[Any]:
    """Copy each gradient that is a view of the memory of another gradient. Autograd keeps a gradient without a copy, as `grad`
    of a leaf, if there is no other reference to the tensor: a second backward would add to the `grad` of both leaves."""
    for i, one in enumerate(grads):
        if one is None or not one._is_view():
            continue
        alike = [other for other in grads if other is not None and other is not one and base_of(other) is one._base]
        if any([share_bytes(other, one) for other in alike]):
            grads[i] = one.clone()
    return grads


FUSER = Passes(forward, _recorded_backward)
