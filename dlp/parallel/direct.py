"""The linear where nothing traces or watches: one autograd function, either direction of which may run as a program.

A layer that communicates nothing in a direction, and casts and multiplies by kernels of this package, launches the same for
tensors of the same shapes; only addresses differ. Such a direction becomes a program (`dlp.kernels.program`):

    first call      the functions of `linear_fn`, as everywhere else; plans, workspaces and tables come to be
    second call     the same functions are taken down as a program, which runs
    further calls   the program: memory for the results, one call

A program is an answer of a frozen spec and is kept with it; the bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dlp.kernels import program
from dlp.kernels.program import NotPlain, Program
from dlp.parallel import fit
from dlp.parallel.linear_fn import bias_grads, run_backward, run_forward, waits, weight_parts
from dlp.parallel.spec import LinearSpec, remembered
from dlp.quant.gemm import own_gemm
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, cast_op
from dlp.quant.recipe import GEMMS

LIMIT = 64  # programs of a spec: a layer whose shapes vary without end runs without
SEEN = "seen once"
Run = Callable[[], list[Tensor]]
Key = tuple[Any, ...]


def forward(
    spec: LinearSpec, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], cached: Sequence[Tensor],
    save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """`run_forward`, whose arguments and results these are, by a program where there is one."""
    spec.runtime.begin_forward(spec, record)
    parts = weight_parts(spec, spec.members, weights, cached, x.dtype, row=True, record=record)
    if not _may_be_program(spec, "forward", x):
        return run_forward(spec, x, weights, biases, parts, save, record)

    def run() -> list[Tensor]:
        ys, kept = run_forward(spec, x, weights, biases, parts, save, record)
        return [*ys, *kept]

    given = [x, *(parts or weights), *(bias for bias in biases if bias is not None)]
    asked = ("forward", save, record, *(bias is None for bias in biases), *(w.shape for w in weights))
    made = _run(spec, asked, given, run)
    return made[: len(weights)], made[len(weights) :]


def backward(
    spec: LinearSpec, dys: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor],
    cached: Sequence[Tensor], dtype: torch.dtype, used: Sequence[int], needs_dx: bool, needs_dw: Sequence[bool],
    needs_db: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """`run_backward`, whose arguments and results these are, by a program where there is one."""
    spec.runtime.in_layer_backward()
    members = [spec.members[i] for i in used]
    parts = weight_parts(spec, members, weights, cached, dtype, row=False, record=True) if needs_dx else []
    if not (_may_be_program(spec, "backward", dys[0]) and (needs_dx or any(needs_dw))):
        return run_backward(spec, dys, saved, weights, parts, dtype, used, needs_dx, needs_dw, needs_db)

    def run() -> list[Tensor]:
        return run_backward(spec, dys, saved, weights, parts, dtype, used, needs_dx, needs_dw, [False] * len(used))

    read = (parts or weights) if needs_dx else ()
    given = [*dys, *(saved if any(needs_dw) else ()), *read]
    asked = ("backward", dtype, *used, needs_dx, *needs_dw, *((w.shape, w.dtype) for w in weights))
    return _run(spec, asked, given, run) + bias_grads(dys, weights, needs_db)


def _run(spec: LinearSpec, asked: Key, given: Sequence[Tensor], run: Run) -> list[Tensor]:
    """What `run` returns. `asked`: all that it depends on beside the spec and the tensors given."""
    programs = spec.programs
    key = (*asked, *map(_like, given), given[0].dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32)
    found = programs.get(key)
    if isinstance(found, Program):
        return found(given)
    if found is None and len(programs) < LIMIT:
        programs[key] = SEEN
    if found is not SEEN or not program.apart(given):
        return run()
    try:
        made = program.record(run, given, spec.kept_memory())
    except NotPlain as why:
        programs[key] = str(why)
        return run()
    programs[key] = made
    return made(given)


def _like(tensor: Tensor) -> Key:
    """What the launches over a tensor depend on beside its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % program.ALIGNMENT, tensor.get_device()


def _may_be_program(spec: LinearSpec, direction: str, x: Tensor) -> bool:
    return program.possible(x) and not spec.runtime.by_regions and _programmable(spec, direction)


