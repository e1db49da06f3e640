"""The fuser: runs the basic ops of a sequence as one autograd function, fused differently forward and backward.

Which ops run in which direction is planned once for each state: the active spec of every linear, who needs gradients,
training, dtype, the fusions there are. A recipe that returns finds its plan again. What a plan's directions do is
`dlp.ops.passes`. Where something traces or watches (torch.compile, dispatch modes), ops run one by one (`dlp.ops.traced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from dlp.ops.calls import FuserCall, FuserPlan, LinearCall, Pass, Placed, layouts_of, once
from dlp.ops.captured import Direction
from dlp.ops.fusions import REGISTERED, fuse
from dlp.ops.passes import Members, apply_fused, forward
from dlp.ops.traced import one_by_one
from dlp.ops.values import each
from dlp.parallel.linear.autograd import multiplies_tf32, no_autocast, opaque, refuse_transforms, shape_keys
from dlp.parallel.linear.capture import LIMIT
from dlp.parallel.linear.modules import autocasts, in_autocast_dtype
from dlp.parallel.model.autocast import active_spec
from dlp.parallel.model.checks import capturing
from dlp.parallel.weight.local import held, num_axes

Ops = Sequence[Any]
PLAIN = (Tensor, nn.Parameter)


class OperationFuser:
    """Runs ops as one. `names`: of their basic ops, for messages; else their places."""

    def __init__(self, ops: Ops, names: Sequence[str] | None = None) -> None:
        self.members = Members([basic for op in ops for basic in op.expanded], names)
        self.basic_ops, self.names = self.members.ops, self.members.names
        self.num_extra_inputs = sum(self.members.extra_inputs)
        self.num_extra_outputs = sum(self.members.extra_outputs)
        ops = self.basic_ops
        self.owners = [i for i, op in enumerate(ops) if op._parameters or op.overrides("op_parameters")]
        self.linears = [(at, i, ops[i]) for at, i in enumerate(self.owners) if hasattr(ops[i], "core")]
        self.settings = [(op, name) for op in ops for name in op.settings]
        self.set_to = [getattr(op, name) for op, name in self.settings]
        self.plans: dict[Any, FuserPlan] = {}
        self.calls: dict[Any, FuserCall] = {}
        self.last: FuserPlan | None = None
        self.autocast = ""  # what torch.autocast did to x, for plans

    def __call__(
        self, x: Any, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> Any:
        """x [..., C], or a tuple of such, and the extra inputs of all ops in order -> the output, or a tuple of it and the
        extra outputs in order. ValueError for another number of extra inputs."""
        if len(extra_inputs) != self.num_extra_inputs:
            takers = [name for name, count in zip(self.names, self.members.extra_inputs, strict=True) if count]
            raise ValueError(
                f"ops take {self.num_extra_inputs} extra inputs{' (of ' + ', '.join(takers) + ')' if takers else ''}; got "
                f"{len(extra_inputs)}: pass those of all ops, in their order"
            )
        inputs = each(x)
        for tensor in (*inputs, *extra_inputs) if inputs else (x,):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.names[0]}: x and extra inputs must be tensors; got {type(tensor).__name__}")
        if basic_op_kwargs is not None:
            self.members.check_keywords(basic_op_kwargs)
        if autocasts(inputs):
            cast = tuple(in_autocast_dtype(inputs))
            if not torch.compiler.is_dynamo_compiling() and cast[0].dtype != inputs[0].dtype:
                self.autocast = f"x is cast from {inputs[0].dtype} to {cast[0].dtype} first, as torch.autocast says"
            with no_autocast(inputs):
                return self._call(cast if isinstance(x, tuple) else cast[0], extra_inputs, basic_op_kwargs)
        return self._call(x, extra_inputs, basic_op_kwargs)

    def _call(self, x: Any, extra_inputs: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]] | None) -> Any:
        if opaque():
            return one_by_one(self, x, extra_inputs, kwargs or self.members.no_kwargs)
        kwargs = kwargs if kwargs is not None and any(kwargs) else None
        return self._run(each(x), isinstance(x, tuple), extra_inputs, kwargs)

    def _run(
        self, inputs: tuple[Any, ...], many: bool, extra_inputs: Sequence[Tensor],
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> Any:  # fmt: skip
        refuse_transforms(self.names[0])
        set_to = [getattr(op, name) for op, name in self.settings]
        if set_to != self.set_to:
            self._forget(set_to)
        record, ops = torch.is_grad_enabled(), self.basic_ops
        own = [ops[i].op_parameters() for i in self.owners]
        tensors = [*inputs, *chain.from_iterable(own), *extra_inputs]
        bounds, sides, scales, parts = list[Any](), list[Any](), list[Any](), list[Sequence[Tensor]]()
        key: list[Any] = [REGISTERED.version, record, many, *map(len, own), *[op.training for op in ops]]
        for _, _, op in self.linears:
            bound = active_spec(op.core)
            bound.session.begin_forward(bound, record)
            its, read = op.operands(bound, inputs[0].dtype, record)
            bounds.append(bound)
            scales.append(bound.session.scales)
            sides.append(its)
            parts.append(read)
            key += bound, bool(bound.weights.main_grads), its and its.number
        given = [tensor if type(tensor) in PLAIN else self._held(tensor) for tensor in tensors]
        all_read = [*given, *chain.from_iterable(parts)]
        addresses = [tensor.data_ptr() for tensor in all_read]
        key += shape_keys(all_read if None in sides else given, addresses)
        key += [tensor.requires_grad for tensor in tensors]
        key += [(type(tensor), num_axes(tensor)) for tensor in tensors if type(tensor) not in PLAIN]
        reads, distinct, same = once(all_read, addresses)
        asked = (*key, same, multiplies_tf32(inputs[0]))
        call = self.calls.get(asked)
        new = call is None
        if call is None:
            call = self._new_call(own, tensors, bounds, many, len(inputs))
        run = Pass(call, record, scales, sides, given, parts, reads, distinct, same, kwargs)
        if new:
            call.follow(self._plan(run, own, tensors))
            run.ctxs = None  # which say now what is needed
            if len(self.calls) >= LIMIT:
                self.calls.clear()
            self.calls[asked] = call
        self.last = call.plan
        results = apply_fused(run, *tensors) if call.plan.learns[-1] else forward(run, tensors)[0]
        count, many_out, _, _ = run.layout
        outputs, extra = tuple(results[:count]), tuple(results[count:])
        y = outputs if many_out else outputs[0]
        return (y, *extra) if extra else y

    def _held(self, tensor: Tensor | None) -> Any:
        """What this rank has of a tensor. ValueError for a bias that was taken away."""
        if tensor is None:
            asked = ((self.names[i], self.basic_ops[i].op_parameters()) for i in self.owners)
            name = next(name for name, own in asked if any(each is None for each in own))
            raise ValueError(f"{name}: its bias was set to None, and it still adds one: make a Linear with bias=False")
        return held(tensor)

    def _forget(self, set_to: list[Any]) -> None:
        """An op is set otherwise than in the last call: drop what was planned and captured."""
        for plan in self.plans.values():
            for direction in plan.captured:
                direction.forget()
        self.plans.clear()
        self.calls.clear()
        self.set_to = set_to

    def _new_call(
        self, own: Sequence[Sequence[Any]], tensors: Sequence[Any], bounds: Sequence[Any], many: bool, num_inputs: int
    ) -> FuserCall:  # fmt: skip
        """Without its plan. TypeError for activations that are DTensors or no floating point, ValueError for ops whose
        parameters are computed."""
        self.members.check_floating(tensors[0].dtype)
        for name, op in zip(self.names, self.basic_ops, strict=True):
            if is_parametrized(op):
                raise ValueError(
                    f"{name}: it is parametrized, and ops read parameters as they are: use the module of torch"
                )
        firsts = [*accumulate(map(len, own), initial=num_inputs)]
        for place in (*range(num_inputs), *range(firsts[-1], len(tensors))):
            if isinstance(tensors[place], DTensor):
                name = self.names[0] if place < num_inputs else "an extra input"
                raise TypeError(
                    f"{name}: it is a DTensor, but ops read this rank's plain tensor; pass to_local() of it"
                )
        linears = []
        for (at, place, op), bound in zip(self.linears, bounds, strict=True):
            op.whole(bound)
            weights = slice(firsts[at], firsts[at + 1])
            linears.append(LinearCall(op, place, bound, weights, [t.requires_grad for t in tensors[weights]]))
        return FuserCall(self.members, linears, tensors[0].dtype, many, num_inputs, layouts_of(tensors))

    # Plans

    def _plan(self, run: Pass, of_owners: Sequence[Any], tensors: Sequence[Any]) -> FuserPlan:
        needs = tuple([run.record and tensor.requires_grad for tensor in tensors])
        key = (
            REGISTERED.version, run.record, needs, *map(type, tensors), tensors[0].dtype, tensors[0].device,
            *[op.training for op in self.basic_ops],
            *[(each.bound, bool(each.bound.weights.main_grads)) for each in run.call.linears],
        )  # fmt: skip
        found = self.plans.get(key)
        if found is None:
            if capturing():
                raise ValueError(
                    f"{self.names[0]} and the ops behind it have not run like this before (recipe, dtype, "
                    f"gradients), and would be fused anew inside of a CUDA graph: run them once before its capture"
                )
            own: list[Sequence[Any]] = [()] * len(self.basic_ops)
            for i, its in zip(self.owners, of_owners, strict=True):
                own[i] = its
            found = self.plans[key] = self._make_plan(run.contexts(), own, needs)
        return found

    def _make_plan(self, ctxs: Sequence[Any], own: Sequence[Any], needs: Sequence[bool]) -> FuserPlan:
        ops, extra = self.basic_ops, sum(self.members.extra_inputs)
        count = sum(map(len, own))
        inputs = len(needs) - count - extra
        of_parameters, of_extras = iter(needs[inputs : inputs + count]), iter(needs[inputs + count :])
        before, needs_dx, learns = any(needs[:inputs]), [], []
        for parameters, taken in zip(own, self.members.extra_inputs, strict=True):
            needs_dx.append(before)
            mine = [next(of_parameters) for _ in parameters] + [next(of_extras) for _ in range(taken)]
            before = before or any(mine)
            learns.append(before)
        pairs = list(zip(ops, ctxs, strict=True))
        for op, ctx in pairs:
            op.planned(ctx)
        recipe = next((found for op, ctx in pairs if (found := op.recipe_of(ctx)) is not None), None)
        notes = list[str]()
        ahead, back = (self._placed(fuse(which, ops, recipe, notes), which) for which in ("forward", "backward"))
        dys = _of_the_op_before(pairs, "grad_output_quantizer")
        xs = _of_the_op_before(pairs[::-1], "input_quantizer")[::-1]
        linears = ", ".join(dict.fromkeys(ctxs[i].bound.spec.name for _, i, _ in self.linears))
        named = f"{self.names[0]} to {self.names[-1]}"
        captured = (
            Direction("forward", named, self._obstacle("forward", ahead, ctxs), linears),
            Direction("backward", named, self._obstacle("backward", back, ctxs), linears),
        )
        for ctx, its in zip(ctxs, needs_dx, strict=True):
            ctx.needs_dx = its
        return FuserPlan(
            ahead, back, needs_dx, learns, list(zip(dys, xs, strict=True)),
            [op for op, its in zip(ops, own, strict=True) if any(isinstance(p, DTensor) for p in its)],
            [vars(op)["tp_sums"] for op, learned in zip(ops, learns, strict=True) if learned and "tp_sums" in vars(op)],
            [i for _, i, op in self.linears if learns[i] and op.ends(ctxs[i])],
            notes, captured, [len(its) for its in own],
        )  # fmt: skip

    def _obstacle(self, which: str, direction: Sequence[Placed], ctxs: Sequence[Any]) -> str:
        """Why a direction cannot be captured: the first op that has a reason; empty: it can."""
        asked = ((at[0], op.obstacle([ctxs[i] for i in at], which)) for op, at in direction)
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


def _of_the_op_before(pairs: Sequence[tuple[Any, Any]], ask: str) -> list[Any]:
    """By op, the quantizers of the op before; one that hands on what it is given is looked through."""
    found, last = list[Any](), None
    for op, ctx in pairs:
        found.append(last)
        last = last if ask in op.looked_through else getattr(op, ask)(ctx)
    return found
