"""The linear as two opaque ops, `dlp::linear_fwd` and `dlp::linear_bwd`, for calls under torch.compile, a dispatch mode or fake
tensors ("traced or watched" calls).

The ops take tensors and two identifiers (`dlp.parallel.linear.state`). The `LinearPlan` defines the shapes of the results.
Streams, groups and collectives are not visible outside of the ops. `OpaqueLinearFn` is the autograd function around the ops,
which torch.compile traces.
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
from torch.utils.flop_counter import register_flop_formula

from dlp.comm import observer
from dlp.parallel.linear.active import check_compiled
from dlp.parallel.linear.autograd import check_features, forward_reads, leave_wgrads, parts_of
from dlp.parallel.linear.capture import of_layer
from dlp.parallel.linear.codes import with_operands
from dlp.parallel.linear.functional import linear_backward, linear_forward
from dlp.parallel.linear.plan import GradsWanted, Result, to_save, x_tokens_of
from dlp.parallel.linear.spec import spec_of
from dlp.parallel.linear.state import BoundSpec, bound_of, plan_for, waits
from dlp.parallel.weight.base import WeightParts
from dlp.quant.tensor import QuantizedTensor
from dlp.runtime.capture import CapturedPasses
from dlp.runtime.function import (
    multiplies_tf32,
    no_autocast,
    shape_key,
)


def _weight_operands(
    bound: BoundSpec, used: Sequence[int], weights: Sequence[Tensor], cached: Sequence[Tensor], dtype: torch.dtype,
    *, columnwise: bool, record: bool,
) -> list[QuantizedTensor]:  # fmt: skip
    """Return the operands of the `used` weights in one orientation: from the parts `cached` at the step boundary, or gathered
    by FSDP. The list is empty if the pass casts the weights."""
    if cached:
        parts = WeightParts(lambda: bound.spec, cached, bound.spec.weight_formats[1])
        return parts.columnwise_operands(used) if columnwise else parts.operands[0]
    return bound.weights.read(bound, used, weights, dtype, columnwise=columnwise, record=record)


def linear_fwd(  # noqa: PLR0913 (the flat schema of the op)
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool, codes: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Run `linear_forward` as an op. codes: the parts of x that `quantize_x` returned, which the op reads instead of x, and
    which the caller saves for backward; empty: the op casts x."""
    bound = bound_of(spec_id)
    check_compiled(bound)
    check_features(bound.spec, x, weights[0])
    bound.session.begin_forward(bound.spec, record)
    ws = _weight_operands(bound, range(len(weights)), weights, cached, x.dtype, columnwise=False, record=record)
    parts = parts_of(ws)
    keys = [None if bias is None else shape_key(bias) for bias in biases]
    key = (save, record, len(codes), *keys, *map(shape_key, (x, *weights, *parts, *codes)))
    given = with_operands(bound, x, codes) if codes else x
    run = partial(linear_forward, bound, given, weights, biases, ws, save and not codes, record)
    reads = [*codes, *forward_reads(x, weights, biases, parts)]
    return _captured_of(bound, x).forward(key, run, reads, len(weights))


def linear_bwd(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, flags: list[int],
) -> list[Tensor]:  # fmt: skip
    """Run `linear_backward` as an op. flags: see `GradsWanted.flags`."""
    bound = bound_of(spec_id)
    wanted = GradsWanted.of_flags(flags, dtype, bound.spec.recipe)
    bound.session.in_layer_backward(bound.spec)
    used = wanted.used
    ws: Sequence[QuantizedTensor] = ()
    if wanted.reads_w:
        ws = _weight_operands(bound, used, weights, cached, dtype, columnwise=True, record=True)
    parts = parts_of(ws)
    key = (*wanted, *map(shape_key, (*dys, *saved, *weights, *parts)))
    run = partial(linear_backward, bound, dys, saved, weights, ws, wanted)
    reads = [*dys, *saved, *((parts or weights) if wanted.reads_w else ())]
    grads = _captured_of(bound, dys[0]).backward(key, run, reads)
    bound.session.end_layer_backward()
    return leave_wgrads(bound, wanted, weights, grads) if bound.spec.options.delay_wgrad else grads