@remembered
def _programmable(spec: LinearSpec, direction: str) -> bool:
    """Nothing is communicated in this direction, nothing waits, and quantizers and GEMMs are those of this package."""
    style, recipe = spec.style, spec.recipe
    steps = (style.fprop,) if direction == "forward" else (style.dgrad, style.wgrad)
    alone = spec.tp == 1 or (recipe.amax_scope == "table" and not any(step.gather or step.reduce for step in steps))
    agreed = spec.amax_group is not None and spec.amax_group.size() > 1
    formats = [[quantizer.format for quantizer in recipe.operands(which)] for which in GEMMS]
    known = all(map(_is_known, fit.all_quantizers(recipe))) and not any(own_gemm(*pair) for pair in formats)
    return alone and not agreed and known and not spec.delay_wgrad


def _is_known(quantizer: Quantizer) -> bool:
    """A quantizer of this package, that is pure and casts by a kernel; what wraps one, or a user's, may do anything."""
    ours = type(quantizer).__module__.startswith("dlp.quant.")
    return type(quantizer) is KeepHighPrecision or (ours and cast_op(quantizer) != "")


class DirectLinearFn(torch.autograd.Function):
    """`apply(spec, cached, record, x, *weights, *biases)` -> a tuple of y_i. Weights and biases are parameters as modules
    hold them: DTensors are taken apart here, since a function that did it for each would cost more than the layer."""

    @staticmethod
    def forward(
        ctx: Any, spec: LinearSpec, cached: list[Tensor], record: bool, x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        count = len(spec.members)
        weights, biases = locals_of(parameters[:count]), locals_of(parameters[count:])
        save = any(ctx.needs_input_grad[4 : 4 + count])
        ys, kept = forward(spec, x, weights, biases, cached, save, record)
        ctx.spec, ctx.cached, ctx.x_shape, ctx.x_dtype, ctx.parameters = spec, cached, x.shape, x.dtype, parameters
        ctx.num_saved = (len(kept) or 1) if save else 0
        if cached:
            ctx.weights = weights  # of which backward needs no more than shapes
            weights = []
        ctx.save_for_backward(*((kept or [x]) if save else ()), *weights)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        return _backward_once(ctx, *dys) if torch.is_grad_enabled() else _backward(ctx, *dys)


def _backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    spec, cached, saved = ctx.spec, ctx.cached, ctx.saved_tensors
    saved, weights = saved[: ctx.num_saved], ctx.weights if cached else saved[ctx.num_saved :]
    count, needs = len(dys), ctx.needs_input_grad
    used = [i for i, dy in enumerate(dys) if dy is not None]  # a sibling whose y nobody used has no gradient
    there = [dy for dy in dys if dy is not None]
    if len(used) < count:
        size = len(cached) // count
        weights = [weights[i] for i in used]
        cached = [part for i in used for part in cached[i * size : (i + 1) * size]]
    needs_dw, needs_db = [needs[4 + i] for i in used], [needs[4 + count + i] for i in used]
    dx_dw_db = iter(backward(
        spec, there, saved, weights, cached, ctx.x_dtype, used, needs[3], needs_dw, needs_db
    ))  # fmt: skip
    grads: list[Any] = [None] * len(needs)
    if needs[3]:
        grads[3] = next(dx_dw_db).view(ctx.x_shape)
    now = not waits(spec.delay_wgrad, needs[3])
    for first, needed in ((4, needs_dw if now else ()), (4 + count, needs_db)):
        for i, need in zip(used, needed, strict=False):
            if need:
                grads[first + i] = _like_parameter(next(dx_dw_db), ctx.parameters[first - 4 + i])
    return tuple(grads)


_backward_once = once_differentiable(_backward)


def locals_of(parameters: Sequence[Any]) -> list[Any]:
    """What this rank has of each parameter."""
    return [p._local_tensor if isinstance(p, DTensor) else p for p in parameters]


def _like_parameter(grad: Tensor, parameter: Tensor) -> Tensor:
    """This rank's gradient, placed as its parameter."""
    return DTensor(grad, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else grad
