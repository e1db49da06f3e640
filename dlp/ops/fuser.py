"""The fuser: runs the basic ops of a sequence as one autograd function, fused differently forward and backward.

    plan       which ops run in which direction, made once for each state: the active spec of every linear, who needs
               gradients, training, dtype, the fusions there are. A recipe that returns finds its plan again
    forward    ops in order, on lazy values (`dlp.ops.values`); what they keep is saved as one flat list
    backward   ops in reverse, down to the first of which anyone needs a gradient
    captured   a direction of which all is launches runs as one native call from its third time on (`dlp.ops.captured`)

Where something traces or watches (torch.compile, dispatch modes), ops run one by one (`dlp.ops.traced`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dlp.ops.captured import Direction, Flat
from dlp.ops.context import OperationContext
from dlp.ops.fusions import REGISTERED, fuse
from dlp.ops.traced import one_by_one
from dlp.ops.values import HANDED, LAZY, MANY, Value, each, is_handed, tensor_of
from dlp.parallel.linear.autograd import no_autocast, opaque
from dlp.parallel.linear.modules import autocasts, in_autocast_dtype
from dlp.parallel.weight.local import held

Ops = Sequence[Any]
NONE: dict[str, Any] = {}


class Placed(NamedTuple):
    """An op of one direction, and the places of its basic ops."""

    op: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class FuserPlan:
    """What one state of a fuser runs.

    needs_dx, learns   by basic op: whether the gradient of its input, whether any of it or before it is needed
    quantizers         by basic op: those that will cast its dx (of the op before) and its y (of the op behind)
    shards             ops that read their own parameters, some of which are DTensors
    ends               places of the ops that finish their backward behind its launches
    notes              what is not fused, and why
    asked              places of the ops that have an answer to what is asked in each call
    """

    forward: Sequence[Placed]
    backward: Sequence[Placed]
    needs_dx: Sequence[bool]
    learns: Sequence[bool]
    quantizers: Sequence[tuple[Any, Any]]
    shards: Sequence[Any]
    ends: Sequence[int]
    notes: Sequence[str]
    captured: tuple[Direction, Direction]
    asked: Mapping[str, Sequence[int]]
    num_parameters: Sequence[int]


@dataclass
class Run:
    """One forward, and the backward that belongs to it. `ranges`: how many tensors each op saves."""

    fuser: OperationFuser
    plan: FuserPlan
    ctxs: list[Any]
    kwargs: Sequence[Mapping[str, Any]]
    many_in: bool
    num_inputs: int
    num_parameters: Sequence[int]
    bounds: Sequence[Any]
    num_outputs: int = 1
    many_out: bool = False
    ranges: list[int] = field(default_factory=list)


class OperationFuser:
    """Runs ops as one. `names`: of their basic ops, for messages."""

    def __init__(self, ops: Ops, names: Sequence[str] | None = None) -> None:
        self.basic_ops = tuple(basic for op in ops for basic in op.expanded)
        self.named = names is not None
        self.names = list(names or (f"op {i} ({type(op).__name__})" for i, op in enumerate(self.basic_ops)))
        self.extra_inputs = [op.num_extra_inputs for op in self.basic_ops]
        self.extra_outputs = [op.num_extra_outputs for op in self.basic_ops]
        self.num_extra_inputs, self.num_extra_outputs = sum(self.extra_inputs), sum(self.extra_outputs)
        self.asked = {
            name: [i for i, op in enumerate(self.basic_ops) if op.overrides(name)]
            for name in ("begin", "state", "op_parameters")
        }
        self.linears = [i for i, op in enumerate(self.basic_ops) if hasattr(op, "core")]
        self.none_grads = [none for op in self.basic_ops for none in [op.none_grads] * op.num_extra_outputs]
        self.plans: dict[Any, FuserPlan] = {}
        self.last: FuserPlan | None = None

    def __call__(
        self, x: Any, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> Any:
        """x [..., C], or a tuple of such, and the extra inputs of all ops in order -> the output, or a tuple of it and the
        extra outputs in order. ValueError for another number of extra inputs."""
        if len(extra_inputs) != self.num_extra_inputs:
            takers = [name for name, count in zip(self.names, self.extra_inputs, strict=True) if count]
            raise ValueError(
                f"ops take {self.num_extra_inputs} extra inputs{' (of ' + ', '.join(takers) + ')' if takers else ''}; got "
                f"{len(extra_inputs)}: pass those of all ops, in their order"
            )
        kwargs = basic_op_kwargs or [NONE] * len(self.basic_ops)
        if opaque():
            return one_by_one(self, x, extra_inputs, kwargs)
        inputs = each(x)
        for given in (*inputs, *extra_inputs):
            if isinstance(given, DTensor):
                name = self.names[0] if given in inputs else "an extra input"
                raise TypeError(
                    f"{name}: it is a DTensor, but ops read this rank's plain tensor; pass to_local() of it"
                )
        if autocasts(inputs):
            with no_autocast(inputs):
                return self._run(tuple(in_autocast_dtype(inputs)), isinstance(x, tuple), extra_inputs, kwargs)
        return self._run(inputs, isinstance(x, tuple), extra_inputs, kwargs)

    def _run(
        self, inputs: tuple[Any, ...], many: bool, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]
    ) -> Any:
        record, dtype = torch.is_grad_enabled(), inputs[0].dtype
        others = self.asked["op_parameters"]
        own = [op.op_parameters() if op._parameters or i in others else () for i, op in enumerate(self.basic_ops)]
        ctxs: list[Any] = [OperationContext() for _ in self.basic_ops]
        for i in self.asked["begin"]:
            ctxs[i].own = own[i]
            self.basic_ops[i].begin(ctxs[i], dtype, record)
        tensors = (*inputs, *chain.from_iterable(own), *extra_inputs)
        plan = self._plan(ctxs, own, tensors, record)
        for ctx, learns, needs_dx in zip(ctxs, plan.learns, plan.needs_dx, strict=True):
            ctx.requires_grad, ctx.needs_dx = learns, needs_dx
        bounds = [ctxs[i].bound for i in self.linears]
        run = Run(self, plan, ctxs, kwargs, many, len(inputs), plan.num_parameters, bounds)
        results = FuserFn.apply(run, *tensors) if plan.learns[-1] else forward(run, tensors)[0]
        outputs, extra = tuple(results[: run.num_outputs]), tuple(results[run.num_outputs :])
        y = outputs if run.many_out else outputs[0]
        return (y, *extra) if extra else y

    # Plans

    def _plan(self, ctxs: Sequence[Any], own: Sequence[Any], tensors: Sequence[Any], record: bool) -> FuserPlan:
        needs = tuple([record and tensor.requires_grad for tensor in tensors])
        key = (
            REGISTERED.version, record, needs, *map(type, tensors), tensors[0].dtype, tensors[0].device,
            *[op.training for op in self.basic_ops], *[self.basic_ops[i].state(ctxs[i]) for i in self.asked["state"]],
        )  # fmt: skip
        found = self.plans.get(key)
        if found is None:
            if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"{self.names[0]} and the ops behind it have not run like this before (recipe, dtype, "
                    f"gradients), and would be fused anew inside of a CUDA graph: run them once before its capture"
                )
            found = self.plans[key] = self._make_plan(ctxs, own, needs)
        self.last = found
        return found

    def _make_plan(self, ctxs: Sequence[Any], own: Sequence[Any], needs: Sequence[bool]) -> FuserPlan:
        ops, extra = self.basic_ops, sum(self.extra_inputs)
        count = sum(map(len, own))
        inputs = len(needs) - count - extra
        of_parameters, of_extras = iter(needs[inputs : inputs + count]), iter(needs[inputs + count :])
        before, needs_dx, learns = any(needs[:inputs]), [], []
        for parameters, taken in zip(own, self.extra_inputs, strict=True):
            needs_dx.append(before)
            mine = [next(of_parameters) for _ in parameters] + [next(of_extras) for _ in range(taken)]
            before = before or any(mine)
            learns.append(before)
        pairs = list(zip(ops, ctxs, strict=True))
        for op, ctx in pairs:
            op.planned(ctx)
        recipe, notes = (
            next((found for op, ctx in pairs if (found := op.recipe_of(ctx)) is not None), None),
            list[str](),
        )
        ways = [self._placed(fuse(which, ops, recipe, notes), which) for which in ("forward", "backward")]
        dys = [None, *[op.grad_output_quantizer(ctx) for op, ctx in pairs[:-1]]]
        xs = [*[op.input_quantizer(ctx) for op, ctx in pairs[1:]], None]
        captured = [
            Direction(which, f"{self.names[0]} to {self.names[-1]}", self._obstacle(which, way, ctxs))
            for which, way in zip(("forward", "backward"), ways, strict=True)
        ]
        ends = [i for i, (op, ctx) in enumerate(pairs) if learns[i] and op.ends(ctx)]
        asked = {
            name: [
                i
                for i, (op, its) in enumerate(zip(ops, own, strict=True))
                if op.overrides(name) or its or "tp_sums" in vars(op)
            ]
            for name in ("reads", "reads_back", "begin_backward")
        }
        for name in ("reads_back", "begin_backward"):
            asked[name] = [i for i in asked[name] if learns[i]]
        shards = [op for op, its in zip(ops, own, strict=True) if any(isinstance(p, DTensor) for p in its)]
        return FuserPlan(
            ways[0], ways[1], needs_dx, learns, list(zip(dys, xs, strict=True)), shards, ends, notes,
            (captured[0], captured[1]), asked, [len(its) for its in own],
        )  # fmt: skip

    def _obstacle(self, which: str, way: Sequence[Placed], ctxs: Sequence[Any]) -> str:
        """Why a direction cannot be captured: the first op that has a reason; empty: it can."""
        asked = ((at[0], op.obstacle([ctxs[i] for i in at], which)) for op, at in way)
        return next((f"{self.names[first]}: {why}" for first, why in asked if why), "")

    def _placed(self, ops: Ops, which: str) -> list[Placed]:
        """The ops of one direction; a fused one that lacks it as what it is made of."""
        placed, at = [], 0
        for op in ops:
            places = tuple(range(at, at + len(op.basic_ops)))
            at += len(places)
            able = op.goes(which)
            placed += [Placed(op, places)] if able else [Placed(self.basic_ops[i], (i,)) for i in places]
        return placed

    def check_count(self, place: int, what: str, found: int, expected: int) -> None:
        """RuntimeError where an op returns another number than it declares."""
        if found != expected:
            raise RuntimeError(f"{self.names[place]}: it returned {found} {what}; it declares {expected}")

    def at(self, places: Sequence[int], error: Exception) -> Exception:
        """An error of an op, with its name and place; one of a class of its own, as where memory ends, gets a note."""
        names = ", ".join(dict.fromkeys(self.names[i] for i in places))
        if self.named and type(error) in (ValueError, TypeError, RuntimeError):
            said = str(error).removeprefix(f"{type(self.basic_ops[places[0]]).__name__}: ")
            return type(error)(f"{names}: {said}").with_traceback(error.__traceback__)
        if self.named:
            error.add_note(f"in {names}")
        return error


def admitted(fuser: OperationFuser, placed: Placed, value: Value) -> Value:
    """The value as an op takes it: stored, where it does not say that it takes more. ValueError for a tuple it cannot take."""
    takes = placed.op.takes
    if isinstance(value, tuple):
        if MANY not in takes:
            raise ValueError(
                f"{fuser.names[placed.places[0]]}: it takes one tensor and is given {len(value)}: of siblings, only "
                f"ops that say so, as Bias, SwiGLU and GEGLU, take several"
            )
        return tuple([_single(takes, one) for one in value])
    return _single(takes, value)


def _single(takes: frozenset[str], value: Any) -> Any:
    if is_handed(value):
        return value if HANDED in takes else value.tensor()
    return value if isinstance(value, Tensor) or LAZY in takes else tensor_of(value)


# Forward


def forward(run: Run, tensors: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and extra outputs, and what the ops save, flat."""
    plan, fuser = run.plan, run.fuser
    inputs = tensors[: run.num_inputs]
    extras = tensors[run.num_inputs + sum(run.num_parameters) :]

    def compute() -> Flat:
        with _Local(plan.shards):
            return _forward_ops(run, inputs, extras)

    given = [*inputs, *extras]
    for i in plan.asked["reads"]:
        given += fuser.basic_ops[i].reads(run.ctxs[i])
    flat: Any = plan.captured[0].run(run.ctxs, run.bounds, given, (), compute)
    for ctx in run.ctxs:
        ctx.given = ()
    meta: Any = run.ctxs[0]
    run.num_outputs, run.many_out, run.ranges, count = meta.layout
    return flat[:count], flat[count:]


