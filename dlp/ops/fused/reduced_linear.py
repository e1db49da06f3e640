"""Forward and backward: BasicLinear, AllReduce or ReduceScatter, Bias?, of a row-parallel `Linear` or of a user's model.

The fused op runs as ROW or ROW_SP of the style table, with the overlap of this style. The bias is added once, after the sum.
Backward gathers quantized dy; separate ops gather dy in high precision. The bits are equal, since ranks agree on scales. A
user's AllReduce or ReduceScatter is fused after a linear that is not sharded over ranks.
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
    takes = frozenset({LAZY, HANDED})

    def bound(self, basic_op_ctxs: Sequence[OperationContext]) -> BoundSpec:
        """The spec as ROW or ROW_SP: the spec of the linear, or a spec over the group of the reduction in this forward."""
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
    """Reason why the linear cannot sum over ranks with equal bits; None: it can."""
    spec = linear.planned_spec
    if linear.reduced:
        over_tp = reduction.process_group is spec.tp_group
        return None if over_tp else "the group of the sum differs from the group that shards the weight"
    if len(spec.members) > 1:
        return "several siblings"
    if spec.recipe.y is not None:
        return "the recipe quantizes y before the sum"
    return reduction.obstacle_to_fusion(spec)


for _reduction in (AllReduce, ReduceScatter):
    register_forward_backward_fusion(Pattern(ReducedLinear, BasicLinear, _reduction, maybe(Bias), obstacle=why_not))
