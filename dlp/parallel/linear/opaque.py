"""The linear as two opaque ops, `dlp::linear_fwd` and `dlp::linear_bwd`: what torch.compile, a dispatch mode or fake tensors
see of it.

They take tensors, and two names (`dlp.parallel.linear.state`). Streams, groups, collectives and programs
(`dlp.parallel.linear.capture`) stay inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from dlp.comm import observer
from dlp.parallel.casts import operand_shape
from dlp.parallel.linear.capture import Programs, like, multiplies_tf32
from dlp.parallel.linear.core import to_save, waits, y_shape
from dlp.parallel.linear.inputs import check_features, no_autocast
from dlp.parallel.linear.spec import LinearSpec, num_inputs
from dlp.parallel.linear.state import BoundSpec, bound_of, spec_of
from dlp.parallel.model.autocast import check_compiled
from dlp.parallel.weight.local import WeightParts


def _parts(
    bound: BoundSpec, used: Sequence[int], weights: Sequence[Tensor], cached: Sequence[Tensor], dtype: torch.dtype,
    *, columnwise: bool, record: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """One orientation of the `used` weights, as far as it is there before the pass."""
    if not cached:
        found: Sequence[Tensor] = bound.weights.read(bound, used, weights, dtype, columnwise=columnwise, record=record)
        return found
    parts = WeightParts(cached, bound.spec.weight_formats[1])
    return parts.columnwise if columnwise else parts.rowwise


def linear_fwd(
    inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """`run_forward` as an op."""
    bound = bound_of(spec_id)
    check_compiled(bound)
    check_features(bound.spec, inputs[0], weights[0])
    bound.session.begin_forward(bound, record)
    parts = _parts(bound, range(len(weights)), weights, cached, inputs[0].dtype, columnwise=False, record=record)
    key = (
        save,
        record,
        *[None if bias is None else like(bias) for bias in biases],
        *map(like, (*inputs, *weights, *parts)),
    )
    return _programs_of(bound, inputs[0]).forward(key, inputs, weights, biases, parts, save, record)


def linear_bwd(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, used: list[int], needs_dx: bool, needs_dw: list[bool], needs_db: list[bool],
) -> list[Tensor]:  # fmt: skip
    """`run_backward` as an op."""
    bound = bound_of(spec_id)
    bound.session.in_layer_backward(bound)
    parts = _parts(bound, used, weights, cached, dtype, columnwise=True, record=True) if needs_dx else ()
    key = dtype, *used, needs_dx, *needs_dw, *needs_db, *map(like, (*dys, *saved, *weights, *parts))
    programs = _programs_of(bound, dys[0])
    grads = programs.backward(key, dys, saved, weights, parts, dtype, used, needs_dx, needs_dw, needs_db)
    bound.session.scales = None
    return grads


def _programs_of(bound: BoundSpec, x: Tensor) -> Programs:
    """Those of a layer that is called as ops, for x or dy in this dtype."""
    key = Programs, x.get_device(), multiplies_tf32(x)
    found: Programs | None = bound.calls.get(key)
    if found is None:
        found = bound.calls[key] = Programs(bound, x)
    return found


def _linear_fwd_fake(
    inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], spec_id: Tensor,
    trace_id: int, save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Shapes only, for torch.compile."""
    spec, x = spec_of(trace_id), inputs[0]
    dtype = spec.recipe.fprop.out_dtype or x.dtype
    ys = [x.new_empty(y_shape(spec, x, w.shape[0]), dtype=dtype) for w in weights]
    kept = _kept_fake(spec, x) if save else []
    if spec.prologue is not None and record:
        kept += [x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(spec.prologue.keeps)]
    return ys, kept


def _kept_fake(spec: LinearSpec, x: Tensor) -> list[Tensor]:
    """What `x_of_forward` keeps for wgrad of an x, or of one that is made of this."""
    tokens = x.numel() // x.shape[-1]
    kept = spec.transfers(tokens).kept
    if kept == "values":
        return [] if spec.prologue is None else [x.new_empty(tokens, x.shape[-1])]
    shape = operand_shape(spec.recipe, "x", (tokens, x.shape[-1]), kept == "columnwise")
    return list(spec.recipe.x.columnwise.format.empty(shape, dtype=x.dtype, device=x.device).parts)


