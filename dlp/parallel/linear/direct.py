"""The linear where nothing traces or watches: one autograd function, either direction of which may run as a program.

A `Call` keeps what is the same from call to call, the programs of these directions among it (`dlp.parallel.linear.capture`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dlp.kernels import gemms
from dlp.parallel.linear.capture import LIMIT, Key, Programs, lies, like, multiplies_tf32
from dlp.parallel.linear.core import to_save, waits
from dlp.parallel.linear.inputs import ACTIVATIONS, check_features, no_autocast
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.local import WeightParts, check_whole, held, num_axes
from dlp.quant.quantizer import caps_of

X = 2  # the place of x, or of what the prologue reads, among the arguments of `DirectLinearFn`


class Wanted(NamedTuple):
    """The gradients that one backward makes. `used`: the members whose y has a gradient; a sibling whose y nobody used has
    none. dx: that of x, or those of what the prologue reads. dw, db: by used member. places: where gradients go among those
    of `DirectLinearFn`, in the order dx, dw, db."""

    used: list[int]
    dx: bool
    dw: list[bool]
    db: list[bool]
    places: list[int]


class Call:
    """A layer, called with tensors like those at hand: what does not change between such calls. It holds no tensors.

    first            the place of the first weight among the arguments of `DirectLinearFn`
    differentiable   there will be a backward; `save`: with a wgrad
    layouts          of parameters that are DTensors
    programs         of its directions
    """

    def __init__(self, bound: BoundSpec, record: bool, inputs: Sequence[Tensor], parameters: Sequence[Any]) -> None:
        x, self.first = inputs[0], X + len(inputs)
        self.bound, self.spec, self.record, self.count = bound, bound.spec, record, len(bound.spec.members)
        self.everyone = range(self.count)
        self.x_shape, self.x_dtype = x.shape, x.dtype
        learns = [p is not None and p.requires_grad for p in parameters]
        self.differentiable = record and (any(given.requires_grad for given in inputs) or any(learns))
        self.save = self.differentiable and any(learns[: self.count])
        self.layouts = [p._spec if isinstance(p, DTensor) else None for p in parameters]
        self.distributed = any(layout is not None for layout in self.layouts)
        self.programs = Programs(bound, x)
        self.wanted: dict[Key, Wanted] = {}

    def wants(self, needs: tuple[bool, ...], there: tuple[bool, ...]) -> Wanted:
        """`needs`: those of `DirectLinearFn`; `there`: which y have a gradient."""
        found = self.wanted.get((needs, there))
        if found is None:
            used = [i for i, dy in enumerate(there) if dy]
            weights, biases, dx = self.first, self.first + self.count, any(needs[X : self.first])
            dw, db = ([needs[first + i] for i in used] for first in (weights, biases))
            made = [] if waits(self.spec.options.delay_wgrad, dx) else dw
            places = [*range(X, self.first)] if dx else []
            places += [weights + i for i, need in zip(used, made, strict=False) if need]
            places += [biases + i for i, need in zip(used, db, strict=True) if need]
            found = self.wanted[needs, there] = Wanted(used, dx, dw, db, places)
        return found


def _check(bound: BoundSpec, given: Sequence[Any]) -> None:
    """ValueError for x in a dtype that nothing computes in, and for tensors that do not lie where x does."""
    spec, x = bound.spec, given[0]
    if x.dtype not in ACTIVATIONS:
        raise ValueError(f"{spec.name}: x must be bf16, fp16 or fp32; got {x.dtype}: convert it before the layer")
    elsewhere = [other.device for other in given if other is not None and other.device != x.device]
    if elsewhere:
        raise ValueError(f"{spec.name}: x lies on {x.device} and its parameters on {elsewhere[0]}: move one of them")
    if (
        gemms.available(x)
        and x.dtype == torch.float16
        and any(caps_of(quantizer).op for quantizer in spec.recipe.quantizers())
    ):
        bound.session.note("casts of fp16 run the plain-torch reference: kernels read bf16 and fp32")


def call_of(
    bound: BoundSpec, record: bool, inputs: Sequence[Tensor], parameters: Sequence[Any], sides: WeightParts | None
) -> Call:
    """The call that this one is like. It is kept with the operands that it reads, and goes with them, or with the spec."""
    if sides is None:
        calls, alike = bound.calls, [None if p is None else _like_parameter(p) for p in parameters]
    else:
        calls = sides.calls
        alike = [None if p is None else (num_axes(p), p.dtype, p.requires_grad) for p in parameters]
    x = inputs[0]
    key = (bound, record, x.requires_grad, *like(x), *alike, multiplies_tf32(x))
    if len(inputs) > 1:
        key += (inputs[1].requires_grad, *like(inputs[1]))
    found: Call | None = calls.get(key)
    if found is None:
        spec = bound.spec
        _check(bound, (*inputs, *(parameters if sides is None else ())))
        for parameter in parameters:
            if parameter is not None:
                check_whole(parameter, spec.num_axes, spec.name)
        check_features(spec, x, held(parameters[0]))
        found = Call(bound, record, inputs, parameters)
        if len(calls) < LIMIT:
            calls[key] = found
    return found


def forward(
    call: Call, sides: WeightParts | None, inputs: Sequence[Tensor], parameters: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:  # fmt: skip
    """x [..., K], or what the prologue reads -> y_i [..., N_i], what is kept for backward (see `run_forward`), and this
    rank's weights."""
    bound, count, record = call.bound, call.count, call.record
    bound.session.begin_forward(bound, record)
    tensors = [held(p) for p in parameters] if call.distributed else parameters
    weights, biases = tensors[:count], tensors[count:]
    key: Key = ()
    if sides is not None:
        parts: Sequence[Tensor] = sides.rowwise
    else:
        parts = bound.weights.read(bound, call.everyone, weights, call.x_dtype, columnwise=False, record=record)
        key = tuple(map(like, parts))
    ys, kept = call.programs.forward(key, inputs, weights, biases, parts, call.save, record)
    return ys, kept, weights


