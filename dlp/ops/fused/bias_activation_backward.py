"""Fuse in backward: Bias, then an activation (in forward order).

One kernel reads dy and the activation's input x, computes dx, sums the columns of dx (db), and casts dx for the previous
linear."""

from __future__ import annotations

from collections.abc import Sequence

from dlp.ops.basic.activations import GELU, ReLU, SiLU, SReLU
from dlp.ops.basic.bias import Bias
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, register_backward_fusion
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import LAZY, Grads, Value


class BackwardBiasActivation(InnerFused):
    """Backward of a bias and an activation, whose gradient stays lazy until the next cast."""

    takes = frozenset({LAZY})

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        bias, activation = self.basic_ops
        dx, _ = activation.op_backward(basic_op_ctxs[1], grad_output)
        dx, sums = bias.op_backward(basic_op_ctxs[0], dx, lazy=True)
        return dx, [sums, ()], [(), ()]


for _activation in (GELU, ReLU, SiLU, SReLU):
    register_backward_fusion(Pattern(BackwardBiasActivation, Bias, _activation))
