"""The linear as autograd sees it: one autograd function, or, where something traces or watches, two opaque ops.

    x    -> y_i                forward     saves for backward: the weights w_i of this rank, and the tensors of `to_save`
    dy_i -> dx, dw_i, db_i     backward

    eager     `DirectLinearFn`   a `BoundCall` holds what is the same from call to call; each direction may run as captured
                                 launches (`dlp.parallel.linear.capture`)
    watched   `OpaqueLinearFn`   `dlp::linear_fwd` and `dlp::linear_bwd`, which torch.compile, dispatch modes and fake tensors
                                 see. They take tensors and two identifiers (`dlp.parallel.linear.state`); the `LinearPlan`
                                 gives the shapes of their results; streams, groups and collectives stay inside

Both run `linear_forward` and `linear_backward`. An eager call does not go through the ops, since dispatching them costs the
host more than a tiny linear does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from dlp.comm import observer
from dlp.kernels import gemms
from dlp.kernels.table import runs_kernels
from dlp.parallel.linear.active import check_compiled
from dlp.parallel.linear.capture import of_layer
from dlp.parallel.linear.delayed import leave_wgrads
from dlp.parallel.linear.functional import linear_backward, linear_forward
from dlp.parallel.linear.plan import GradsWanted, Result, keeps_x, reads_w, to_save, x_tokens_of
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, bound_of, plan_for, spec_of, waits
from dlp.parallel.weight.base import Target, WeightParts
from dlp.parallel.weight.local import check_whole, held, num_axes
from dlp.quant.quantizer import caps_of
from dlp.runtime.capture import BACKWARD, FORWARD, LIMIT, CapturedDirections
from dlp.runtime.function import (
    ACTIVATIONS,
    Key,
    layout_key,
    multiplies_tf32,
    no_autocast,
    only_once,
    owned,
    past_functorch,
    shape_key,
)


def check_features(spec: LinearSpec, x: Tensor, weight: Tensor) -> None:
    """ValueError for x [..., K] whose K is not that of this rank's weight [N, K]."""
    found, wanted = x.shape[-1] if x.dim() else 0, weight.shape[1]
    if found != wanted:
        part = f", a rank's part of {wanted * spec.tp}" if spec.style.cut_x == 1 and spec.tp > 1 else ""
        raise ValueError(
            f"{spec.name}: x of shape {tuple(x.shape)} ends in {found} features, and its weight takes {wanted}{part}; "
            f"{spec.style.name} reads {'what a column leaves' if part else 'whole features'}: check the style of what makes x"
        )


# Eager


