"""Fuse in forward and backward: AllGather, BasicLinear, Bias (optional; in forward only).

The linear must not be sharded over ranks. The fused op runs with the style COLUMN_SP (column-parallel with sequence
parallelism) and the overlap strategies of the linear: each rank quantizes its rows of x, quantized x is gathered, and dx is
reduced while wgrad runs.
Results are bitwise equal to those of separate ops, since ranks agree on scales, except for stochastic rounding of dy, which
depends on the position of an element among the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import Produced
from dlp.ops.basic.bias import Bias
from dlp.ops.basic.communication import AllGather
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, maybe, register_backward_fusion, register_forward_fusion
from dlp.ops.linear import BasicLinear, with_style
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, MANY, Grads, Value, is_handed, rows_of, with_leading_dims
from dlp.parallel.linear.capture import obstacle
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.style import COLUMN_SP


class GatheredLinear(InnerFused):
    """Linear that gathers x over the group of an AllGather."""

    takes = frozenset({LAZY, MANY, HANDED})
    none_grads = True

    def bound(self, basic_op_ctxs: Sequence[OperationContext]) -> BoundSpec:
        """Return the spec of the linear with the style COLUMN_SP, over the group that the AllGather has in this forward."""
        return with_style(basic_op_ctxs[1].bound, COLUMN_SP, self.basic_ops[0].group_of(basic_op_ctxs[0]))

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return obstacle(self.bound(basic_op_ctxs), which)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        gather, linear, *bias = self.basic_ops
        gather.keep_group(basic_op_ctxs[0])
        ctx, shape = basic_op_ctxs[1], tuple(input_.shape)
        biases = bias[0].biases_for(basic_op_ctxs[2]) if bias else None
        if isinstance(input_, Produced):
            input_ = Produced(input_.matrix, input_.matrix.shape)
        else:
            input_ = input_.rows() if is_handed(input_) else rows_of(input_)
        ys = [with_leading_dims(y, shape) for y in linear.multiply(ctx, input_, self.bound(basic_op_ctxs), biases)]
        ctx.x_shape = shape
        return (tuple(ys) if len(ys) > 1 else ys[0]), [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        dx, of_weights = self.basic_ops[1].differentiate(basic_op_ctxs[1], grad_output, self.bound(basic_op_ctxs))
        return dx, [(), of_weights], [(), ()]


def why_not(gather: Any, linear: Any, bias: Any = None) -> str | None:
    """Return the reason why a linear that gathers x would change results or is not possible; None: results are bitwise
    equal."""
    spec = linear.planned_spec
    if bias is not None and len(bias.where) != len(spec.members):
        return "the number of biases differs from the number of siblings"
    if spec.recipe.dx is not None or (bias is not None and spec.recipe.y is not None):
        return "the recipe quantizes dx, or y before the bias is added"
    why: str | None = gather.obstacle_to_fusion(spec)
    return why


register_forward_fusion(Pattern(GatheredLinear, AllGather, BasicLinear, maybe(Bias), obstacle=why_not))
register_backward_fusion(Pattern(GatheredLinear, AllGather, BasicLinear, obstacle=why_not))
