"""The linear in eager calls: the forward and backward that `PassFunction` runs, and the record of each kind of call.

    x    -> y_i                forward     saves for backward: the weights w_i of this rank, and the tensors of `to_save`
    dy_i -> dx, dw_i, db_i     backward

A `BoundCall` records the decisions for all calls with tensors of equal shapes, strides and dtypes; each pass may run as
captured launches (`dlp.parallel.linear.capture`). The passes run `linear_forward` and `linear_backward`, as the opaque ops of
traced calls do (`dlp.parallel.linear.opaque`). Eager calls do not use the ops, since dispatching an op takes the host more time
than a tiny linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.kernels import gemms
from dlp.kernels.ranges import named_range
from dlp.kernels.table import runs_kernels
from dlp.parallel.linear import functional
from dlp.parallel.linear.capture import of_layer
from dlp.parallel.linear.functional import NO_FINISH, Finish, linear_backward, linear_forward
from dlp.parallel.linear.plan import GradsWanted, keeps_x, reads_w
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, waits
from dlp.parallel.weight.base import Target, WeightParts
from dlp.parallel.weight.local import check_whole, local_tensor, num_axes
from dlp.quant.quantizer import caps_of
from dlp.quant.tensor import QuantizedTensor
from dlp.runtime.capture import BACKWARD, FORWARD, LIMIT
from dlp.runtime.function import (
    ACTIVATIONS,
    Key,
    Passes,
    layout_key,
    owned,
    shape_key,
)


def check_features(spec: LinearSpec, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for x [..., K] whose K differs from K of this rank's weight [N, K]."""
    found, wanted = x.shape[-1] if x.dim() else 0, weight.shape[1]
    if found != wanted:
        part = f", the shard of {wanted * spec.tp} on one rank" if spec.style.cut_x == 1 and spec.tp > 1 else ""
        raise ValueError(
            f"{spec.name}: x of shape {tuple(x.shape)} has {found} features, and the weight takes {wanted}{part}; "
            f"{spec.style.name} expects "
            f"{'the sharded output of a column-parallel layer' if part else 'unsharded features'}: check the style of "
            f"the layer that produces x"
        )


class BoundCall:
    """Record for all calls of a layer with tensors of equal shapes, strides, dtypes and `requires_grad`. The record contains
    no tensors.

    record           whether gradients are enabled
    differentiable   whether autograd will run a backward
    save             whether autograd will run a backward that reads x
    layouts          for each of [*weights, *biases] the DTensorSpec; None for a plain tensor or no bias
    captured         captured launches of the two passes (`dlp.runtime.capture`)
    wanted           cache of `wants`, by arguments
    """

    def __init__(self, bound: BoundSpec, record: bool, x: Tensor, parameters: Sequence[Any]) -> None:
        self.bound, self.record, self.count = bound, record, len(bound.spec.members)
        self.everyone = range(self.count)
        self.x_shape, self.x_dtype = x.shape, x.dtype
        trained = [p is not None and p.requires_grad for p in parameters]
        self.differentiable = record and (x.requires_grad or any(trained))
        self.save = self.differentiable and keeps_x(bound.spec.recipe, x.requires_grad, any(trained[: self.count]))
        self.layouts = [p._spec if isinstance(p, DTensor) else None for p in parameters]
        self.distributed = any(layout is not None for layout in self.layouts)
        self.captured = of_layer(bound, x)
        self.wanted: dict[Key, tuple[GradsWanted, list[int]]] = {}

    def wants(self, needs: tuple[bool, ...], has_dy: tuple[bool, ...]) -> tuple[GradsWanted, list[int]]:
        """Return the gradients that a backward computes, and their indices in [x, *weights, *biases], in the order dx, dw_i,
        db_i. A delayed dw_i has no index.

        needs    for each of [x, *weights, *biases], whether a gradient is needed
        has_dy   for each y_i, whether y_i has a gradient
        """
        needs_dx, count = needs[0], self.count
        used = tuple([i for i, dy in enumerate(has_dy) if dy])
        dw, db = tuple([needs[1 + i] for i in used]), tuple([needs[1 + count + i] for i in used])
        now = () if waits(self.bound.spec.options.delay_wgrad, needs_dx) else dw
        places = [0] * needs_dx
        places += [1 + i for i, need in zip(used, now, strict=False) if need]
        places += [1 + count + i for i, need in zip(used, db, strict=True) if need]
        shape = self.x_shape if len(self.x_shape) != 2 else None
        reads = reads_w(self.bound.spec.recipe, needs_dx, any(dw))
        found = self.wanted[needs, has_dy] = GradsWanted(used, needs_dx, dw, db, self.x_dtype, reads, shape), places
        return found


