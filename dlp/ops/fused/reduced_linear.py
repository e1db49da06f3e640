"""Fuse in forward and backward: BasicLinear, AllReduce or ReduceScatter, Bias (optional).

The ops come from a row-parallel `Linear`, or the user has put an AllReduce or ReduceScatter after a linear that is not sharded
over ranks. The fused op runs with the style ROW (AllReduce) or ROW_SP (ReduceScatter) and the overlap strategies of the linear.
The bias is added once, after the sum. Backward of ROW_SP gathers quantized dy; separate ops gather dy in high precision.
Results are bitwise equal to those of separate ops, since ranks agree on scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.ops.basic.bias import Bias
from dlp.ops.basic.communication import AllReduce, ReduceScatter
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, maybe, register_forward_backward_fusion
from dlp.ops.linear import BasicLinear, with_style
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, Grads, Value, with_leading_dims
from dlp.parallel.linear.capture import obstacle
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.style import ROW, ROW_SP


class ReducedLinear(InnerFused):
    """Linear that sums y over ranks."""

    takes = frozenset({LAZY, HANDED})

    def bound(self, basic_op_ctxs: Sequence[OperationContext]) -> BoundSpec:
        """Return the spec of the fused op. For a row-parallel linear this is the spec of the linear. For a linear that is not
        sharded, it is the spec of the linear with style ROW (AllReduce) or ROW_SP (ReduceScatter), over the group that the
        reduction has in this forward."""
        linear, reduction = self.basic_ops[:2]
        bound: BoundSpec = basic_op_ctxs[0].bound
        if linear.reduced:
            return bound
        style = ROW_SP if isinstance(reduction, ReduceScatter) else ROW
        return with_style(bound, style, reduction.group_of(basic_op_ctxs[1]))

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return obstacle(self.bound(basic_op_ctxs), which)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        linear, reduction, *bias = self.basic_ops
        reduction.keep_group(basic_op_ctxs[1])
        biases = bias[0].biases_for(basic_op_ctxs[2]) if bias else None
        y = linear.multiply(basic_op_ctxs[0], input_, self.bound(basic_op_ctxs), biases)[0]
        if not linear.reduced:
            y = with_leading_dims(y, input_.shape)
        return y, [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        linear, _, *bias = self.basic_ops
        of_bias: list[Any] = []
        if bias:
            grad_output, bias_grads = bias[0].op_backward(basic_op_ctxs[2], grad_output)
            of_bias = [bias_grads]
        dx, of_weights = linear.differentiate(basic_op_ctxs[0], grad_output, self.bound(basic_op_ctxs))
        return dx, [of_weights, (), *of_bias], [()] * len(self.basic_ops)


def why_not(linear: Any, reduction: Any, bias: Any = None) -> str | None:
    """Return the reason why a linear that sums over ranks would change results or is not possible; None: results are bitwise
    equal."""
    spec = linear.planned_spec
    if linear.reduced:
        over_tp = reduction.process_group is spec.tp_group
        return None if over_tp else "the group of the sum differs from the group that shards the weight"
    if len(spec.members) > 1:
        return "the linear has several siblings"
    if spec.recipe.y is not None:
        return "the recipe quantizes y before the sum"
    return reduction.obstacle_to_fusion(spec)


for _reduction in (AllReduce, ReduceScatter):
    register_forward_backward_fusion(Pattern(ReducedLinear, BasicLinear, _reduction, maybe(Bias), obstacle=why_not))
