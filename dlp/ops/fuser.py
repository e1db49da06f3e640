"""The fuser: run the basic ops of a sequence as one autograd function, fused differently in forward and in backward.

Fusions are applied once for each state of the fuser. The state includes the active spec of every linear, grad mode, the
tensors that need gradients, the types of the tensors, train or eval mode, dtype and device of x, and the registered fusions.
The fuser keeps the resulting `FuserPlan`s, and uses a plan again when its state comes back, for example when an earlier recipe
is set again. `dlp.ops.passes` runs the passes of a plan. Under torch.compile and dispatch modes the ops run without fusion
(`dlp.ops.traced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from dlp.kernels.launches import capturing
from dlp.ops.calls import FuserCall, FuserPlan, LinearCall, Pass, Placed, deduplicated, layouts_of
from dlp.ops.captured import PlanPass
from dlp.ops.fusions import REGISTERED, fuse
from dlp.ops.passes import FUSER, Members, forward
from dlp.ops.traced import one_by_one
from dlp.ops.values import each
from dlp.parallel.weight.local import local_tensor, num_axes
from dlp.runtime.capture import LIMIT
from dlp.runtime.function import (
    apply_pass,
    autocast_is_on,
    in_autocast_dtype,
    multiplies_tf32,
    no_autocast,
    opaque,
    refuse_transforms,
    shape_keys,
)

Ops = Sequence[Any]
PLAIN = (Tensor, nn.Parameter)


class OperationFuser:
    """Run operations as one autograd function. `ops.Sequential` creates a fuser for each group of neighbouring operations.

    Args:
        ops: operations in order.
        names: names of the basic operations in messages; None: names from index and class.

    Attributes:
        plans: the `FuserPlan` for each state of the fuser.
        calls: the `FuserCall` for each state and each set of shapes, strides and dtypes.
        last: the plan of the last call; None before the first call.

    Raises:
        TypeError: for a module that is not an operation.
        ValueError: for an empty list.

    Examples:
        >>> fuser = ops.OperationFuser([ops.RMSNorm(64), ops.Linear(64, 64)])
    """

    def __init__(self, ops: Ops, names: Sequence[str] | None = None) -> None:
        other = next((type(op).__name__ for op in ops if not hasattr(op, "expanded")), None)
        if other is not None:
            raise TypeError(f"OperationFuser: a {other} is not an operation: pass plain modules to ops.Sequential")
        if not ops:
            raise ValueError("OperationFuser: no operations given: pass at least one")
        self.members = Members([basic for op in ops for basic in op.expanded], names)
        self.basic_ops, self.names = self.members.ops, self.members.names
        self.num_extra_inputs = sum(self.members.extra_inputs)
        self.num_extra_outputs = sum(self.members.extra_outputs)
        ops = self.basic_ops
        self.owners = [i for i, op in enumerate(ops) if op._parameters or op.overrides("op_parameters")]
        self.linears = [(at, i, ops[i]) for at, i in enumerate(self.owners) if hasattr(ops[i], "core")]
        self.readers = _readers(ops)
        self.settings = [(op, name) for op in ops for name in op.settings]
        self.setting_values = [getattr(op, name) for op, name in self.settings]
        self.plans: dict[Any, FuserPlan] = {}
        self.calls: dict[Any, FuserCall] = {}
        self.last: FuserPlan | None = None
        self.autocast = ""  # how torch.autocast cast x, for the printed plan

    def __call__(
        self, x: Any, *extra_inputs: Tensor, basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> Any:
        """Run the ops. Return the output, or a tuple of the output and the extra outputs of all ops, in order.

        x                 input [..., C], or a tuple of siblings
        extra_inputs      extra inputs of all ops, in order
        basic_op_kwargs   for each basic op its keyword arguments; None: no keywords

        Raises ValueError for a wrong number of extra inputs or keyword mappings, TypeError for inputs that are not tensors.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            takers = [name for name, count in zip(self.names, self.members.extra_inputs, strict=True) if count]
            raise ValueError(
                f"ops take {self.num_extra_inputs} extra inputs{' (of ' + ', '.join(takers) + ')' if takers else ''}; "
                f"got {len(extra_inputs)}: pass the extra inputs of all ops, in order"
            )
        inputs = each(x)
        for tensor in (*inputs, *extra_inputs) if inputs else (x,):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.names[0]}: x and extra inputs must be tensors; got {type(tensor).__name__}")
        if basic_op_kwargs is not None:
            self.members.check_keywords(basic_op_kwargs)
        if torch._C._is_any_autocast_enabled() and inputs and autocast_is_on(inputs[0]):
            cast = tuple(map(in_autocast_dtype, inputs))
            if not torch.compiler.is_dynamo_compiling() and cast[0].dtype != inputs[0].dtype:
                self.autocast = f"x is first cast from {inputs[0].dtype} to {cast[0].dtype}, by torch.autocast"
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
        """Look up the `FuserCall` for these tensors, or create it, and run the forward.

        inputs: x as a tuple; many: whether the caller passed x as a tuple of siblings.
        """
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(self.names[0])
        setting_values = [getattr(op, name) for op, name in self.settings]
        if setting_values != self.setting_values:
            self._forget(setting_values)
        record, ops = torch.is_grad_enabled(), self.basic_ops
        own = [ops[i].op_parameters() for i in self.owners]
        tensors = [*inputs, *chain.from_iterable(own), *extra_inputs]

        # The key has everything that the pass depends on: modes of the ops, specs and casts of the linears, and for each tensor
        # layout, alignment and requires_grad.
        bounds, weight_parts, scales, parts = list[Any](), list[Any](), list[Any](), list[Sequence[Tensor]]()
        key: list[Any] = [REGISTERED.version, record, many, *map(len, own), *[op.training for op in ops]]
        for _, _, op in self.linears:
            bound = op.core.active_spec()
            bound.session.begin_forward(bound.spec, record)
            cast_before, read = op.operands(bound, inputs[0].dtype, record)
            bounds.append(bound)
            session = bound.session
            plain = session.scales is None and session.repeats is None
            scales.append(session.now if plain else session.forward_state())
            weight_parts.append(cast_before)
            parts.append(read)
            key += bound, bool(bound.weights.main_grads), cast_before and cast_before.number
        given = [tensor if type(tensor) in PLAIN else self._held(tensor) for tensor in tensors]
        all_read = [*given, *chain.from_iterable(parts)]
        addresses = [tensor.data_ptr() for tensor in all_read]
        key += shape_keys(all_read if None in weight_parts else given, addresses)
        key += [tensor.requires_grad for tensor in tensors]
        key += [(type(tensor), num_axes(tensor)) for tensor in tensors if type(tensor) not in PLAIN]
        reads, read_addresses, same = deduplicated(all_read, addresses)
        call_key = (*key, same, inputs[0].dtype is torch.float32 and multiplies_tf32(inputs[0]))

        call = self.calls.get(call_key)
        if call is None:
            call = self._new_call(own, tensors, bounds, many, len(inputs))
        run = Pass(call, record, scales, weight_parts, given, parts, reads, read_addresses, same, kwargs)
        if call.plan is None:
            self._plan_call(call_key, run, own, tensors)
        self.last = call.plan
        results = apply_pass(FUSER, run, *tensors) if call.plan.needs_backward[-1] else forward(None, run, tensors)
        count = run.layout.num_outputs
        outputs, extra = tuple(results[:count]), tuple(results[count:])
        y = outputs if run.layout.many else outputs[0]
        return (y, *extra) if extra else y

    def _held(self, tensor: Tensor | None) -> Any:
        """Return this rank's plain tensor of a parameter or input. Raises ValueError for a parameter that was set to None."""
        if tensor is None:
            places = ((self.names[i], *place) for i in self.owners for place in self.basic_ops[i].parameter_places())
            found = ((op, name) for op, module, name in places if module._parameters[name] is None)
            op, name = next(found, ("ops.Sequential", "a parameter"))  # an op of the user may keep parameters elsewhere
            raise ValueError(
                f"{op}: {name} was set to None after construction: restore the parameter; for a Linear without bias, "
                f"construct the Linear with bias=False"
            )
        return local_tensor(tensor)

    def _forget(self, setting_values: list[Any]) -> None:
        """Drop all plans and captured launches, because a user has changed a setting of an op (`BasicOperation.settings`)."""
        for plan in self.plans.values():
            for captured in plan.captured:
                captured.forget()
        self.plans.clear()
        self.calls.clear()
        self.setting_values = setting_values

    def _new_call(
        self, own: Sequence[Sequence[Any]], tensors: Sequence[Any], bounds: Sequence[Any], many: bool, num_inputs: int
    ) -> FuserCall:  # fmt: skip
        """Create a `FuserCall` for these tensors, without a plan. own: for each op with parameters, these parameters.

        Raises TypeError for inputs that are DTensors, and for an x that is not floating-point, unless the first op takes
        integers. Raises ValueError for ops with parametrizations (`torch.nn.utils.parametrize`).
        """
        self.members.check_floating(tensors[0].dtype)
        for name, op in zip(self.names, self.basic_ops, strict=True):
            if is_parametrized(op):
                raise ValueError(
                    f"{name}: ops do not support parametrized parameters: remove the parametrization, or use a module of torch"
                )
        firsts = [*accumulate(map(len, own), initial=num_inputs)]
        for place in (*range(num_inputs), *range(firsts[-1], len(tensors))):
            if isinstance(tensors[place], DTensor):
                name = f"{self.names[0]}: the input" if place < num_inputs else "an extra input"
                raise TypeError(f"{name} is a DTensor, but ops read plain local tensors: pass the result of to_local()")
        linears = []
        for (at, place, op), bound in zip(self.linears, bounds, strict=True):
            op.local_weights(bound)
            weights = slice(firsts[at], firsts[at + 1])
            linears.append(LinearCall(op, place, bound, weights, [t.requires_grad for t in tensors[weights]]))
        return FuserCall(self.members, linears, tensors[0].dtype, many, num_inputs, layouts_of(tensors))

    # Plans

    def _plan_call(self, call_key: Any, run: Pass, own: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Set the plan of a new `FuserCall`, and keep the call for later passes. Planning reads the contexts of this pass."""
        run.call.follow(self._plan(run, own, tensors))
        run.ctxs = None  # `Pass.contexts` creates new contexts, with needs_dx and requires_grad from the plan
        if len(self.calls) >= LIMIT:
            self.calls.clear()
        self.calls[call_key] = run.call

    def _plan(self, run: Pass, of_owners: Sequence[Any], tensors: Sequence[Any]) -> FuserPlan:
        """Return the plan for the current state; make the plan if there is none. of_owners: for each op with parameters, these
        parameters.

        Raises ValueError if there is no plan and a CUDA graph is being captured.
        """
        needs = tuple([run.record and tensor.requires_grad for tensor in tensors])
        key = (
            REGISTERED.version, run.record, needs, *map(type, tensors), tensors[0].dtype, tensors[0].device,
            *[op.training for op in self.basic_ops],
            *[(each.bound, bool(each.bound.weights.main_grads)) for each in run.call.linears],
        )  # fmt: skip
        plan = self.plans.get(key)
        if plan is None:
            if capturing():
                raise ValueError(
                    f"{self.names[0]} and the following ops have no plan for the current recipe, dtype and required "
                    f"gradients, and cannot be planned inside a CUDA graph: run the ops once before the capture"
                )
            own: list[Sequence[Any]] = [()] * len(self.basic_ops)
            for i, parameters in zip(self.owners, of_owners, strict=True):
                own[i] = parameters
            plan = self.plans[key] = self._make_plan(run.contexts(), own, needs)
        return plan

    def _make_plan(self, ctxs: Sequence[Any], own: Sequence[Any], needs: Sequence[bool]) -> FuserPlan:
        """Make the plan: apply the fusions, and decide for each op whether it runs in backward.

        own: for each op its parameters; needs: for each input, parameter and extra input whether a gradient is needed.
        """
        ops, extra = self.basic_ops, sum(self.members.extra_inputs)
        count = sum(map(len, own))
        inputs = len(needs) - count - extra
        of_parameters, of_extras = iter(needs[inputs : inputs + count]), iter(needs[inputs + count :])
        needed, needs_dx, needs_backward = any(needs[:inputs]), [], []
        for parameters, num_extra in zip(own, self.members.extra_inputs, strict=True):
            needs_dx.append(needed)
            of_op = [next(of_parameters) for _ in parameters] + [next(of_extras) for _ in range(num_extra)]
            needed = needed or any(of_op)
            needs_backward.append(needed)
        pairs = list(zip(ops, ctxs, strict=True))
        for (op, ctx), dx, backward in zip(pairs, needs_dx, needs_backward, strict=True):
            ctx.needs_dx, ctx.requires_grad = dx, backward
            op.planned(ctx)
        recipe = next((recipe for op, ctx in pairs if (recipe := op.recipe_of(ctx)) is not None), None)
        notes = list[str]()
        forward_ops, backward_ops = (
            self._placed(fuse(which, ops, recipe, notes), which) for which in ("forward", "backward")
        )
        notes += self._stored_before_casts(forward_ops, ctxs)
        dx_quantizers = _quantizers_before(pairs, "grad_output_quantizer")
        y_quantizers = _quantizers_before(pairs[::-1], "input_quantizer")[::-1]
        linears = ", ".join(dict.fromkeys(ctxs[i].bound.spec.name for _, i, _ in self.linears))
        named = f"{self.names[0]} to {self.names[-1]}"
        captured = (
            PlanPass("forward", named, self._obstacle("forward", forward_ops, ctxs), linears),
            PlanPass("backward", named, self._obstacle("backward", backward_ops, ctxs), linears),
        )
        return FuserPlan(
            forward_ops, backward_ops, needs_dx, needs_backward,
            quantizers=list(zip(dx_quantizers, y_quantizers, strict=True)),
            shards=[op for i, op in enumerate(ops) if any(isinstance(parameter, DTensor) for parameter in own[i])],
            sums=[vars(op)["tp_sums"] for i, op in enumerate(ops) if needs_backward[i] and "tp_sums" in vars(op)],
            with_end_backward=[i for _, i, op in self.linears if needs_backward[i] and op.has_end_backward(ctxs[i])],
            notes=notes, captured=captured, num_parameters=list(map(len, own)),
        )  # fmt: skip

    def _stored_before_casts(self, forward_ops: Sequence[Placed], ctxs: Sequence[Any]) -> list[str]:
        """Return a line for each op whose output is stored before the next op, a linear, casts the output; the line states the
        reason why the cast does not compute the output."""
        lines, linears = [], {i: op for _, i, op in self.linears}
        for placed, following in pairwise(forward_ops):
            at = placed.places[-1]
            for i in linears.keys() & {*following.places}:
                if why := linears[i].why_stored(ctxs[i], self.basic_ops[at]):
                    lines.append(f"{self.names[at]} stores y, which the cast of {self.names[i]} reads: {why}")
        return lines

    def _obstacle(self, which: str, ops: Sequence[Placed], ctxs: Sequence[Any]) -> str:
        """Return the reason why this pass cannot be captured, from the first op that has a reason; "": the pass can be
        captured."""
        obstacles = ((places[0], op.obstacle([ctxs[i] for i in places], which)) for op, places in ops)
        return next((f"{self.names[first]}: {why}" for first, why in obstacles if why), "")

    def _placed(self, ops: Ops, which: str) -> list[Placed]:
        """Return the ops of one pass with the indices of their basic ops. A fused op that does not define this pass is replaced
        by its basic ops."""
        placed, at = [], 0
        for op in ops:
            places = tuple(range(at, at + len(op.basic_ops)))
            at += len(places)
            placed += [Placed(op, places)] if op.runs_in(which) else [Placed(self.basic_ops[i], (i,)) for i in places]
        return placed


def _readers(ops: Ops) -> list[Any]:
    """Return for each op the core of the linear that reads the output of the op when ops run one by one; None: no linear
    does."""
    readers: list[Any] = []  # torch.compile cannot trace `list[...]()`
    last = None
    for op in ops[::-1]:
        readers.append(last)
        if "input_quantizer" not in op.passes_through:
            last = getattr(op, "core", None)
    return readers[::-1]


def _quantizers_before(pairs: Sequence[tuple[Any, Any]], method: str) -> list[Any]:
    """Return for each pair (op, context) the quantizers that `method` of the op in the previous pair returns; None for the
    first pair.

    An op that passes its input or gradient through (`passes_through`) hands on the quantizers that it gets itself (`passed`).
    """
    quantizers, last = list[Any](), None
    for op, ctx in pairs:
        quantizers.append(last)
        last = op.passed(last) if method in op.passes_through else getattr(op, method)(ctx)
    return quantizers