def check_given(bound: BoundSpec, given: Sequence[Any]) -> None:
    """Raise ValueError for an x that is not bf16, fp16 or fp32, and for parameters on another device than x. Log a line if
    casts of an fp16 x cannot run as kernels. `given`: x and the parameters."""
    spec, x = bound.spec, given[0]
    if x.dtype not in ACTIVATIONS:
        raise ValueError(f"{spec.name}: x must be bf16, fp16 or fp32; got {x.dtype}: convert it before the layer")
    elsewhere = [other.device for other in given if other is not None and other.device != x.device]
    if elsewhere:
        raise ValueError(
            f"{spec.name}: x is on {x.device} and the parameters are on {elsewhere[0]}: move x or the layer"
        )
    if (
        x.dtype == torch.float16
        and runs_kernels(next(tensor for tensor in given if isinstance(tensor, Tensor)))
        and any(caps_of(quantizer).op for quantizer in spec.recipe.quantizers())
    ):
        bound.session.note("casts of fp16 run the plain-torch reference: kernels read bf16 and fp32")


def call_of(
    bound: BoundSpec,
    record: bool,
    x: Tensor,
    parameters: Sequence[Any],
    cast_weights: WeightParts | None,
) -> BoundCall:
    """Return the `BoundCall` for x: the record of an earlier call with an equal key, else a new record, after all checks.

    If the step boundary cast the weights (`cast_weights`), captured launches contain the addresses of these operands, so the
    record is stored in `WeightParts.calls` and dropped together with the operands; else the record is stored in
    `BoundSpec.calls`."""
    if cast_weights is None:
        calls = bound.calls
        with torch._C.DisableTorchFunctionSubclass():  # placeholders would intercept reads of properties, slowly
            parameter_keys = [None if p is None else _parameter_key(p) for p in parameters]
    else:
        calls = cast_weights.calls
        parameter_keys = [
            None if p is None else (len(p._spec.placements) if isinstance(p, DTensor) else 0, p.dtype, p.requires_grad)
            for p in parameters
        ]
    key = (bound, record, x.requires_grad, *shape_key(x), *parameter_keys, x.dtype is torch.float32 and gemms.tf32())
    found: BoundCall | None = calls.get(key)
    if found is None:
        check_given(bound, (x, *(parameters if cast_weights is None else ())))
        found = _new_call(bound, record, x, parameters)
        if len(calls) < LIMIT:
            calls[key] = found
    return found


def _new_call(bound: BoundSpec, record: bool, x: Tensor, parameters: Sequence[Any]) -> BoundCall:
    """Create the record of a first call. Raises RuntimeError for parameters that FSDP has resharded, and ValueError if x and
    the weight differ in K."""
    spec = bound.spec
    for parameter in parameters:
        if parameter is not None:
            check_whole(parameter, spec.num_axes, spec.name)
    check_features(spec, x, local_tensor(parameters[0]))
    return BoundCall(bound, record, x, parameters)


def _parameter_key(parameter: Any) -> Key:
    """Return the key of a parameter: the current number of its mesh axes, which FSDP changes, the `shape_key` of this rank's
    shard, and `requires_grad`."""
    return num_axes(parameter), *shape_key(local_tensor(parameter)), parameter.requires_grad


# The record of the call, and the weight operands that the step boundary cast (None: the pass casts or gathers the weights)
Run = tuple[BoundCall, WeightParts | None]