class BoundCall:
    """What stays the same between calls of a layer with tensors of equal shapes, strides, dtypes and `requires_grad`. It holds
    no tensors.

    differentiable   there will be a backward
    save             there will be a backward that reads x
    layouts          the DTensorSpec of each parameter that is a DTensor, else None
    captured         its two directions as captured launches, once they are
    wanted           results of `wants`
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

    def wants(self, needs_dx: bool, needs: tuple[bool, ...], has_dy: tuple[bool, ...]) -> tuple[GradsWanted, list[int]]:
        """Which gradients a backward computes, and the index of each among the gradients of [x, *weights, *biases], in the
        order dx, dw_i, db_i. needs: whether each weight and each bias needs one; has_dy: which y_i have a gradient."""
        key = needs_dx, needs, has_dy
        found = self.wanted.get(key)
        if found is None:
            count = self.count
            used = tuple([i for i, dy in enumerate(has_dy) if dy])
            dw, db = tuple([needs[i] for i in used]), tuple([needs[count + i] for i in used])
            now = () if waits(self.bound.spec.options.delay_wgrad, needs_dx) else dw
            places = [0] * needs_dx
            places += [1 + i for i, need in zip(used, now, strict=False) if need]
            places += [1 + count + i for i, need in zip(used, db, strict=True) if need]
            shape = self.x_shape if len(self.x_shape) != 2 else None
            found = self.wanted[key] = GradsWanted(used, needs_dx, dw, db, self.x_dtype, shape), places
        return found


def check_given(bound: BoundSpec, given: Sequence[Any]) -> None:
    """`given`: x and parameters. ValueError for x in a dtype that layers do not take, and for a tensor on another
    device than x."""
    spec, x = bound.spec, given[0]
    if x.dtype not in ACTIVATIONS:
        raise ValueError(f"{spec.name}: x must be bf16, fp16 or fp32; got {x.dtype}: convert it before the layer")
    elsewhere = [other.device for other in given if other is not None and other.device != x.device]
    if elsewhere:
        raise ValueError(f"{spec.name}: x lies on {x.device} and its parameters on {elsewhere[0]}: move one of them")
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
    """The `BoundCall` for such an x: the one of an earlier call with equal keys, else a new one, for which all is checked.

    Where weights were cast at the step boundary, captured launches hold the addresses of these operands, so the call is kept in
    `WeightParts.calls` and forgotten with them; else it is kept with the spec."""
    if cast_weights is None:
        calls, parameter_keys = bound.calls, [None if p is None else _parameter_key(p) for p in parameters]
    else:
        calls = cast_weights.calls
        parameter_keys = [
            None if p is None else (len(p._spec.placements) if isinstance(p, DTensor) else 0, p.dtype, p.requires_grad)
            for p in parameters
        ]
    key = (bound, record, x.requires_grad, *shape_key(x), *parameter_keys, x.dtype is torch.float32 and gemms.tf32())
    found: BoundCall | None = calls.get(key)
    if found is None:
        spec = bound.spec
        check_given(bound, (x, *(parameters if cast_weights is None else ())))
        for parameter in parameters:
            if parameter is not None:
                check_whole(parameter, spec.num_axes, spec.name)
        check_features(spec, x, held(parameters[0]))
        found = BoundCall(bound, record, x, parameters)
        if len(calls) < LIMIT:
            calls[key] = found
    return found


def _parameter_key(parameter: Any) -> Key:
    """`shape_key` of this rank's part of a parameter, and over how many mesh axes it is spread now, which FSDP changes."""
    return num_axes(parameter), *shape_key(held(parameter)), parameter.requires_grad


