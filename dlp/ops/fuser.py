"""The fuser: runs the basic ops of a sequence as one autograd function, fused differently forward and backward.

Which ops run in which direction is planned once for each state: the active spec of every linear, who needs gradients,
training, dtype, the fusions there are. A recipe that returns finds its plan again. What a plan's directions do is
`dlp.ops.passes`. Where something traces or watches (torch.compile, dispatch modes), ops run one by one (`dlp.ops.traced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.ops.captured import Direction
from dlp.ops.context import OperationContext
from dlp.ops.fusions import REGISTERED, fuse
from dlp.ops.passes import FuserPlan, Members, Placed, Run, apply_fused, forward
from dlp.ops.traced import one_by_one
from dlp.ops.values import each
from dlp.parallel.linear.autograd import no_autocast, opaque
from dlp.parallel.linear.modules import autocasts, in_autocast_dtype

Ops = Sequence[Any]
NONE: dict[str, Any] = {}


class OperationFuser:
    """Runs ops as one. `names`: of their basic ops, for messages."""

    def __init__(self, ops: Ops, names: Sequence[str] | None = None) -> None:
        self.members = Members([basic for op in ops for basic in op.expanded], names)
        self.basic_ops, self.names = self.members.ops, self.members.names
        self.num_extra_inputs = sum(self.members.extra_inputs)
        self.num_extra_outputs = sum(self.members.extra_outputs)
        self.asked = {
            name: [i for i, op in enumerate(self.basic_ops) if op.overrides(name)]
            for name in ("begin", "state", "op_parameters")
        }
        self.linears = [i for i, op in enumerate(self.basic_ops) if hasattr(op, "core")]
        self.no_kwargs: Sequence[Mapping[str, Any]] = [NONE] * len(self.basic_ops)
        self.plans: dict[Any, FuserPlan] = {}
        self.last: FuserPlan | None = None

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
        kwargs = basic_op_kwargs or self.no_kwargs
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
        others, own, ctxs = self.asked["op_parameters"], list[Sequence[Tensor]](), list[Any]()
        for i, op in enumerate(self.basic_ops):
            ctxs.append(OperationContext())
            own.append(op.op_parameters() if op._parameters or i in others else ())
        for i in self.asked["begin"]:
            ctxs[i].own = own[i]
            self.basic_ops[i].begin(ctxs[i], dtype, record)
        tensors = (*inputs, *chain.from_iterable(own), *extra_inputs)
        plan = self._plan(ctxs, own, tensors, record)
        for i in plan.without:
            ctxs[i].requires_grad, ctxs[i].needs_dx = plan.learns[i], plan.needs_dx[i]
        bounds = [ctxs[i].bound for i in self.linears]
        run = Run(self.members, plan, ctxs, kwargs, many, len(inputs), plan.num_parameters, bounds)
        results = apply_fused(run, *tensors) if plan.learns[-1] else forward(run, tensors)[0]
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
        recipe, notes = (
            next((found for op, ctx in pairs if (found := op.recipe_of(ctx)) is not None), None),
            list[str](),
        )
        ways = [self._placed(fuse(which, ops, recipe, notes), which) for which in ("forward", "backward")]
        dys = _of_the_op_before(pairs, "grad_output_quantizer")
        xs = _of_the_op_before(pairs[::-1], "input_quantizer")[::-1]
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
            [i for i, both in enumerate(zip(learns, needs_dx, strict=True)) if not all(both)],
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


def _of_the_op_before(pairs: Sequence[tuple[Any, Any]], ask: str) -> list[Any]:
    """By op, the quantizers of the op before; one that hands on what it is given is looked through."""
    found, last = list[Any](), None
    for op, ctx in pairs:
        found.append(last)
        last = last if ask in op.looked_through else getattr(op, ask)(ctx)
    return found