def forward(ctx: Any, run: Run, tensors: Sequence[Any], finish: Finish = NO_FINISH) -> tuple[Tensor, ...]:
    """Compute y_i [..., N_i] from `tensors`, [x, *weights, *biases]. ctx: autograd's context, in which the tensors for
    backward are saved; None: there will be no backward. A forward with a `finish` is not captured."""
    (call, cast_weights), (x, *parameters) = run, tensors
    bound, count, record = call.bound, call.count, call.record
    bound.session.begin_forward(bound.spec, record)
    if call.distributed:
        parameters = [p if spec is None else p._local_tensor for p, spec in zip(parameters, call.layouts, strict=True)]
    weights, biases = parameters[:count], parameters[count:]
    ws: Sequence[QuantizedTensor]
    if cast_weights is not None:
        ws = cast_weights.operands[0]
    else:
        ws = bound.weights.read(bound, call.everyone, weights, call.x_dtype, columnwise=False, record=record)
    if call.captured.possible[FORWARD] and finish is NO_FINISH:
        parts = cast_weights.rowwise if cast_weights is not None else parts_of(ws)
        key: Key = () if cast_weights is not None else tuple(map(shape_key, parts))
        compute = partial(linear_forward, bound, x, weights, biases, ws, call.save, record)
        ys, kept = call.captured.forward(key, compute, forward_reads(x, weights, biases, parts), count)
    else:
        ys, kept = linear_forward(bound, x, weights, biases, ws, call.save, record, finish)
    if ctx is None:
        return tuple(ys)
    session = bound.session
    plain = session.scales is None and session.repeats is None
    ctx.state = session.now if plain else session.forward_state()
    ctx.save_for_backward(*weights, *((kept or [x]) if call.save else ()))  # `to_save`
    return tuple(owned(ys, (x,)))


def forward_reads(x: Tensor, weights: Any, biases: Any, parts: Any) -> list[Tensor]:
    """Return the tensors that a forward reads. `parts`: parts of the cast weights; empty: the forward reads the weights."""
    return [x, *(parts or weights), *[bias for bias in biases if bias is not None]]


def parts_of(operands: Sequence[QuantizedTensor]) -> list[Tensor]:
    """Return the parts of all operands, as one list."""
    return [part for operand in operands for part in operand.parts]


def backward(ctx: Any, run: Run, dys: Sequence[Tensor | None], finish: Finish = NO_FINISH) -> Sequence[Any]:
    """Compute the gradients of [x, *weights, *biases] from dy_i. None stands for a gradient that is not needed, and for a
    delayed dw_i. For a dw_i that is accumulated into a main gradient, return `LayerWeights.written`: None or zeros."""
    call, saved = run[0], ctx.saved_tensors
    needs, has_dy = ctx.needs_input_grad[2:], tuple([dy is not None for dy in dys])
    wanted, places = call.wanted.get((needs, has_dy)) or call.wants(needs, has_dy)
    weights, saved = saved[: call.count], saved[call.count :]
    if len(wanted.used) != call.count:  # members whose y is not used have no dy
        dys, weights = tuple([dys[i] for i in wanted.used]), [weights[i] for i in wanted.used]
    grads: list[Any] = [None] * len(needs)  # gradients of x, weights, biases
    into = _targets(call, wanted, weights) if call.bound.weights.main_grads else []
    written = [1 + i for i, target in zip(wanted.used, into, strict=True) if target] if into else ()
    returned = [place for place in places if place not in written] if written else places
    for place, grad in zip(returned, _gradients(ctx, run, wanted, dys, weights, saved, into, finish), strict=True):
        grads[place] = grad
    for place in written:
        grads[place] = call.bound.weights.written(place - 1)
    for place, layout in enumerate(call.layouts, 1) if call.distributed else ():
        if layout is not None and grads[place] is not None:
            grads[place] = DTensor(grads[place], layout, requires_grad=False)
    return grads


LINEAR = Passes(forward, backward)


def _targets(call: BoundCall, wanted: GradsWanted, weights: Sequence[Tensor]) -> list[Target | None]:
    """Return the target of the wgrad of each used member; None for a wgrad that is not wanted or is returned to autograd.

    The list is empty if all wgrads are returned to autograd (as in a backward under a dispatch mode), and for delayed
    wgrads."""
    if waits(call.bound.spec.options.delay_wgrad, wanted.dx) or torch._C._len_torch_dispatch_stack() > 0:
        return []
    found = call.bound.weights.targets(wanted.used, weights)
    return [target if needed else None for target, needed in zip(found, wanted.dw, strict=True)] if found else []


