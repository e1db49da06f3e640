"""BasicLinear and Linear: dlp's parallel linear as ops.

    BasicLinear   y = x @ weight.T, cast, gathered and multiplied as its recipe, style and overlap say (`LinearCore`)
    Linear        BasicLinear, what sums its result over tp, and Bias, which comes after the sum, once

x may be a matrix that is still to be made (a norm or an activation in front): it is made in the cast. So is dy. Several
`out_features` are siblings: one cast of x, a tuple of y.

A row-parallel `Linear` is BasicLinear, AllReduce or ReduceScatter, and Bias; by themselves the first multiplies only what is
here, and fused (`dlp.ops.fused.reduced_linear`) all are one row of the style table, with its overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlp.ops.basic.bias import Bias, ReturnedBias
from dlp.ops.basic.communication import AllReduce, ReduceScatter
from dlp.ops.basic.quantize import HandOver
from dlp.ops.op import BasicOperation
from dlp.ops.values import HANDED, LAZY, MANY, Value, each, is_handed, rows_of
from dlp.parallel.linear import modules
from dlp.parallel.linear.autograd import check_features, check_given
from dlp.parallel.linear.capture import obstacle
from dlp.parallel.linear.core import (
    NO_FINISH,
    Finish,
    GradsWanted,
    keeps_x,
    leave_wgrads,
    num_left,
    run_backward,
    run_forward,
    to_save,
    waits,
)
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, accepted
from dlp.parallel.style import LOCAL, ParallelStyle
from dlp.parallel.weight.local import check_whole, held
from dlp.quant.recipe import Recipe

MODES = (None, "column", "row")


class Forward(NamedTuple):
    """y_i and what backward reads, of `multiply`."""

    ys: list[Tensor]
    saved: list[Tensor]


class BasicLinear(BasicOperation, modules.Linear):
    """y = x @ weight.T; weight [out_features, in_features], or weight_0, weight_1, ... of siblings.

    tensor_parallel_mode    None: whole here; "column": out_features are cut over the group, "row": in_features
    tensor_parallel_group   a ProcessGroup, or a DeviceMesh with one axis
    sequence_parallel       tokens are cut over the group on the other side of the layer
    save_original_input     x itself is kept for wgrad, and quantized again in backward: where another op keeps it anyway

    Raises ValueError for another mode, sizes that tp does not divide, and x of other features.
    """

    takes = frozenset({LAZY, MANY, HANDED})
    launches = none_grads = True

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], *, bias: bool = False,
        tensor_parallel_mode: str | None = None, tensor_parallel_group: DeviceMesh | ProcessGroup | None = None,
        sequence_parallel: bool = False, recipe: str | Recipe = "bf16", overlap: str = "serial", return_bias: bool = False,
        save_original_input: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip  # many parameters: those of `transformer_engine.pytorch.ops.Linear`
        if tensor_parallel_mode not in MODES:
            raise ValueError(f"tensor_parallel_mode must be one of {MODES}; got {tensor_parallel_mode!r}")
        if tensor_parallel_mode == "row" and not isinstance(out_features, int):
            raise ValueError(
                f"a row-parallel Linear takes one out_features; got {out_features!r}: siblings are column-parallel"
            )
        self._style = tensor_parallel_mode or "local"
        super().__init__(
            in_features, out_features, bias, tp=tensor_parallel_group, sequence_parallel=sequence_parallel, recipe=recipe,
            overlap=overlap, return_bias=return_bias, save_original_input=save_original_input, device=device, dtype=dtype,
        )  # fmt: skip

    @property
    def reduced(self) -> bool:
        """Whether another op sums y over ranks."""
        return False

    def op_parameters(self) -> Sequence[Tensor]:
        try:
            return [member.module._parameters[member.weight] for member in self.core.members]
        except KeyError as missing:
            modules.parameter_is_gone(self.core.spec.name, missing.args[0])

    @property
    def planned_spec(self) -> LinearSpec:
        """The spec that a plan is made for."""
        found: LinearSpec = vars(self).get("_planned") or self.core.spec
        return found

    @property
    def pads(self) -> bool:
        """Whether zeros are appended to its weight for the recipe that a plan is made for."""
        _, n, k = self.planned_spec.recipe.units
        return any(held(weight).shape[0] % n or held(weight).shape[1] % k for weight in self.op_parameters())

    # Asked by the fuser

    def whole(self, bound: BoundSpec) -> list[Tensor]:
        """This rank's weights. RuntimeError where FSDP has resharded them."""
        parameters = self.op_parameters()
        for parameter in parameters:
            if bound.spec.group is not None or isinstance(parameter, DTensor):
                check_whole(parameter, bound.spec.num_axes, bound.spec.name)
        return [held(parameter) for parameter in parameters]

    def operands(self, bound: BoundSpec, dtype: torch.dtype, record: bool) -> tuple[Any, Sequence[Tensor]]:
        """For x of this dtype, the operands of the weights that were there before the pass, if there are some, and the parts
        that forward reads."""
        sides = self.core.weights.operands_for(bound, dtype)
        if sides is not None:
            return sides, sides.rowwise
        weights = self.whole(bound)
        return None, bound.weights.read(bound, range(len(weights)), weights, dtype, columnwise=False, record=record)

    def planned(self, ctx: Any) -> None:
        vars(self)["_planned"] = ctx.bound.spec

    def recipe_of(self, ctx: Any) -> Any:
        return ctx.bound.spec.recipe

    def input_quantizer(self, ctx: Any) -> Any:
        return ctx.bound.spec.recipe.of("x")

    def grad_output_quantizer(self, ctx: Any) -> Any:
        return ctx.bound.spec.recipe.of("dy")

    def obstacle(self, basic_op_ctxs: Sequence[Any], which: str) -> str:
        return obstacle(self._alone(basic_op_ctxs[0]), which)

    # Computing

    def op_forward(
        self,
        ctx: Any,
        input_: Value,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> Value:
        ys = self.multiply(ctx, input_, self._alone(ctx))
        return ys if len(ys) > 1 else ys[0]

    def _alone(self, ctx: Any) -> BoundSpec:
        """Of a row, what it does without the sum: that is another op's."""
        return here_only(ctx.bound) if self.reduced else ctx.bound

    def multiply(
        self,
        ctx: Any,
        input_: Value,
        bound: BoundSpec,
        biases: Sequence[Tensor | None] | None = None,
        finish: Finish = NO_FINISH,
    ) -> tuple[Tensor, ...]:
        """y_i under this spec; what backward reads is saved."""
        if isinstance(input_, tuple):
            raise ValueError(
                f"{bound.spec.name}: it reads one tensor and is given {len(input_)}: join siblings by SwiGLU or GEGLU"
            )
        if input_.dtype != ctx.dtype:
            ctx.dtype, (ctx.sides, parts) = input_.dtype, self.operands(ctx.bound, input_.dtype, ctx.record)
            ctx.given = ctx.given[0], parts
        x = input_
        if is_handed(x):
            x = accepted(bound, x, "x")
        weights, parts = ctx.given
        check_features(bound.spec, x, weights[0])
        check_given(bound, (x, *weights))
        save = ctx.requires_grad and keeps_x(bound.spec.recipe, ctx.needs_dx, any(ctx.learns))
        ys, kept = run_forward(bound, x, weights, biases or [None] * len(weights), parts, save, ctx.record, finish)
        ctx.save_for_backward(*weights, *to_save([x], kept, save))
        ctx.x_shape, ctx.x_dtype = tuple(x.shape), x.dtype
        return tuple(ys)

    def _dy(self, grad: Any, bound: BoundSpec) -> Any:
        grad = accepted(bound, grad, "dy") if is_handed(grad) else grad
        return grad.rows() if is_handed(grad) else rows_of(grad)

    def operands_back(self, ctx: Any) -> Sequence[Tensor]:
        """The parts that backward reads, where there are none from before."""
        weights = ctx.saved_tensors[: len(ctx.learns)]
        read: Sequence[Tensor] = ctx.bound.weights.read(
            ctx.bound, range(len(weights)), weights, ctx.x_dtype, columnwise=True, record=True
        )
        return read

    def targets(self, ctx: Any) -> tuple[Any, ...]:
        """By weight, where its wgrad is written; none: all are autograd's."""
        weights = ctx.saved_tensors[: len(ctx.learns)]
        if not ctx.bound.weights.main_grads or self._waits(ctx):
            return ()
        into = ctx.bound.weights.targets(range(len(weights)), weights)
        return tuple([to if learns else None for to, learns in zip(into, ctx.learns, strict=False)])

    def _waits(self, ctx: Any) -> bool:
        return waits(ctx.bound.spec.options.delay_wgrad, ctx.needs_dx)

    def ends(self, ctx: Any) -> bool:
        """Whether `end_backward` has something to do."""
        return bool(ctx.bound.weights.main_grads) or self._waits(ctx)

    def end_backward(self, ctx: Any, grads: list[Tensor | None], left: Sequence[Tensor]) -> None:
        """A backward has ended, captured or not, with these gradients of the weights: those that are written elsewhere are said
        to be there, and what it has `left` for wgrads that wait goes to `backward_dw`."""
        for i in ctx.written:
            main = ctx.bound.weights.main_grads[i]
            assert main is not None
            grads[i] = main.written()
        if left:
            wanted, alpha = ctx.later
            leave_wgrads(ctx.bound, wanted, [ctx.saved_tensors[i] for i in wanted.used], list(left), alpha)

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return self.differentiate(ctx, grad_output, self._alone(ctx))

    def differentiate(
        self, ctx: Any, grad_output: Value, bound: BoundSpec, finish: Finish = NO_FINISH
    ) -> tuple[Value, list[Tensor | None]]:
        """dx, and the gradients of the weights; where neither is needed, as before a bias that alone learns, None."""
        count = len(ctx.learns)
        if not ctx.requires_grad:
            return None, [None] * count
        weights, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        grads = each(grad_output)
        used = tuple([i for i, dy in enumerate(grads) if dy is not None])
        learned: list[Tensor | None] = [None] * count
        if not used:
            return torch.zeros(ctx.x_shape, dtype=ctx.x_dtype, device=weights[0].device), learned
        dys, ws = [self._dy(grads[i], bound) for i in used], [weights[i] for i in used]
        dw = tuple([ctx.learns[i] for i in used])
        wanted = GradsWanted(used, ctx.needs_dx, dw, (False,) * len(used), ctx.x_dtype, ctx.x_shape)
        bound.session.scales = ctx.scales
        size = len(ctx.given) // count
        parts = [part for i in used for part in ctx.given[i * size : (i + 1) * size]]
        into = [ctx.into[i] for i in used] if ctx.into else []
        made = run_backward(bound, dys, saved, ws, parts, wanted, finish, into)
        bound.session.scales = None
        ctx.written = tuple([i for i, to in zip(used, into, strict=False) if to is not None])
        if self._waits(ctx):
            first = len(made) - num_left(bound, wanted)
            ctx.left, ctx.later = made[first:], (wanted, finish.alpha)
            return made[0], learned
        dx = made.pop(0) if ctx.needs_dx else None
        for i, needed in zip(used, dw, strict=True):
            if needed and i not in ctx.written:
                learned[i] = made.pop(0)
        return dx, learned

    # For what traces

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """All of a `Linear`, its sum and its bias too."""
        return self.with_prologue((), (x,))

    def with_prologue(self, prologue: tuple[Any, ...], given: Sequence[Tensor]) -> Any:
        ys = self.core.by_ops(tuple(given), prologue)
        return ys if len(ys) > 1 else ys[0]


def here_only(bound: BoundSpec) -> BoundSpec:
    """The spec of the same layer where nothing is communicated."""
    return over(bound, LOCAL, bound.spec.group)


def over(bound: BoundSpec, row: ParallelStyle, group: ProcessGroup | None) -> BoundSpec:
    """The spec of the same layer as another row of the style table, over these ranks."""
    found: BoundSpec | None = bound.cache.get((over, row, group))
    if found is None:
        spec = replace(bound.spec, style=row, group=group, tokens=None)
        found = bound.cache[over, row, group] = BoundSpec(spec, bound.session, bound.weights)
    return found


class Linear(BasicLinear):
    """BasicLinear and Bias; row-parallel: BasicLinear, AllReduce or (`sequence_parallel`) ReduceScatter, Bias. Parameters are
    `weight` and `bias`, or weight_0, bias_0, ... of siblings. `return_bias`: the bias is not added, not by a row-parallel one
    either, but is an extra output, one of each sibling. output, grad_input: "quantized" hands y to the next module, dx to the
    one before, as this layer's recipe casts x and dy; a linear of the same sequence casts them itself, as it does anyway."""

    output = grad_input = "values"  # of a converted one, too

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], bias: bool = True, *, output: str = "values",
        grad_input: str = "values", **options: Any,
    ) -> None:  # fmt: skip
        for name, given in (("output", output), ("grad_input", grad_input)):
            if given not in ("values", "quantized"):
                raise ValueError(f'{name} must be "values" or "quantized"; got {given!r}')
        if output == "quantized" and not isinstance(out_features, int):
            raise ValueError(f'output="quantized" is of one out_features; got {out_features!r}: siblings go to a gate')
        super().__init__(in_features, out_features, bias=bias, **options)
        self.biased, self.output, self.grad_input = bias, output, grad_input
        self.own_fuser()  # here, since compiled code does not make it

    @property
    def reduced(self) -> bool:
        return self.core.spec.style.fprop.reduce is not None and self.core.spec.tp > 1

    @property
    def expanded(self) -> Sequence[BasicOperation]:
        found: Sequence[BasicOperation] | None = vars(self).get("_ops")
        if found is None:
            spec, behind = self.core.spec, list[BasicOperation]()
            if self.reduced:
                behind.append((ReduceScatter if spec.style.fprop.reduce == "scatter" else AllReduce)(spec.tp_group))
            for op in behind:
                vars(op)["part_of"] = self
            if self.biased and self.core.bias_apart:
                behind.append(ReturnedBias.of(self))
            elif self.biased:
                behind.append(Bias.of(self))
                vars(behind[-1])["part_of"] = self
            behind += [HandOver(self, "forward")] if self.output == "quantized" else []
            before = [HandOver(self, "backward")] if self.grad_input == "quantized" else []
            found = vars(self)["_ops"] = (*before, self, *behind)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_ops"}