def _captured_of(bound: BoundSpec, x: Tensor) -> CapturedPasses:
    """Return the captured passes of a layer whose calls run as ops, for the device of x (or dy) and for the TF32 setting that
    applies to the dtype of x (or dy)."""
    key = CapturedPasses, x.get_device(), multiplies_tf32(x)
    found: CapturedPasses | None = bound.calls.get(key)
    if found is None:
        found = bound.calls[key] = of_layer(bound, x)
    return found


def _linear_fwd_fake(  # noqa: PLR0913 (the flat schema of the op)
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool, codes: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return empty tensors with the shapes, dtypes and strides that the plan defines for the results of `linear_fwd`. Inductor
    relies on the strides."""
    spec = spec_of(trace_id)
    check_features(spec, x, weights[0])
    tokens = x.numel() // x.shape[-1]
    plan = plan_for(spec, tokens)
    kept = plan.saved(x) if save and not codes else []
    return _empty(x, [plan.y(Result(x.shape, x.dtype), w.shape[0]) for w in weights]), kept


def _linear_bwd_fake(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, flags: list[int],
) -> list[Tensor]:  # fmt: skip
    """Return empty tensors with the shapes and dtypes that the plan defines for the results of `linear_bwd`."""
    spec, dy = spec_of(trace_id), dys[0]
    wanted = GradsWanted.of_flags(flags, dtype, spec.recipe)
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
    """Return the FLOPs of fprop on this rank: 2 M K N, with M after the gather. torch's FlopCounterMode calls this function
    with shapes instead of tensors."""
    spec = spec_of(trace_id)
    tokens = prod(x[:-1]) * (spec.tp if spec.style.gathers == "x" else 1)
    return sum(2 * tokens * prod(weight) for weight in weights)


def _backward_flops(
    dys: Sequence[Sequence[int]], saved: Any, weights: Sequence[Sequence[int]], *args: Any, out_shape: Any = None
) -> int:  # fmt: skip
    """Return the FLOPs of dgrad and wgrad on this rank, including a delayed wgrad."""
    _, _, trace_id, dtype, flags = args
    spec = spec_of(trace_id)
    wanted = GradsWanted.of_flags(flags, dtype, spec.recipe)
    tokens = prod(dys[0][:-1]) * (spec.tp if spec.style.gathers == "dy" else 1)
    return sum(2 * tokens * prod(weight) * (wanted.dx + dw) for weight, dw in zip(weights, wanted.dw, strict=True))


def _labelled(op: Callable[..., Any], gemm: str) -> Callable[..., Any]:
    """Wrap an op so that the observer labels its transfers with the layer and, where no inner label is set, with the purpose
    `gemm`."""

    @wraps(op)
    def labelled(*args: Any) -> Any:
        with observer.label(layer=bound_of(args[4]).spec.members[0], purpose=gemm):
            return op(*args)

    return labelled


_LIBRARY = torch.library.Library("dlp", "DEF")
_LIBRARY.define(
    "linear_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] cached, Tensor spec_id, int trace_id, bool save,"
    " bool record, Tensor[] codes) -> (Tensor[], Tensor[])"
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
    """Count a microbatch in the session of this layer. Compiled code runs this op before the layers of the model."""
    bound_of(spec_id).session.advance()


def check_weights(spec_id: Tensor, values: bool) -> None:
    """Check that the casts that the layers of the model read are casts of the current weights. Compiled code runs this op
    before the layers. values: also compare samples of the values."""
    bound_of(spec_id).session.check_compiled_weights(values)


for _name, _schema, _op in (
    ("count_microbatch", "(Tensor spec_id) -> ()", count_microbatch),
    ("check_weights", "(Tensor spec_id, bool values) -> ()", check_weights),
):
    _LIBRARY.define(f"{_name}{_schema}")
    _LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlp::{_name}", lambda *given: None, lib=_LIBRARY)
    # Registered as ops with effects, since graph passes would remove an op without results
    torch.library._register_effectful_op(f"dlp::{_name}", EffectType.ORDERED, lib=_LIBRARY)


class OpaqueLinearFn(torch.autograd.Function):
    """Autograd function: `apply(x, spec_id, trace_id, count, handed, save, record, delay, *weights, *biases, *cached, *codes)`
    returns a tuple of y_i.

    count          number of weights, which is also the number of biases
    handed         (number of rowwise parts, number of columnwise parts) in `codes`
    save, record   as in `linear_forward`
    delay          `delay_wgrad` of the spec
    cached         parts of the weight operands that the step boundary cast, in both orientations; empty: there are none
    codes          parts of x that `dlp::quantize_x` returned (`dlp.parallel.linear.codes`); empty: the linear casts x
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (the parameters of the op, and of the autograd function)
        ctx: Any, x: Tensor, spec_id: Tensor, trace_id: int, count: int, handed: tuple[int, int], save: bool, record: bool,
        delay: bool, *tensors: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, end = list(tensors[:count]), list(tensors[count : 2 * count]), len(tensors) - sum(handed)
        cached, codes = list(tensors[2 * count : end]), list(tensors[end:])
        ys, kept = torch.ops.dlp.linear_fwd(x, weights, biases, cached, spec_id, trace_id, save, record, codes)
        if codes:
            kept = codes[handed[0] :] or codes  # the columnwise parts if they were cast, else the rowwise parts
        saved = to_save(x, kept, save)
        ctx.trace_id, ctx.count, ctx.delay, ctx.num_saved = trace_id, count, delay, len(saved)
        ctx.x_shape, ctx.x_dtype, ctx.num_codes = x.shape, x.dtype, len(codes)
        # compiled code neither stores a ForwardState nor uses the scales of autocast regions
        ctx.state = None if torch.compiler.is_dynamo_compiling() else bound_of(spec_id).session.forward_state()
        ctx.save_for_backward(spec_id, *saved, *weights, *cached)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        with no_autocast(dys):
            return _backward_by_op(ctx, dys)


def _backward_by_op(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Compute from dy_i a gradient for each argument of `OpaqueLinearFn.forward`; None for arguments without a gradient."""
    count, (spec_id, *tensors) = ctx.count, ctx.saved_tensors
    saved, weights = list(tensors[: ctx.num_saved]), list(tensors[ctx.num_saved : ctx.num_saved + count])
    cached = list(tensors[ctx.num_saved + count :])
    used = [i for i, dy in enumerate(dys) if dy is not None]  # a sibling whose y is not used has no gradient
    needs_dx, *others = ctx.needs_input_grad
    num_settings = len(others) - 2 * count - len(cached) - ctx.num_codes
    needs = others[num_settings:]
    flags = [int(needs_dx)] + [(1 + 2 * needs[i] + 4 * needs[count + i]) if i in used else 0 for i in range(count)]
    size = len(cached) // count
    if ctx.state is not None:
        bound = bound_of(spec_id)
        bound.session.resume(bound.spec, ctx.state)
    grads = iter(torch.ops.dlp.linear_bwd(
        [dys[i] for i in used], saved, [weights[i] for i in used],
        [part for i in used for part in cached[i * size : (i + 1) * size]], spec_id, ctx.trace_id, ctx.x_dtype, flags,
    ))  # fmt: skip
    dx = next(grads).view(ctx.x_shape) if needs_dx else None
    now = not waits(ctx.delay, needs_dx)
    dws = [next(grads) if i in used and needs[i] and now else None for i in range(count)]
    dbs = [next(grads) if i in used and needs[count + i] else None for i in range(count)]
    return dx, *(None for _ in range(num_settings)), *dws, *dbs, *[None] * (len(cached) + ctx.num_codes)