def _gradients(
    ctx: Any, run: Run, wanted: GradsWanted, dys: Sequence[Any], weights: Sequence[Tensor], saved: Sequence[Tensor],
    into: Sequence[Target | None], finish: Finish,
) -> list[Tensor]:  # fmt: skip
    """Return the wanted gradients, in the order dx, dw_i, db_i, without dw_i that are delayed or written `into` a target."""
    (call, cast_weights), bound, used = run, run[0].bound, wanted.used
    session = bound.session
    if ctx.state is session.now:
        session.scales = None
    else:
        session.resume(bound.spec, ctx.state)
    if torch._C._len_torch_dispatch_stack() > 0:  # a tracer or mode is active that was not active in the forward
        return _gradients_by_op(run, wanted, dys, weights, saved)
    session.in_layer_backward(bound.spec)
    ws: Sequence[QuantizedTensor] = ()
    if wanted.reads_w and cast_weights is not None:
        ws = cast_weights.columnwise_operands(used)
    elif wanted.reads_w:
        ws = bound.weights.read(bound, used, weights, call.x_dtype, columnwise=True, record=True)
    if call.captured.possible[BACKWARD] and finish is NO_FINISH:
        grads = _captured_gradients(run, wanted, dys, weights, saved, ws, into)
    else:
        grads = linear_backward(bound, dys, saved, weights, ws, wanted, finish, into)
    session.scales = None
    if session.drawn_again is not None:
        session.end_layer_backward()
    if bound.spec.options.delay_wgrad:
        grads = leave_wgrads(bound, wanted, weights, grads)
    return grads


def _captured_gradients(
    run: Run, wanted: GradsWanted, dys: Sequence[Any], weights: Sequence[Tensor], saved: Sequence[Tensor],
    ws: Sequence[QuantizedTensor], into: Sequence[Target | None],
) -> list[Tensor]:  # fmt: skip
    """Run `linear_backward`, or the launches that were captured for tensors of equal shapes, strides and dtypes."""
    (call, cast_weights), parts = run, parts_of(ws)
    key: Key = (*wanted, *[layout_key(tensor) for tensor in (*dys, *saved)])
    key += tuple(map(shape_key, parts)) if cast_weights is None else ()
    reads = [*dys, *saved, *((parts or weights) if wanted.reads_w else ())]
    if into:
        key += tuple([None if target is None else (*shape_key(target.tensor), target.overwrite) for target in into])
        reads += [target.tensor for target in into if target is not None]
    compute = partial(linear_backward, call.bound, dys, saved, weights, ws, wanted, into=into)
    return call.captured.backward(key, compute, reads)


def _gradients_by_op(
    run: Run, wanted: GradsWanted, dys: Sequence[Any], weights: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """Return the wanted gradients through the opaque op, for an eager forward whose backward runs under a dispatch mode."""
    (call, cast_weights), bound = run, run[0].bound
    cached, ids = [] if cast_weights is None else cast_weights.both_of(wanted.used), (bound.spec_id, bound.trace_id)
    grads: list[Tensor] = torch.ops.dlp.linear_bwd(
        dys, saved, weights, cached, *ids, call.x_dtype, wanted.flags(call.count)
    )
    if wanted.dx and wanted.shape is not None:
        grads[0] = grads[0].view(wanted.shape)
    return grads


# Delayed wgrads: backward queues the operands, and `dlp.backward_dw` runs the GEMMs


def num_left(bound: BoundSpec, wanted: GradsWanted) -> int:
    """Return the number of tensors of delayed wgrads (parts of operands) at the end of the results of `linear_backward`."""
    if not (waits(bound.spec.options.delay_wgrad, wanted.dx) and any(wanted.dw)):
        return 0
    dy, x = (len(operand.columnwise.format.parts) for operand in (bound.spec.recipe.dy, bound.spec.recipe.x))
    return sum(wanted.dw) * dy + x


def leave_wgrads(
    bound: BoundSpec, wanted: GradsWanted, weights: Sequence[Tensor], results: list[Tensor], alpha: float = 1.0
) -> list[Tensor]:  # fmt: skip
    """Queue the delayed wgrads for `backward_dw`, and return the other results. `results`: all results of `linear_backward`, or
    only the last of these results, among which are all operands of the wgrads."""
    start = len(results) - num_left(bound, wanted)
    if start == len(results):
        return results
    dy_format, x_format = bound.spec.recipe.dy.columnwise.format, bound.spec.recipe.x.columnwise.format
    size, at = len(dy_format.parts), start
    x = x_format.wrap(results[len(results) - len(x_format.parts) :])
    for i, w, needed in zip(wanted.used, weights, wanted.dw, strict=True):
        if needed:
            dy = dy_format.wrap(results[at : at + size])
            wgrad = partial(_run, bound, dy, x, w.shape, w.dtype, alpha)
            bound.session.delay_wgrad(bound.weights.members[i], wgrad)
            at += size
    return results[:start]


def _run(bound: BoundSpec, *arguments: Any, **more: Any) -> Tensor:
    """Run `contract_gemm` of a delayed wgrad, in the profiler range of wgrad."""
    with named_range(f"{bound.spec.name}.wgrad"):
        return functional.contract_gemm(bound, *arguments, **more)
