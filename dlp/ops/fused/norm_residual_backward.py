"""Fuse in backward: MakeExtraOutput, RMSNorm. The backward kernel of the norm adds the gradient of the extra output to dx."""

from __future__ import annotations

from collections.abc import Sequence

from dlp.ops.basic.arithmetic import MakeExtraOutput
from dlp.ops.basic.norms import RMSNorm
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, register_backward_fusion
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import LAZY, Grads, Value


class BackwardNormResidual(InnerFused):
    """Backward of an RMSNorm that adds the gradient of the extra output."""

    takes = frozenset({LAZY})

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        norm, extra = self.basic_ops[1], basic_op_grad_extra_outputs[0][0]
        dx, of_weight = norm.op_backward(basic_op_ctxs[1], grad_output, residual=extra)
        return dx, [(), of_weight], [(), ()]


register_backward_fusion(Pattern(BackwardNormResidual, MakeExtraOutput, RMSNorm))