def _linear_bwd_fake(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], spec_id: Tensor, trace_id: int,
    dtype: torch.dtype, used: list[int], needs_dx: bool, needs_dw: list[bool], needs_db: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Shapes only, for torch.compile."""
    spec, dy = spec_of(trace_id), dys[0]
    plan, features = spec.transfers_back(dy.numel() // dy.shape[-1]), weights[0].shape[1]
    grads = [dy.new_empty((plan.tokens, features), dtype=dtype)] if needs_dx else []
    if needs_dx and spec.prologue is not None:
        grads = [given.new_empty(given.shape) for given in saved[-num_inputs(spec) :]]
    now = not waits(spec.options.delay_wgrad, needs_dx)
    grads += [w.new_empty(w.shape) for w, needed in zip(weights, needs_dw, strict=True) if needed and now]
    return grads + [w.new_empty(w.shape[:1]) for w, needed in zip(weights, needs_db, strict=True) if needed]


def _forward_flops(
    inputs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], biases: Any, cached: Any, spec_id: Any, trace_id: int,
    *args: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    """Of fprop, for torch's FlopCounterMode: 2 M K N for all tokens that are multiplied on this rank. Of tensors it is given
    shapes."""
    spec = spec_of(trace_id)
    tokens = prod(inputs[0][:-1]) * (spec.tp if spec.style.gathers == "x" else 1)
    return sum(2 * tokens * prod(weight) for weight in weights)


def _backward_flops(
    dys: Sequence[Sequence[int]], saved: Any, weights: Sequence[Sequence[int]], cached: Any, spec_id: Any, trace_id: int,
    dtype: Any, used: Any, needs_dx: bool, needs_dw: Sequence[bool], needs_db: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    """Of dgrad and wgrad, now or in `backward_dw`."""
    spec = spec_of(trace_id)
    tokens = prod(dys[0][:-1]) * (spec.tp if spec.style.gathers == "dy" else 1)
    return sum(2 * tokens * prod(weight) * (needs_dx + dw) for weight, dw in zip(weights, needs_dw, strict=True))


def _labelled(op: Callable[..., Any], gemm: str) -> Callable[..., Any]:
    """The op, whose transfers belong to its layer and, where nothing finer is said, to this GEMM."""

    @wraps(op)
    def labelled(*args: Any) -> Any:
        with observer.label(layer=bound_of(args[4]).spec.members[0], direction=gemm):
            return op(*args)

    return labelled


_LIBRARY = torch.library.Library("dlp", "DEF")
_LIBRARY.define(
    "linear_fwd(Tensor[] inputs, Tensor[] weights, Tensor?[] biases, Tensor[] cached, Tensor spec_id, int trace_id, bool save,"
    " bool record) -> (Tensor[], Tensor[])"
)
_LIBRARY.define(
    "linear_bwd(Tensor[] dys, Tensor[] saved, Tensor[] weights, Tensor[] cached, Tensor spec_id, int trace_id,"
    " ScalarType dtype, int[] used, bool needs_dx, bool[] needs_dw, bool[] needs_db) -> Tensor[]"
)
for _name, _real, _fake, _flops, _gemm in (
    ("linear_fwd", linear_fwd, _linear_fwd_fake, _forward_flops, "fprop"),
    ("linear_bwd", linear_bwd, _linear_bwd_fake, _backward_flops, "dgrad"),
):
    _LIBRARY.impl(_name, _labelled(_real, _gemm), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlp::{_name}", _fake, lib=_LIBRARY)
    register_flop_formula(getattr(torch.ops.dlp, _name))(_flops)


def opaque() -> bool:
    """Whether a linear has to be the opaque ops: where something traces or watches. Elsewhere they are passed by, which
    spares the host more than it needs for a tiny linear (`dlp.parallel.linear.direct`)."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


class OpaqueLinearFn(torch.autograd.Function):
    """`apply(spec_id, trace_id, reads, count, save, record, delay, *inputs, *weights, *biases, *cached)` -> a tuple of y_i;
    `reads` inputs, `count` weights and biases; `delay`: the spec's `delay_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any, spec_id: Tensor, trace_id: int, reads: int, count: int, save: bool, record: bool, delay: bool, *tensors: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs, tensors = list(tensors[:reads]), tensors[reads:]
        weights, biases, cached = list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])
        ys, kept = torch.ops.dlp.linear_fwd(inputs, weights, biases, cached, spec_id, trace_id, save, record)
        saved = to_save(inputs, kept, save)
        ctx.trace_id, ctx.reads, ctx.count, ctx.delay, ctx.num_saved = trace_id, reads, count, delay, len(saved)
        ctx.x_shape, ctx.x_dtype = inputs[0].shape, inputs[0].dtype
        traced = torch.compiler.is_dynamo_compiling()  # no region reaches into that
        ctx.scales = None if traced else bound_of(spec_id).session.scales
        ctx.save_for_backward(spec_id, *saved, *weights, *cached)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        with no_autocast(dys):
            return _backward(ctx, dys)


def _backward(ctx: Any, dys: Sequence[Tensor | None]) -> tuple[Any, ...]:
    reads, count, (spec_id, *tensors) = ctx.reads, ctx.count, ctx.saved_tensors
    saved, weights = list(tensors[: ctx.num_saved]), list(tensors[ctx.num_saved : ctx.num_saved + count])
    cached = list(tensors[ctx.num_saved + count :])
    used = [i for i, dy in enumerate(dys) if dy is not None]  # a sibling whose y nobody used has no gradient
    needs_dx, needs = any(ctx.needs_input_grad[7 : 7 + reads]), ctx.needs_input_grad[7 + reads :]
    needs_dw, needs_db = [needs[i] for i in used], [needs[count + i] for i in used]
    size = len(cached) // count
    if ctx.scales is not None:
        bound_of(spec_id).session.scales = ctx.scales
    grads = iter(torch.ops.dlp.linear_bwd(
        [dys[i] for i in used], saved, [weights[i] for i in used],
        [part for i in used for part in cached[i * size : (i + 1) * size]], spec_id, ctx.trace_id, ctx.x_dtype, used,
        needs_dx, needs_dw, needs_db,
    ))  # fmt: skip
    dx = next(grads).view(ctx.x_shape) if needs_dx else None
    more = [next(grads) if needs_dx else None for _ in range(1, reads)]
    now = not waits(ctx.delay, needs_dx)
    dws = [next(grads) if i in used and needs[i] and now else None for i in range(count)]
    dbs = [next(grads) if i in used and needs[count + i] else None for i in range(count)]
    return None, None, None, None, None, None, None, dx, *more, *dws, *dbs, *(None for _ in cached)
