"""Fuse in backward: BasicLinear, ConstantScale. dy is cast unscaled, and dgrad and wgrad scale their fp32 sums, which saves one
rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlp.ops.basic.arithmetic import ConstantScale
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, register_backward_fusion
from dlp.ops.linear import BasicLinear
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, MANY, Grads, Value
from dlp.parallel.linear.functional import Finish


class BackwardScaledLinear(InnerFused):
    """Backward of a linear and a scale, which dgrad and wgrad apply."""

    takes = frozenset({LAZY, MANY, HANDED})

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        linear, scale = self.basic_ops
        dx, of_weights = linear.differentiate(
            basic_op_ctxs[0], grad_output, basic_op_ctxs[0].bound, Finish(scale.scale_of(basic_op_ctxs[1]))
        )
        return dx, [of_weights, ()], [(), ()]


def why_not(linear: Any, scale: Any) -> str | None:
    """Return the reason why dgrad and wgrad cannot apply the scale; None: they can."""
    if len(linear.core.members) > 1 or linear.planned_spec.options.delay_wgrad:
        return "the linear has siblings, or its wgrad is delayed"
    return None


register_backward_fusion(Pattern(BackwardScaledLinear, BasicLinear, ConstantScale, obstacle=why_not))