class DirectLinearFn(torch.autograd.Function):
    """`apply(call, sides, *inputs, *weights, *biases)` -> a tuple of y_i; `inputs`: x, or what the prologue reads. Weights
    and biases are parameters as modules hold them: DTensors are taken apart here, since a function that did it for each
    would cost as much as the layer."""

    @staticmethod
    def forward(ctx: Any, call: Call, sides: WeightParts | None, *tensors: Any) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[: call.first - X], tensors[call.first - X :]
        ys, kept, weights = forward(call, sides, inputs, parameters)
        ctx.call, ctx.sides, ctx.scales = call, sides, call.bound.session.scales
        ctx.save_for_backward(*weights, *to_save(inputs, kept, call.save))
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        run = _backward_once if torch.is_grad_enabled() else _backward
        if torch._C._is_any_autocast_enabled():
            with no_autocast(dys):
                return run(ctx, *dys)
        return run(ctx, *dys)


def _backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    call, needs, saved = ctx.call, ctx.needs_input_grad, ctx.saved_tensors
    wanted = call.wants(needs, tuple([dy is not None for dy in dys]))
    made = _gradients(call, wanted, [dys[i] for i in wanted.used], saved[: call.count], saved[call.count :], ctx)
    grads: list[Any] = [None] * len(needs)
    for place, grad in zip(wanted.places, made, strict=True):
        grads[place] = grad
    for place, layout in enumerate(call.layouts, call.first) if call.distributed else ():
        if layout is not None and grads[place] is not None:
            grads[place] = DTensor(grads[place], layout, requires_grad=False)
    return tuple(grads)


def _gradients(
    call: Call, wanted: Wanted, dys: Sequence[Any], weights: Sequence[Tensor], saved: Sequence[Tensor],
    ctx: Any,
) -> list[Tensor]:  # fmt: skip
    """Those that are wanted, in the order dx, dw_i, db_i."""
    bound, used, sides = call.bound, wanted.used, ctx.sides
    bound.session.scales = ctx.scales
    weights = weights if len(used) == call.count else [weights[i] for i in used]
    if torch._C._len_torch_dispatch_stack() > 0:  # something watches that did not watch the forward
        grads = _watched(call, wanted, dys, weights, saved, sides)
        return [grads[0].view(call.x_shape), *grads[1:]] if wanted.dx else grads
    bound.session.in_layer_backward(bound)
    key: Key = (wanted.dx, *used, *wanted.dw, *wanted.db, *[lies(tensor) for tensor in (*dys, *saved)])
    parts: Sequence[Tensor] = ()
    if wanted.dx and sides is not None:
        parts = sides.columnwise_of(used)
    elif wanted.dx:
        parts = bound.weights.read(bound, used, weights, call.x_dtype, columnwise=True, record=True)
        key += tuple(map(like, parts))
    grads = call.programs.backward(
        key, dys, saved, weights, parts, call.x_dtype, used, wanted.dx, wanted.dw, wanted.db, call.x_shape
    )
    bound.session.scales = None
    return grads


def _watched(
    call: Call, wanted: Wanted, dys: Sequence[Any], weights: Sequence[Tensor], saved: Sequence[Tensor],
    sides: WeightParts | None,
) -> list[Tensor]:  # fmt: skip
    """The same as an op."""
    bound, cached = call.bound, [] if sides is None else sides.both_of(wanted.used)
    grads: list[Tensor] = torch.ops.dlp.linear_bwd(
        dys,
        saved,
        weights,
        cached,
        bound.spec_id,
        bound.trace_id,
        call.x_dtype,
        wanted.used,
        wanted.dx,
        wanted.dw,
        wanted.db,
    )
    return grads


def _like_parameter(parameter: Any) -> Key:
    """`like` of what this rank has of it, and on how many axes it is spread: FSDP may have resharded it."""
    return num_axes(parameter), *like(held(parameter)), parameter.requires_grad


_backward_once = once_differentiable(_backward)