def forward(
    call: BoundCall, cast_weights: WeightParts | None, x: Tensor, parameters: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:
    """x [..., K] -> y_i [..., N_i], the tensors of x for backward (see `linear_forward`), and the weights of this rank."""
    bound, count, record = call.bound, call.count, call.record
    bound.session.begin_forward(bound, record)
    tensors = parameters
    if call.distributed:
        tensors = [p if layout is None else p._local_tensor for p, layout in zip(parameters, call.layouts, strict=True)]
    weights, biases = tensors[:count], tensors[count:]
    parts: Sequence[Tensor]
    if cast_weights is not None:
        parts = cast_weights.rowwise
    else:
        parts = bound.weights.read(bound, call.everyone, weights, call.x_dtype, columnwise=False, record=record)
    if not call.captured.possible[FORWARD]:
        return *linear_forward(bound, x, weights, biases, parts, call.save, record), weights
    key: Key = () if cast_weights is not None else tuple(map(shape_key, parts))
    run = partial(linear_forward, bound, x, weights, biases, parts, call.save, record)
    return *call.captured.forward(key, run, forward_reads(x, weights, biases, parts), count), weights


def forward_reads(x: Tensor, weights: Any, biases: Any, parts: Any) -> list[Tensor]:
    """The tensors that a forward reads."""
    return [x, *(parts or weights), *[bias for bias in biases if bias is not None]]


class DirectLinearFn(torch.autograd.Function):
    """`apply(call, cast_weights, x, *weights, *biases)` -> a tuple of y_i.

    cast_weights      operands that the step boundary cast; None: there are none now
    weights, biases   parameters as modules hold them. DTensors are unwrapped in here, and their gradients wrapped: an autograd
                      function that did that for each parameter would cost as much host time as the layer
    """

    @staticmethod
    def forward(
        ctx: Any, call: BoundCall, cast_weights: WeightParts | None, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        ys, kept, weights = forward(call, cast_weights, x, parameters)
        ctx.call, ctx.cast_weights, ctx.scales = call, cast_weights, call.bound.session.scales
        ctx.save_for_backward(*weights, *to_save(x, kept, call.save))
        ctx.set_materialize_grads(False)
        return tuple(owned(ys, (x,)))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        run = _backward_once if torch.is_grad_enabled() else _backward
        if torch._C._is_any_autocast_enabled():
            with no_autocast(dys):
                return run(ctx, *dys)
        return run(ctx, *dys)


def _backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    """dy_i -> a gradient for each argument of `DirectLinearFn.forward`, None for arguments that need none."""
    call, saved = ctx.call, ctx.saved_tensors
    _, _, needs_dx, *needs = ctx.needs_input_grad
    wanted, places = call.wants(needs_dx, tuple(needs), tuple([dy is not None for dy in dys]))
    weights, saved = saved[: call.count], saved[call.count :]
    if len(wanted.used) != call.count:  # members whose y is not used have no dy
        dys, weights = tuple([dys[i] for i in wanted.used]), [weights[i] for i in wanted.used]
    grads: list[Any] = [None] * (1 + len(needs))  # of x, weights, biases
    into = _targets(call, wanted, weights) if call.bound.weights.main_grads else []
    if into:  # `_gradients` does not return these dw_i
        main_grads = call.bound.weights.main_grads
        written = {1 + i: main_grads[i] for i, target in zip(wanted.used, into, strict=True) if target}
        places = [place for place in places if place not in written]
    for place, grad in zip(places, _gradients(call, wanted, dys, weights, saved, ctx, into), strict=True):
        grads[place] = grad
    if into:
        for place, main_grad in written.items():
            grads[place] = main_grad.written()
    for place, layout in enumerate(call.layouts, 1) if call.distributed else ():
        if layout is not None and grads[place] is not None:
            grads[place] = DTensor(grads[place], layout, requires_grad=False)
    return None, None, *grads


_backward_once = only_once(_backward)
apply_directly = past_functorch(DirectLinearFn)


def _targets(call: BoundCall, wanted: GradsWanted, weights: Sequence[Tensor]) -> list[Target | None]:
    """Where each wgrad of the used members is written, None for one that goes to autograd; empty where all do: delayed ones,
    and those of a backward that something watches."""
    if waits(call.bound.spec.options.delay_wgrad, wanted.dx) or torch._C._len_torch_dispatch_stack() > 0:
        return []
    found = call.bound.weights.targets(wanted.used, weights)
    return [target if needed else None for target, needed in zip(found, wanted.dw, strict=True)] if found else []


def _gradients(
    call: BoundCall,
    wanted: GradsWanted,
    dys: Sequence[Any],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    ctx: Any,
    into: Sequence[Target | None],
) -> list[Tensor]:
    """The wanted gradients, in the order dx, dw_i, db_i, without each dw_i that is written `into` a target."""
    bound, used, cast_weights = call.bound, wanted.used, ctx.cast_weights
    bound.session.scales = ctx.scales
    if torch._C._len_torch_dispatch_stack() > 0:  # something watches that did not watch the forward
        cached, ids = [] if cast_weights is None else cast_weights.both_of(used), (bound.spec_id, bound.trace_id)
        grads: list[Tensor] = torch.ops.dlp.linear_bwd(
            dys, saved, weights, cached, *ids, call.x_dtype, flags_of(wanted, call.count)
        )
        if wanted.dx and wanted.shape is not None:
            grads[0] = grads[0].view(wanted.shape)
    else:
        bound.session.in_layer_backward(bound)
        parts: Sequence[Tensor] = ()
        reads_weights = reads_w(bound.spec.recipe, wanted.dx, any(wanted.dw))
        if reads_weights and cast_weights is not None:
            parts = cast_weights.columnwise_of(used)
        elif reads_weights:
            parts = bound.weights.read(bound, used, weights, call.x_dtype, columnwise=True, record=True)
        if call.captured.possible[BACKWARD]:
            key: Key = (*wanted, *[layout_key(tensor) for tensor in (*dys, *saved)])
            key += tuple(map(shape_key, parts)) if cast_weights is None else ()
            reads = [*dys, *saved, *((parts or weights) if reads_weights else ())]
            if into:
                key += tuple([None if t is None else (*shape_key(t.tensor), t.overwrite) for t in into])
                reads += [t.tensor for t in into if t is not None]
            run = partial(linear_backward, bound, dys, saved, weights, parts, wanted, into=into)
            grads = call.captured.backward(key, run, reads)
        else:
            grads = linear_backward(bound, dys, saved, weights, parts, wanted, into=into)
        bound.session.scales = None
        if bound.spec.options.delay_wgrad:
            grads = leave_wgrads(bound, wanted, weights, grads)
    return grads


# The opaque ops


def flags_of(wanted: GradsWanted, count: int) -> list[int]:
    """`GradsWanted` as integers, for `linear_bwd`: 1 if dx is wanted, then for each of `count` members the sum of 1 if it is
    used, 2 if dw and 4 if db is wanted."""
    flags = [int(wanted.dx)] + [0] * count
    for i, dw, db in zip(wanted.used, wanted.dw, wanted.db, strict=True):
        flags[1 + i] = 1 + 2 * dw + 4 * db
    return flags


def _wanted(flags: Sequence[int], dtype: torch.dtype) -> GradsWanted:
    """The inverse of `flags_of`."""
    used = tuple([i for i, each in enumerate(flags[1:]) if each])
    dw, db = (tuple([bool(flags[1 + i] & bit) for i in used]) for bit in (2, 4))
    return GradsWanted(used, bool(flags[0]), dw, db, dtype)


def _parts(
    bound: BoundSpec, used: Sequence[int], weights: Sequence[Tensor], cached: Sequence[Tensor], dtype: torch.dtype,
    *, columnwise: bool, record: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """The parts of one orientation of the `used` weights: `cached`, of the step boundary, or those that FSDP has gathered;
    empty where the pass casts the weights itself."""
    if not cached:
        gathered: Sequence[Tensor] = bound.weights.read(
            bound, used, weights, dtype, columnwise=columnwise, record=record
        )
        return gathered
    parts = WeightParts(cached, bound.spec.weight_formats[1])
    return parts.columnwise if columnwise else parts.rowwise


def linear_fwd(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """`linear_forward` as an op."""
    bound = bound_of(spec_id)
    check_compiled(bound)
    check_features(bound.spec, x, weights[0])
    bound.session.begin_forward(bound, record)
    parts = _parts(bound, range(len(weights)), weights, cached, x.dtype, columnwise=False, record=record)
    keys = [None if bias is None else shape_key(bias) for bias in biases]
    key = (save, record, *keys, *map(shape_key, (x, *weights, *parts)))
    run = partial(linear_forward, bound, x, weights, biases, parts, save, record)
    reads = forward_reads(x, weights, biases, parts)
    return _captured_of(bound, x).forward(key, run, reads, len(weights))


def linear_bwd(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, flags: list[int],
) -> list[Tensor]:  # fmt: skip
    """`linear_backward` as an op; flags: see `flags_of`."""
    bound, wanted = bound_of(spec_id), _wanted(flags, dtype)
    bound.session.in_layer_backward(bound)
    used = wanted.used
    reads_weights = reads_w(bound.spec.recipe, wanted.dx, any(wanted.dw))
    parts = _parts(bound, used, weights, cached, dtype, columnwise=True, record=True) if reads_weights else ()
    key = (*wanted, *map(shape_key, (*dys, *saved, *weights, *parts)))
    run = partial(linear_backward, bound, dys, saved, weights, parts, wanted)
    reads = [*dys, *saved, *((parts or weights) if reads_weights else ())]
    grads = _captured_of(bound, dys[0]).backward(key, run, reads)
    bound.session.scales = None
    return leave_wgrads(bound, wanted, weights, grads) if bound.spec.options.delay_wgrad else grads


def _captured_of(bound: BoundSpec, x: Tensor) -> CapturedDirections:
    """The captured directions of a layer that is called as ops, for x or dy of this device and dtype."""
    key = CapturedDirections, x.get_device(), multiplies_tf32(x)
    found: CapturedDirections | None = bound.calls.get(key)
    if found is None:
        found = bound.calls[key] = of_layer(bound, x)
    return found


def _linear_fwd_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Empty tensors with the shapes, dtypes and strides of the results, by the plan; inductor relies on the strides."""
    spec = spec_of(trace_id)
    check_features(spec, x, weights[0])
    tokens = x.numel() // x.shape[-1]
    plan = plan_for(spec, tokens)
    kept = plan.saved(x) if save else []
    return _empty(x, [plan.y(Result(x.shape, x.dtype), w.shape[0]) for w in weights]), kept


def _linear_bwd_fake(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, flags: list[int],
) -> list[Tensor]:  # fmt: skip
    """Empty tensors with the shapes and dtypes of the results, by the plan."""
    spec, dy, wanted = spec_of(trace_id), dys[0], _wanted(flags, dtype)
    grads: list[Result] = []
    if wanted.dx:
        tokens = x_tokens_of(spec.style, spec.tp, dy.numel() // dy.shape[-1])
        grads = [plan_for(spec, tokens).dx(weights[0].shape[1], dtype)]
    now = not waits(spec.options.delay_wgrad, wanted.dx)
    grads += [Result(w.shape, w.dtype) for w, needed in zip(weights, wanted.dw, strict=True) if needed and now]
    grads += [Result(w.shape[:1], w.dtype) for w, needed in zip(weights, wanted.db, strict=True) if needed]
    return _empty(dy, grads)


def _empty(like: Tensor, results: Sequence[Result]) -> list[Tensor]:
    return [like.new_empty(each.shape, dtype=each.dtype) for each in results]


def _forward_flops(
    x: Sequence[int], weights: Sequence[Sequence[int]], biases: Any, cached: Any, spec_id: Any,
    trace_id: int, *args: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    """FLOPs of fprop on this rank, for torch's FlopCounterMode, which passes shapes in place of tensors: 2 M K N, with M after
    the gather."""
    spec = spec_of(trace_id)
    tokens = prod(x[:-1]) * (spec.tp if spec.style.gathers == "x" else 1)
    return sum(2 * tokens * prod(weight) for weight in weights)


def _backward_flops(
    dys: Sequence[Sequence[int]], saved: Any, weights: Sequence[Sequence[int]], *args: Any, out_shape: Any = None
) -> int:  # fmt: skip
    """FLOPs of dgrad and wgrad; a delayed wgrad is counted here."""
    _, _, trace_id, dtype, flags = args
    spec, wanted = spec_of(trace_id), _wanted(flags, dtype)
    tokens = prod(dys[0][:-1]) * (spec.tp if spec.style.gathers == "dy" else 1)
    return sum(2 * tokens * prod(weight) * (wanted.dx + dw) for weight, dw in zip(weights, wanted.dw, strict=True))


def _labelled(op: Callable[..., Any], gemm: str) -> Callable[..., Any]:
    """The op, under a label of the observer: its layer, and this GEMM for transfers that are not labelled more finely."""

    @wraps(op)
    def labelled(*args: Any) -> Any:
        with observer.label(layer=bound_of(args[4]).spec.members[0], direction=gemm):
            return op(*args)

    return labelled


_LIBRARY = torch.library.Library("dlp", "DEF")
_LIBRARY.define(
    "linear_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] cached, Tensor spec_id, int trace_id, bool save,"
    " bool record) -> (Tensor[], Tensor[])"
)
_LIBRARY.define(
    "linear_bwd(Tensor[] dys, Tensor[] saved, Tensor[] weights, Tensor[] cached, Tensor spec_id, int trace_id,"
    " ScalarType dtype, int[] flags) -> Tensor[]"
)
for _name, _real, _fake, _flops, _gemm in (
    ("linear_fwd", linear_fwd, _linear_fwd_fake, _forward_flops, "fprop"),
    ("linear_bwd", linear_bwd, _linear_bwd_fake, _backward_flops, "dgrad"),
):
    _LIBRARY.impl(_name, _labelled(_real, _gemm), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlp::{_name}", _fake, lib=_LIBRARY)
    register_flop_formula(getattr(torch.ops.dlp, _name))(_flops)


def count_microbatch(spec_id: Tensor) -> None:
    """Count a microbatch of the session of this layer, as an op: compiled code runs it before the layers of the model."""
    bound_of(spec_id).session.advance()


_LIBRARY.define("count_microbatch(Tensor spec_id) -> ()")
_LIBRARY.impl("count_microbatch", count_microbatch, "CompositeExplicitAutograd")
torch.library.register_fake("dlp::count_microbatch", lambda spec_id: None, lib=_LIBRARY)
# an op without results, which graph passes would remove
torch.library._register_effectful_op("dlp::count_microbatch", EffectType.ORDERED, lib=_LIBRARY)


class OpaqueLinearFn(torch.autograd.Function):
    """`apply(x, spec_id, trace_id, count, save, record, delay, *weights, *biases, *cached)` -> a tuple of y_i.

    count          of weights, and of biases
    save, record   as in `linear_forward`
    delay          the spec's `delay_wgrad`
    cached         flat parts of the operands that the step boundary cast, in both orientations; empty: there are none now
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec_id: Tensor, trace_id: int, count: int, save: bool, record: bool, delay: bool, *tensors: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, cached = list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])
        ys, kept = torch.ops.dlp.linear_fwd(x, weights, biases, cached, spec_id, trace_id, save, record)
        saved = to_save(x, kept, save)
        ctx.trace_id, ctx.count, ctx.delay, ctx.num_saved = trace_id, count, delay, len(saved)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        # scales of an autocast region do not apply inside a compiled graph
        ctx.scales = None if torch.compiler.is_dynamo_compiling() else bound_of(spec_id).session.scales
        ctx.save_for_backward(spec_id, *saved, *weights, *cached)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        with no_autocast(dys):
            return _backward_by_op(ctx, dys)


def _backward_by_op(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """dy_i -> a gradient for each argument of `OpaqueLinearFn.forward`, None where none is wanted."""
    count, (spec_id, *tensors) = ctx.count, ctx.saved_tensors
    saved, weights = list(tensors[: ctx.num_saved]), list(tensors[ctx.num_saved : ctx.num_saved + count])
    cached = list(tensors[ctx.num_saved + count :])
    used = [i for i, dy in enumerate(dys) if dy is not None]  # a sibling whose y is not used has no gradient
    needs_dx, *others = ctx.needs_input_grad
    num_settings = len(others) - 2 * count - len(cached)
    needs = others[num_settings:]
    flags = [int(needs_dx)] + [(1 + 2 * needs[i] + 4 * needs[count + i]) if i in used else 0 for i in range(count)]
    size = len(cached) // count
    if ctx.scales is not None:
        bound_of(spec_id).session.scales = ctx.scales
    grads = iter(torch.ops.dlp.linear_bwd(
        [dys[i] for i in used], saved, [weights[i] for i in used],
        [part for i in used for part in cached[i * size : (i + 1) * size]], spec_id, ctx.trace_id, ctx.x_dtype, flags,
    ))  # fmt: skip
    dx = next(grads).view(ctx.x_shape) if needs_dx else None
    now = not waits(ctx.delay, needs_dx)
    dws = [next(grads) if i in used and needs[i] and now else None for i in range(count)]
    dbs = [next(grads) if i in used and needs[count + i] else None for i in range(count)]
    return dx, *(None for _ in range(num_settings)), *dws, *dbs, *(None for _ in cached)
