"""BasicLinear and Linear: dlp's parallel linear as ops.

    BasicLinear   y = x @ weight.T; recipe, style and overlap decide casts, communication and GEMMs (`LinearCore`)
    Linear        BasicLinear, then AllReduce or ReduceScatter of y over tp if row-parallel, then Bias, which is added once

    x [..., K]    w [N, K]    y [..., N]    siblings: several w, which share one cast of x; y is a tuple

x and dy may be lazy, for example results of a norm or an activation: the cast then computes the values. A row-parallel `Linear`
runs in one of two forms. If its ops are fused (`dlp.ops.fused.reduced_linear`), the linear sums y itself, as a row-parallel
layer with its overlap strategy. If they are not fused, the BasicLinear multiplies without communication, and the next op sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlp.kernels.ops import ACTIVATION_CODES, FUSED_DTYPE
from dlp.ops.basic.bias import Bias, ReturnedBias, check_bias
from dlp.ops.basic.communication import AllReduce, ReduceScatter
from dlp.ops.basic.quantize import HandOver
from dlp.ops.context import OperationContext
from dlp.ops.handed import LayerOperand
from dlp.ops.op import BasicOperation
from dlp.ops.te_names import TeNames, names_of
from dlp.ops.values import HANDED, LAZY, MANY, Tensors, Value, each, is_handed, one_tensor, rows_of
from dlp.parallel.casts import BOTH, cast_plan
from dlp.parallel.linear import modules
from dlp.parallel.linear.autograd import check_features, check_given, leave_wgrads, num_left, parts_of
from dlp.parallel.linear.capture import obstacle
from dlp.parallel.linear.functional import NO_FINISH, Finish, linear_backward, linear_forward
from dlp.parallel.linear.plan import GradsWanted, keeps_x, reads_w, to_save
from dlp.parallel.linear.quantize import accepted
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, waits
from dlp.parallel.style import LOCAL, ParallelStyle
from dlp.parallel.weight.local import check_whole, local_tensor
from dlp.quant.recipe import Operand, Recipe

MODES = (None, "column", "row")


class BasicLinear(BasicOperation, modules.Linear):
    """Compute y = x @ weight.T with quantized operands, without bias and without communication of y.

    `ops.Linear` combines this operation with the sum over ranks and with `ops.Bias`.

    Args:
        in_features: size of the last dimension of x.
        out_features: size of the last dimension of y; a tuple creates sibling weights (`weight_0`, `weight_1`, ...).
        bias: whether an `ops.Bias` follows in the sequence.
        tensor_parallel_mode: None: the rank holds the complete weight; "column": out_features are sharded over the group;
            "row": in_features are sharded.
        tensor_parallel_group: a ProcessGroup, or a DeviceMesh with one axis.
        sequence_parallel: x of "column" and y of "row" are token shards over the group.
        recipe: name of a recipe, or a `Recipe`.
        overlap: "auto", "serial" or "chunked".
        return_bias: see `ops.Linear`.
        save_original_input: save x in high precision, and quantize x again for wgrad. Saves memory if another operation saves x
            anyway.
        **options: delay_wgrad, init_method, name, device and dtype, as in `dlp.Linear`.

    Shape:
        - x: [..., in_features]
        - y: [..., out_features], or a tuple for siblings
        - weight: [out_features, in_features]

    Raises:
        ValueError: for an unknown mode, for a mode without group if there are several ranks, for row-parallel siblings, for
            sizes that tp does not divide, and for an x whose last dimension is not in_features.

    Examples:
        >>> ops.BasicLinear(64, 128, recipe="fp8_current")(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    takes = frozenset({LAZY, MANY, HANDED})
    launches = none_grads = True
    _te_family = "op"

    def __init__(  # noqa: PLR0913 (the parameters of `transformer_engine.pytorch.ops.Linear`)
        self, in_features: int, out_features: int | tuple[int, ...], *, bias: bool = False,
        tensor_parallel_mode: str | None = None, tensor_parallel_group: DeviceMesh | ProcessGroup | None = None,
        sequence_parallel: bool = False, recipe: str | Recipe = "bf16", overlap: str = "auto", return_bias: bool = False,
        save_original_input: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if tensor_parallel_mode not in MODES:
            raise ValueError(f"tensor_parallel_mode must be one of {MODES}; got {tensor_parallel_mode!r}")
        if tensor_parallel_mode == "row" and not isinstance(out_features, int):
            raise ValueError(
                f"a row-parallel Linear takes one out_features; got {out_features!r}: siblings are column-parallel"
            )
        if tensor_parallel_mode is not None and tensor_parallel_group is None and (ranks := _ranks()) > 1:
            raise ValueError(
                f'tensor_parallel_mode "{tensor_parallel_mode}" needs a tensor_parallel_group with {ranks} ranks: pass the '
                f'ranks that share the weight, mesh["tp"]'
            )
        self._style = tensor_parallel_mode or "local"
        super().__init__(
            in_features, out_features, bias, tp=tensor_parallel_group, sequence_parallel=sequence_parallel, recipe=recipe,
            overlap=overlap, return_bias=return_bias, save_original_input=save_original_input, **options,
        )  # fmt: skip

    @property
    def reduced(self) -> bool:
        """Whether y is a partial sum, which must be summed over tp ranks after the GEMM."""
        return False

    def parameter_places(self) -> Sequence[tuple[Any, str]]:
        return [(member.module, member.weight) for member in self.core.members]

    def op_parameters(self) -> Sequence[Tensor]:
        try:
            parameters: list[Any] = [member.module._parameters[member.weight] for member in self.core.members]
            return parameters
        except KeyError as missing:
            modules.parameter_is_gone(self.core.spec.name, missing.args[0])

    @property
    def planned_spec(self) -> LinearSpec:
        """The spec for which the last plan was made, or is being made; before the first plan, the spec of the layer. Fusions
        read style, recipe and options from this spec."""
        spec: LinearSpec = vars(self).get("_planned") or self.core.spec
        return spec

    @property
    def pads(self) -> bool:
        """Whether the recipe of `planned_spec` zero-pads a weight to complete blocks."""
        _, n, k = self.planned_spec.recipe.units
        shapes = (local_tensor(weight).shape for weight in self.op_parameters())
        return any(rows % n or columns % k for rows, columns in shapes)

    # Called by the fuser

    def local_weights(self, bound: BoundSpec) -> list[Tensor]:
        """Return this rank's weights as plain tensors. Raises RuntimeError for a weight that FSDP has not gathered, or that is
        no longer a DTensor on tp."""
        parameters = self.op_parameters()
        for parameter in parameters:
            if bound.spec.group is not None or isinstance(parameter, DTensor):
                check_whole(parameter, bound.spec.num_axes, bound.spec.name)
        return [local_tensor(parameter) for parameter in parameters]

    def operands(self, bound: BoundSpec, dtype: torch.dtype, record: bool) -> tuple[Any, Sequence[Tensor]]:
        """Return (weight_parts, read).

        weight_parts   operands of the weights that were cast before the pass for an x of this dtype (`WeightParts`); None: no
                       weight was cast before the pass
        read           codes and scales that fprop reads

        record: whether gradients are enabled.
        """
        weight_parts = self.core.weights.operands_for(bound, dtype)
        if weight_parts is not None:
            return weight_parts, weight_parts.rowwise
        weights = self.local_weights(bound)
        ws = bound.weights.read(bound, range(len(weights)), weights, dtype, columnwise=False, record=record)
        return None, parts_of(ws)

    def planned(self, ctx: OperationContext) -> None:
        vars(self)["_planned"] = ctx.bound.spec

    def recipe_of(self, ctx: OperationContext) -> Recipe | None:
        return ctx.bound.spec.recipe

    def input_quantizer(self, ctx: OperationContext) -> Operand | None:
        return self._layer_operand(ctx, "x")

    def grad_output_quantizer(self, ctx: OperationContext) -> Operand | None:
        return self._layer_operand(ctx, "dy")

    def _layer_operand(self, ctx: OperationContext, tensor: str) -> LayerOperand:
        """Return the quantizers with which this linear casts "x" or "dy", as a `LayerOperand` for the neighbouring op."""
        recipe, needs_dw = ctx.bound.spec.recipe, any(ctx.needs_dw)
        operand = recipe.of(tensor)
        assert operand is not None
        wgrad = needs_dw if tensor == "dy" else ctx.requires_grad and keeps_x(recipe, ctx.needs_dx, needs_dw)
        agrees = self.reduced and recipe.amax_scope == "all"
        return LayerOperand(
            operand.rowwise, operand.columnwise, self._unreduced(ctx), tensor, wgrad, ctx.record,
            "all ranks agree on scales inside the layer" if agrees else "",
        )  # fmt: skip

    def why_stored(self, ctx: OperationContext, producer: BasicOperation) -> str:
        """Return the reason why the output of `producer`, the previous op, is stored before the cast of x reads the output; "":
        the cast on a GPU computes the output, x is not cast, or the plan says nothing about `producer` (`in_casts` is None)."""
        recipe = ctx.bound.spec.recipe
        if producer.in_casts is None or recipe.x.keeps_source:
            return ""
        if not producer.in_casts:
            return f"no cast computes {type(producer).__name__}"
        if ctx.dtype != FUSED_DTYPE:
            return f"casts compute {type(producer).__name__} in {FUSED_DTYPE}; got {ctx.dtype}"
        codes = {quantizer.format.parts[0].dtype for quantizer in (recipe.x.rowwise, recipe.x.columnwise)}
        one_read = cast_plan(LOCAL, recipe, "x", BOTH, recipe.units[0]).lazy
        return "" if one_read and codes <= {*ACTIVATION_CODES} else f"the casts of {recipe} read stored values"

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return obstacle(self._unreduced(basic_op_ctxs[0]), which)

    # Forward and backward

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Value,
        *,
        prev_op_grad_output_quantizer: Operand | None = None,
        next_op_input_quantizer: Operand | None = None,
        **kwargs: Any,
    ) -> Value:
        ys = self.multiply(ctx, input_, self._unreduced(ctx))
        return ys if len(ys) > 1 else ys[0]

    def _unreduced(self, ctx: OperationContext) -> BoundSpec:
        """Return the spec without communication if another op sums y (`reduced`); else the spec of the call."""
        return without_communication(ctx.bound) if self.reduced else ctx.bound

    def multiply(
        self,
        ctx: OperationContext,
        input_: Value,
        bound: BoundSpec,
        biases: Sequence[Tensor | None] | None = None,
        finish: Finish = NO_FINISH,
    ) -> tuple[Tensor, ...]:
        """Compute y_i = x @ w_i.T (+ bias_i) for each weight, under the spec `bound`, and save the tensors for backward in ctx.

        biases   for each weight its bias or None; None: no bias is added
        finish   epilogue of the GEMM: a factor, and a tensor to which the product is added
        """
        if isinstance(input_, tuple):
            raise ValueError(
                f"{bound.spec.name}: expected one tensor; got {len(input_)}: put a gate such as SwiGLU before this linear"
            )
        if input_.dtype != ctx.dtype:
            ctx.dtype, (ctx.weight_parts, parts) = input_.dtype, self.operands(ctx.bound, input_.dtype, ctx.record)
            ctx.pass_tensors = ctx.pass_tensors[0], parts
        x = input_
        if is_handed(x):
            x = accepted(bound, x, "x")
        weights, parts = ctx.pass_tensors
        check_features(bound.spec, x, weights[0])
        check_given(bound, (x, *weights))
        for weight, bias in zip(weights, biases or (), strict=False):
            if bias is not None:
                check_bias(bias, (*x.shape[:-1], weight.shape[0]))
        save = ctx.requires_grad and keeps_x(bound.spec.recipe, ctx.needs_dx, any(ctx.needs_dw))
        ws = bound.spec.weight_operands(parts, columnwise=False)
        ys, saved_x = linear_forward(bound, x, weights, biases or [None] * len(weights), ws, save, ctx.record, finish)
        ctx.save_for_backward(*weights, *to_save(x, saved_x, save))
        ctx.x_shape, ctx.x_dtype = tuple(x.shape), x.dtype
        return tuple(ys)

    def _dy(self, grad: Any, bound: BoundSpec) -> Any:
        """Return dy as a matrix [M, N]. A lazy dy stays lazy, and a quantized dy that this linear can read stays quantized."""
        grad = accepted(bound, grad, "dy") if is_handed(grad) else grad
        return grad.rows() if is_handed(grad) else rows_of(grad)

    def operands_back(self, ctx: OperationContext) -> Sequence[Tensor]:
        """Return the codes and scales that dgrad reads, for weights that were not cast before the pass."""
        weights = ctx.saved_tensors[: len(ctx.needs_dw)]
        everyone, read = range(len(weights)), ctx.bound.weights.read
        return parts_of(read(ctx.bound, everyone, weights, ctx.x_dtype, columnwise=True, record=True))

    def targets(self, ctx: OperationContext) -> tuple[Any, ...]:
        """Return for each weight the main gradient into which the wgrad GEMM writes or adds, or None; an empty tuple if there
        are no main gradients, or if the wgrads are delayed."""
        weights = ctx.saved_tensors[: len(ctx.needs_dw)]
        if not ctx.bound.weights.main_grads or self._waits(ctx):
            return ()
        into = ctx.bound.weights.targets(range(len(weights)), weights)
        return tuple([to if needed else None for to, needed in zip(into, ctx.needs_dw, strict=False)])

    def _waits(self, ctx: OperationContext) -> bool:
        """Whether the wgrads of this backward are delayed until `dlp.backward_dw`."""
        return waits(ctx.bound.spec.options.delay_wgrad, ctx.needs_dx)

    def has_end_backward(self, ctx: OperationContext) -> bool:
        """Whether `end_backward` must be called after a backward."""
        return bool(ctx.bound.weights.main_grads) or self._waits(ctx)

    def end_backward(self, ctx: OperationContext, grads: list[Tensor | None], deferred: Sequence[Tensor]) -> None:
        """Finish a backward after its launches, which may have been replayed.

        grads      for each weight its gradient; if its main gradient was written, this function sets the entry to the gradient
                   that autograd gets
        deferred   operands of the delayed wgrads, which are stored for `dlp.backward_dw`
        """
        for i in ctx.written:
            main = ctx.bound.weights.main_grads[i]
            assert main is not None
            grads[i] = main.written()
        if deferred:
            wanted, alpha = ctx.deferred_wgrad
            leave_wgrads(ctx.bound, wanted, [ctx.saved_tensors[i] for i in wanted.used], list(deferred), alpha)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return self.differentiate(ctx, grad_output, self._unreduced(ctx))

    def differentiate(
        self, ctx: OperationContext, grad_output: Value, bound: BoundSpec, finish: Finish = NO_FINISH
    ) -> tuple[Value, list[Tensor | None]]:
        """Compute dx, and for each weight dw, under the spec `bound`; None for gradients that are not needed, and for dw that
        is delayed or was written to a main gradient. finish: epilogue of dgrad, as in `multiply`; its factor also applies to
        wgrad."""
        count = len(ctx.needs_dw)
        if not ctx.requires_grad:
            return None, [None] * count
        weights, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        grads = each(grad_output)
        used = tuple([i for i, dy in enumerate(grads) if dy is not None])
        dws: list[Tensor | None] = [None] * count
        if not used:
            return torch.zeros(ctx.x_shape, dtype=ctx.x_dtype, device=weights[0].device), dws
        dys, ws = [self._dy(grads[i], bound) for i in used], [weights[i] for i in used]
        needs_dw = tuple([ctx.needs_dw[i] for i in used])
        reads = reads_w(bound.spec.recipe, ctx.needs_dx, any(needs_dw))
        wanted = GradsWanted(used, ctx.needs_dx, needs_dw, (False,) * len(used), ctx.x_dtype, reads, ctx.x_shape)
        bound.session.resume(bound.spec, ctx.scales)
        size = len(ctx.pass_tensors) // count
        parts = [part for i in used for part in ctx.pass_tensors[i * size : (i + 1) * size]]
        into = [ctx.into[i] for i in used] if ctx.into else []
        operands = bound.spec.weight_operands(parts, columnwise=True)
        results = linear_backward(bound, dys, saved, ws, operands, wanted, finish, into)
        bound.session.end_layer_backward()
        ctx.written = tuple([i for i, to in zip(used, into, strict=False) if to is not None])
        if self._waits(ctx):
            first = len(results) - num_left(bound, wanted)
            ctx.deferred, ctx.deferred_wgrad = results[first:], (wanted, finish.alpha)
            return results[0], dws
        dx = results.pop(0) if ctx.needs_dx else None
        for i, needed in zip(used, needs_dw, strict=True):
            if needed and i not in ctx.written:
                dws[i] = results.pop(0)
        return dx, dws

    def te_names(self, fused: bool = False) -> TeNames:
        return names_of(self, "", "")

    # Under torch.compile and dispatch modes

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """Compute y of the complete `Linear`, including the sum over ranks and the bias."""
        ys = self.core.by_ops(one_tensor(x))
        return ys if len(ys) > 1 else ys[0]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def without_communication(bound: BoundSpec) -> BoundSpec:
    """Return the spec of the same layer without communication."""
    return with_style(bound, LOCAL, bound.spec.group)


def with_style(bound: BoundSpec, row: ParallelStyle, group: ProcessGroup | None) -> BoundSpec:
    """Return the spec of the same layer with another style, over the ranks of `group`."""
    other: BoundSpec | None = bound.cache.get((with_style, row, group))
    if other is None:
        spec = replace(bound.spec, style=row, group=group, tokens=None)
        other = bound.cache[with_style, row, group] = BoundSpec(spec, bound.session, bound.weights)
    return other


class Linear(BasicLinear):
    """Compute y = x @ weight.T + bias as a sequence of `ops.BasicLinear`, a sum over ranks if row-parallel, and `ops.Bias`.

    Parameters are `weight` and `bias`, or `weight_0`, `bias_0`, ... of siblings.

    Args:
        in_features: size of the last dimension of x.
        out_features: size of the last dimension of y; a tuple creates siblings that read the same x.
        bias: whether to add a bias.
        output: "values" or "quantized". "quantized": y is quantized by the recipe of this layer, unless the next op is a linear
            of the same sequence, which casts y itself.
        grad_input: "values" or "quantized". "quantized": dx is quantized by the recipe of this layer, unless the previous op is
            a linear of the same sequence, which casts dx itself.
        **options: options of `ops.BasicLinear`. With return_bias the bias is returned as an extra output, and not added.

    Shape:
        - x: [..., in_features]
        - y: [..., out_features], or a tuple for siblings

    Raises:
        ValueError: for an unknown `output` or `grad_input`, and for output="quantized" with siblings.

    Examples:
        >>> model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, (128, 128), recipe="fp8_current"), ops.SwiGLU())
        >>> model(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    output = grad_input = "values"  # defaults for `Converted`, which does not call this constructor

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], bias: bool = True, *, output: str = "values",
        grad_input: str = "values", **options: Any,
    ) -> None:  # fmt: skip
        for name, given in (("output", output), ("grad_input", grad_input)):
            if given not in ("values", "quantized"):
                raise ValueError(f'{name} must be "values" or "quantized"; got {given!r}')
        if output == "quantized" and not isinstance(out_features, int):
            raise ValueError(
                f'output="quantized" needs one out_features; got {out_features!r}: leave output out, and pass siblings to a '
                f"gate such as SwiGLU"
            )
        super().__init__(in_features, out_features, bias=bias, **options)
        self.biased, self.output, self.grad_input = bias, output, grad_input
        self.own_fuser()  # created here, because torch.compile cannot trace the creation of a fuser

    def te_names(self, fused: bool = False) -> TeNames:
        """Return the names of the parameters in Transformer Engine, whose `ops.Linear` contains a BasicLinear and a Bias."""
        return {f"basic_ops.{int(name == 'bias')}.{name}": its for name, its in names_of(self, "", "").items()}

    @property
    def reduced(self) -> bool:
        return self.core.spec.style.fprop.reduce is not None and self.core.spec.tp > 1

    @property
    def expanded(self) -> Sequence[BasicOperation]:
        ops: Sequence[BasicOperation] | None = vars(self).get("_ops")
        if ops is None:
            spec = self.core.spec
            behind: list[BasicOperation] = []  # torch.compile cannot trace `list[...]()`
            if self.reduced:
                behind.append((ReduceScatter if spec.style.fprop.reduce == "scatter" else AllReduce)(spec.tp_group))
            for op in behind:
                vars(op)["traced_by"] = self
            if self.biased and self.core.bias_apart:
                behind.append(ReturnedBias.of(self))
            elif self.biased:
                behind.append(Bias.of(self))
                vars(behind[-1])["traced_by"] = self
            behind += [HandOver(self, "forward")] if self.output == "quantized" else []
            before = [HandOver(self, "backward")] if self.grad_input == "quantized" else []
            ops = vars(self)["_ops"] = (*before, self, *behind)
        return ops