def _forward_ops(run: Run, inputs: Sequence[Any], extras: Sequence[Tensor]) -> Flat:
    plan, fuser, ctxs = run.plan, run.fuser, run.ctxs
    value: Value = tuple(inputs) if run.many_in else inputs[0]
    given, by_op = iter(extras), []
    for count in fuser.extra_inputs:
        by_op.append([next(given) for _ in range(count)])
    extra_outputs: list[Sequence[Tensor]] = [()] * len(ctxs)
    for placed in plan.forward:
        first, last = placed.places[0], placed.places[-1]
        value = admitted(fuser, placed, value)
        try:
            value, extra = placed.op.fuser_forward(
                [ctxs[i] for i in placed.places], value,
                basic_op_extra_inputs=[by_op[i] for i in placed.places],
                prev_op_grad_output_quantizer=plan.quantizers[first][0],
                next_op_input_quantizer=plan.quantizers[last][1], basic_op_kwargs=[run.kwargs[i] for i in placed.places],
            )  # fmt: skip
        except Exception as error:
            raise fuser.at(placed.places, error) from None
        fuser.check_count(first, "tuples of extra outputs", len(extra), len(placed.places))
        for i, its in zip(placed.places, extra, strict=True):
            fuser.check_count(i, "extra outputs", len(its), fuser.extra_outputs[i])
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
    meta: Any = ctxs[0]
    meta.layout = len(outputs), isinstance(value, tuple), ranges, len(results)
    return [*results, *saved]


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


