"""Ops one by one, for what traces or watches: torch.compile, dispatch modes, fake tensors.

Each op runs `plain`, code that autograd differentiates by itself, and a linear its two opaque ops. A norm or a gate
right before a linear runs as its prologue, in the cast of it. So a graph holds no fuser, and `fullgraph=True` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.context import OWN, OperationContext
from dlp.ops.handed import Handed
from dlp.ops.passes import check_count, check_is_there, check_many, check_output
from dlp.ops.values import each, tensor_of
from dlp.parallel.weight.local import local


def one_by_one(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    """What the fuser returns. Ops that conversion has replicated see this rank's tensors in place of their DTensors. TypeError
    for an x that code which is not compiled has quantized."""
    if torch.compiler.is_dynamo_compiling() and isinstance(x, Handed):
        raise TypeError(
            f"{fuser.names[0]}: compiled code reads values, and is given a Handed: compile what hands it on with it, or pass "
            f"its tensor()"
        )
    fuser.members.check_floating(each(x)[0].dtype)
    held = [(op, dict(op._parameters)) for op in fuser.basic_ops if not hasattr(op, "core")]
    for op, parameters in held:
        sums = getattr(op, "tp_sums", None)
        before = None if sums is None else sums.check_announced
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                op._parameters[name] = local(parameter, op.layer_name, before=before)
    try:
        return _run(fuser, x, extra_inputs, kwargs)
    finally:
        for op, parameters in held:
            op._parameters.update(parameters)


def _run(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    members, ops, at, place = fuser.members, fuser.basic_ops, 0, 0
    outputs: list[Tensor] = []
    while place < len(ops):
        op = ops[place]
        taken = extra_inputs[at : at + op.num_extra_inputs]
        at += op.num_extra_inputs
        if op.part_of is not None:  # that linear has done it
            place += 1
            continue
        check_many(members, place, op.takes, x)
        behind = ops[place + 1] if place + 1 < len(ops) else None
        asked = None if behind is None else op.as_prologue(x, behind)
        places = [place] if asked is None else [place, place + 1]
        try:
            if asked is not None:
                x = behind.with_prologue(*asked)  # type: ignore[union-attr]
            elif op.overrides("plain"):
                x = op.plain(x, *taken, **kwargs[place])
            else:
                x = one_op(op, members.names[place], x, taken, kwargs[place])
        except Exception as error:
            raise members.at(places, error) from None
        if op.num_extra_outputs:
            members.check_count(place, "outputs", x, 1 + op.num_extra_outputs)
            x, *more = x
            outputs += more
        place += len(places)
    return (x, *outputs) if outputs else x


def one_op(op: Any, name: str, x: Any, extra_inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Any:
    """The output of a basic op by itself, with extra outputs a tuple. RuntimeError for other numbers than it declares."""
    results = OneOpFn.apply(op, name, kwargs, x, *extra_inputs, *op.op_parameters())
    return results if op.num_extra_outputs else results[0]


class TracedContext(OperationContext):
    """A context that lists an op's own attributes, since dynamo of torch 2.11 cannot iterate over a `__dict__`."""

    def __init__(self) -> None:
        object.__setattr__(self, "attributes", {})

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in OWN:
            self.attributes[name] = value  # type: ignore[attr-defined]


class OneOpFn(torch.autograd.Function):
    """`apply(op, name, kwargs, x, *extra inputs, *parameters)` -> the output and the extra outputs of a basic op."""

    @staticmethod
    def forward(ctx: Any, op: Any, name: str, kwargs: Mapping[str, Any], x: Tensor, *tensors: Tensor) -> Any:
        own: Any = TracedContext()
        found = op.fuser_forward(
            [own], x, basic_op_extra_inputs=[tensors[: op.num_extra_inputs]], prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None, basic_op_kwargs=[kwargs],
        )  # fmt: skip
        check_count(name, "results, output and extra outputs of each basic op,", found, 2)
        y, extra = found
        check_output(name, y)
        check_count(name, "tuples of extra outputs", extra, 1)
        (more,) = extra
        check_count(name, "extra outputs", more, op.num_extra_outputs)
        saved = [each() if callable(each) and not isinstance(each, Tensor) else each for each in own.to_save]
        if own.dirty:
            ctx.mark_dirty(*own.dirty)
        ctx.op, ctx.name, ctx.count = op, name, len(tensors) - op.num_extra_inputs
        ctx.attributes = list(own.attributes.items())
        ctx.save_for_backward(*saved)
        return tuple([tensor_of(each) for each in (y, *more)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *of_extra: Tensor) -> Any:
        op, own = ctx.op, OperationContext()  # its own, since what is traced may not change that of forward
        for name, value in ctx.attributes:
            setattr(own, name, value)
        own.saved_tensors = ctx.saved_tensors
        found = op.fuser_backward([own], grad, basic_op_grad_extra_outputs=[of_extra])
        check_count(ctx.name, "results, gradients of input, of parameters and of extra inputs,", found, 3)
        dx, parameters, inputs = found
        if ctx.needs_input_grad[3]:
            check_is_there(ctx.name, dx)
        check_count(ctx.name, "tuples of gradients of parameters", parameters, 1)
        check_count(ctx.name, "tuples of gradients of extra inputs", inputs, 1)
        (of_parameters,), (of_inputs,) = parameters, inputs
        check_count(ctx.name, "gradients of parameters", of_parameters, ctx.count)
        check_count(ctx.name, "gradients of extra inputs", of_inputs, op.num_extra_inputs)
        return None, None, None, None if dx is None else tensor_of(dx), *of_inputs, *of_parameters
