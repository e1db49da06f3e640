"""Both directions: a row-parallel Linear, what sums its result over tp, and its Bias: one row of the style table, with its
overlap. The bias comes behind the sum, once. Backward gathers dy quantized where the ops alone gather it as it is: the bits
are equal, since scales are agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlp.ops.basic.bias import Bias
from dlp.ops.basic.communication import AllReduce, ReduceScatter
from dlp.ops.fusions import Pattern, maybe, register_forward_backward_fusion
from dlp.ops.linear import BasicLinear
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, Value
from dlp.parallel.linear.capture import obstacle


class ReducedLinear(InnerFused):
    takes = frozenset({LAZY, HANDED})

    def obstacle(self, basic_op_ctxs: Sequence[Any], which: str) -> str:
        return obstacle(basic_op_ctxs[0].bound, which)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[Any], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Any]]:
        linear, _, *bias = self.basic_ops
        biases = bias[0].begin_sum(basic_op_ctxs[2]) if bias else None
        return linear.multiply(basic_op_ctxs[0], input_, basic_op_ctxs[0].bound, biases)[0], [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Sequence[Any], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Sequence[Any], Sequence[Any]]:
        linear, _, *bias = self.basic_ops
        of_bias: list[Any] = []
        if bias:
            grad_output, its = bias[0].op_backward(basic_op_ctxs[2], grad_output)
            of_bias = [its]
        dx, of_weights = linear.differentiate(basic_op_ctxs[0], grad_output, basic_op_ctxs[0].bound)
        return dx, [of_weights, (), *of_bias], [()] * len(self.basic_ops)


def why_not(linear: Any, reduction: Any, bias: Any = None) -> str | None:
    if not linear.reduced or reduction.process_group is not linear.core.spec.tp_group:
        return "the sum is not over the ranks that its weight is cut over"
    return None


for _reduction in (AllReduce, ReduceScatter):
    register_forward_backward_fusion(Pattern(ReducedLinear, BasicLinear, _reduction, maybe(Bias), obstacle=why_not))
