"""Run ops one by one, under torch.compile, dispatch modes and fake tensors.

Each op runs its method `plain`, which autograd differentiates and torch.compile fuses; a linear runs two opaque ops
(`dlp.parallel.linear.opaque`). The code of the fuser is not traced, so `fullgraph=True` works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.context import OWN, OperationContext
from dlp.ops.handed import Handed
from dlp.ops.passes import check_count, check_many, check_not_none, check_output
from dlp.ops.values import each, tensor_of
from dlp.parallel.linear.codes import Reader, codes_of
from dlp.parallel.weight.local import local


def one_by_one(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    """Run the ops of a fuser one by one; arguments and result are those of `OperationFuser`. Meanwhile, DTensor parameters
    of ops are replaced by this rank's plain tensors. Raises TypeError for a `Handed` in compiled code."""
    if torch.compiler.is_dynamo_compiling() and isinstance(x, Handed):
        raise TypeError(
            f"{fuser.names[0]}: compiled code reads plain tensors; got a Handed: compile both modules together, or "
            f"pass the result of tensor()"
        )
    fuser.members.check_floating(each(x)[0].dtype)
    spread = [op for op in fuser.basic_ops if not hasattr(op, "core") and _spread(op)]
    own_parameters = [(op, dict(op._parameters)) for op in spread]
    for op, parameters in own_parameters:
        sums = getattr(op, "tp_sums", None)
        before = None if sums is None else sums.check_announced
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                op._parameters[name] = local(parameter, op.layer_name, before=before)
    try:
        return _run(fuser, x, extra_inputs, kwargs)
    finally:
        for op, parameters in own_parameters:
            op._parameters.update(parameters)


def _spread(op: Any) -> bool:
    """Whether an op has DTensor parameters, since conversion has replicated it. The parameters of other ops are not replaced,
    since torch cannot trace a replacement inside a checkpoint."""
    return any(isinstance(parameter, DTensor) for parameter in op._parameters.values())


def _run(fuser: Any, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> Any:
    members, at = fuser.members, 0
    outputs: list[Tensor] = []
    for place, op in enumerate(fuser.basic_ops):
        extra = extra_inputs[at : at + op.num_extra_inputs]
        at += op.num_extra_inputs
        if op.traced_by is not None:  # `plain` of the linear has computed this op
            continue
        check_many(members, place, op.takes, x)
        try:
            if op.overrides("plain"):
                x = op.plain(x, *extra, **kwargs[place])
            else:
                core = fuser.readers[place]
                reader = None if core is None else core.reader()
                x = one_op(op, members.names[place], x, extra, kwargs[place], reader)
        except Exception as error:
            raise members.named_error([place], error) from None
        if op.num_extra_outputs:
            members.check_count(place, "outputs", x, 1 + op.num_extra_outputs)
            x, *more = x
            outputs += more
    return (x, *outputs) if outputs else x


def one_op(
    op: Any, name: str, x: Any, extra_inputs: Sequence[Tensor], kwargs: Mapping[str, Any], reader: Reader | None = None
) -> Any:
    """Run one basic op as an autograd function. Return the output, or a tuple of the output and the extra outputs.

    name: name of the op, for messages; reader: the cast of the linear that reads the output, or None if no linear reads the
    output. Raises RuntimeError if the number of outputs differs from the number that the op declares.
    """
    results = OneOpFn.apply(op, name, kwargs, reader, x, *extra_inputs, *op.op_parameters())
    (y, *extra), codes = results[: 1 + op.num_extra_outputs], results[1 + op.num_extra_outputs :]
    if codes:
        assert reader is not None, "an op quantizes for a linear"
        y = reader.with_codes(y, *reader.split(codes))
    return (y, *extra) if extra else y


class TracedContext(OperationContext):
    """An `OperationContext` that records in `attributes` what the op sets, since torch.compile (2.11) cannot trace iteration
    over `__dict__`."""

    def __init__(self) -> None:
        object.__setattr__(self, "attributes", {})

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in OWN:
            self.attributes[name] = value


class OneOpFn(torch.autograd.Function):
    """Autograd function of one basic op: `apply(op, name, kwargs, reader, x, *extra inputs, *parameters)` returns the output,
    the extra outputs and, if the op quantized its output for `reader`, the parts (codes and scales) of both orientations."""

    @staticmethod
    def forward(
        ctx: Any, op: Any, name: str, kwargs: Mapping[str, Any], reader: Reader | None, x: Tensor, *tensors: Tensor
    ) -> Any:
        op_ctx: Any = TracedContext()
        results = op.fuser_forward(
            [op_ctx], x, basic_op_extra_inputs=[tensors[: op.num_extra_inputs]], prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=reader, basic_op_kwargs=[kwargs],
        )  # fmt: skip
        check_count(name, "results, output and extra outputs of each basic op,", results, 2)
        y, extra = results
        check_output(name, y)
        check_count(name, "tuples of extra outputs", extra, 1)
        (more,) = extra
        check_count(name, "extra outputs", more, op.num_extra_outputs)
        saved = [each() if callable(each) and not isinstance(each, Tensor) else each for each in op_ctx.to_save]
        if op_ctx.dirty:
            ctx.mark_dirty(*op_ctx.dirty)
        ctx.op, ctx.name, ctx.count = op, name, len(tensors) - op.num_extra_inputs
        ctx.attributes = list(op_ctx.attributes.items())
        ctx.save_for_backward(*saved)
        codes = codes_of(y) if reader is not None and isinstance(y, Tensor) else None
        parts = [] if codes is None else [*codes.rowwise, *codes.columnwise]
        ctx.mark_non_differentiable(*parts)
        return (*[tensor_of(each) for each in (y, *more)], *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *of_extra: Tensor) -> Any:
        op, op_ctx = ctx.op, OperationContext()  # a new context: traced code must not change the context of forward
        for name, value in ctx.attributes:
            setattr(op_ctx, name, value)
        op_ctx.saved_tensors = ctx.saved_tensors
        results = op.fuser_backward([op_ctx], grad, basic_op_grad_extra_outputs=[of_extra[: op.num_extra_outputs]])
        check_count(ctx.name, "results, gradients of input, of parameters and of extra inputs,", results, 3)
        dx, parameters, inputs = results
        if ctx.needs_input_grad[4]:
            check_not_none(ctx.name, dx)
        check_count(ctx.name, "tuples of gradients of parameters", parameters, 1)
        check_count(ctx.name, "tuples of gradients of extra inputs", inputs, 1)
        (of_parameters,), (of_inputs,) = parameters, inputs
        check_count(ctx.name, "gradients of parameters", of_parameters, ctx.count)
        check_count(ctx.name, "gradients of extra inputs", of_inputs, op.num_extra_inputs)
        return None, None, None, None, None if dx is None else tensor_of(dx), *of_inputs, *of_parameters