def backward(run: Run, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Flat:
    """The gradients of inputs, parameters and extra inputs."""
    plan, fuser = run.plan, run.fuser
    at = 0
    for ctx, count in zip(run.ctxs, run.ranges, strict=True):
        ctx.saved_tensors = tuple(saved[at : at + count])
        at += count
    for i in plan.asked["begin_backward"]:
        fuser.basic_ops[i].begin_backward(run.ctxs[i])

    def compute() -> Flat:
        with _Local(plan.shards):
            return _backward_ops(run, grads)

    reads = [*grads, *saved]
    for i in plan.asked["reads_back"]:
        reads += fuser.basic_ops[i].reads_back(run.ctxs[i])
    there = tuple([tensor is not None for tensor in reads])
    given = [tensor for tensor in reads if tensor is not None]
    states = tuple([tuple(fuser.basic_ops[i].state_back(run.ctxs[i])) for i in plan.ends])
    found = plan.captured[1].run(run.ctxs, run.bounds, given, (there, states), compute)
    if plan.ends:
        _end(run, found)
    for ctx in run.ctxs:
        ctx.saved_tensors = ctx.given = ()
    return found


def _end(run: Run, found: Flat) -> None:
    """What ops do behind the launches of a backward; takes what they have left off the gradients."""
    first = run.num_inputs + sum(run.num_parameters) + sum(run.fuser.extra_inputs)
    left, at = iter(found[first:]), run.num_inputs
    del found[first:]
    for i, count in enumerate(run.num_parameters):
        if i in run.plan.ends:
            ctx, grads = run.ctxs[i], found[at : at + count]
            run.fuser.basic_ops[i].end_backward(ctx, grads, [next(left) for _ in range(ctx.num_left)])
            found[at : at + count] = grads
        at += count


def _backward_ops(run: Run, grads: Sequence[Tensor | None]) -> Flat:
    plan, fuser, ctxs = run.plan, run.fuser, run.ctxs
    value: Value = tuple(grads[: run.num_outputs]) if run.many_out else grads[0]
    of_extra, by_op = iter(grads[run.num_outputs :]), []
    for count in fuser.extra_outputs:
        by_op.append([next(of_extra) for _ in range(count)])
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    shared = {address for address in addresses if addresses.count(address) > 1}
    for ctx in ctxs:
        ctx.shared = shared
    of_parameters: list[Sequence[Any]] = [[None] * count for count in run.num_parameters]
    of_inputs: list[Sequence[Any]] = [[None] * count for count in fuser.extra_inputs]
    for placed in reversed(plan.backward):
        if not any(plan.learns[i] for i in placed.places):
            break
        value = admitted(fuser, placed, value)
        try:
            value, parameters, extras = placed.op.fuser_backward(
                [ctxs[i] for i in placed.places], value, basic_op_grad_extra_outputs=[by_op[i] for i in placed.places]
            )
        except Exception as error:
            raise fuser.at(placed.places, error) from None
        for i, its, more in zip(placed.places, parameters, extras, strict=True):
            fuser.check_count(i, "gradients of parameters", len(its), len(of_parameters[i]))
            fuser.check_count(i, "gradients of extra inputs", len(more), len(of_inputs[i]))
            of_parameters[i], of_inputs[i] = its, more
    dxs: list[Any] = [None] * run.num_inputs
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
    def forward(ctx: Any, run: Run, *tensors: Any) -> tuple[Tensor, ...]:
        results, saved = forward(run, tensors)
        dirty = [tensor for each in run.ctxs for tensor in each.dirty]
        for each_ctx in run.ctxs:
            each_ctx.dirty = ()
        outs, known = list[Tensor](), {*map(id, tensors)}
        clean = {*map(id, dirty)}
        for result in results:  # an output is no input, nor another output, unless it was written to
            outs.append(result.view_as(result) if id(result) in known and id(result) not in clean else result)
            known.add(id(result))
        if dirty:
            ctx.mark_dirty(*dirty)
        ctx.run, ctx.layouts = run, [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]
        ctx.like = [(result.shape, result.dtype, result.device) for result in results]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Callable[..., tuple[Any, ...]] = _backward_once if torch.is_grad_enabled() else _backward
        if torch._C._is_any_autocast_enabled():
            with no_autocast(grads):
                return run(ctx, *grads)
        return run(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    run: Run = ctx.run
    takes_none = [False] * run.num_outputs + run.fuser.none_grads
    given = [
        grad if grad is not None or none else torch.zeros(like[0], dtype=like[1], device=like[2])
        for grad, none, like in zip(grads, takes_none, ctx.like, strict=True)
    ]
    found: list[Any] = list(backward(run, given, ctx.saved_tensors))
    for place, layout in enumerate(ctx.layouts):
        if layout is not None and found[place] is not None:
            found[place] = DTensor(found[place], layout, requires_grad=False)
    return None, *[grad if need else None for grad, need in zip(found, ctx.needs_input_grad[1:], strict=True)]


_backward_once = once_differentiable(_backward)
