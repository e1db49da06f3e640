"""Fuse in backward: MakeExtraOutput(in_place=True), BasicLinear.

The dgrad GEMM adds its fp32 sums to the gradient of the extra output, so dx is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlp.ops.basic.arithmetic import MakeExtraOutput
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, register_backward_fusion
from dlp.ops.linear import BasicLinear
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, MANY, Grads, Value
from dlp.parallel.linear.functional import NO_FINISH, Finish


class BackwardLinearIntoResidual(InnerFused):
    """Backward of a linear whose dgrad adds to the gradient of the extra output, in place. If autograd passes this gradient for
    another output, too, or if it is not contiguous or has another dtype than x, torch adds the two gradients."""

    takes = frozenset({LAZY, MANY, HANDED})

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        linear, ctx, extra = self.basic_ops[1], basic_op_ctxs[1], basic_op_grad_extra_outputs[0][0]
        in_place = extra is not None and extra.data_ptr() not in basic_op_ctxs[0].shared_addresses
        direct = (
            in_place and extra is not None and extra.is_contiguous() and extra.dtype == ctx.x_dtype and ctx.needs_dx
        )
        finish = Finish(into=extra.view(-1, extra.shape[-1])) if direct and extra is not None else NO_FINISH
        dx, of_weights = linear.differentiate(ctx, grad_output, ctx.bound, finish)
        if extra is not None and not direct:
            dx = extra if dx is None else extra.add_(dx) if in_place else extra + dx
        return dx, [(), of_weights], [(), ()]


def why_not(residual: Any, linear: Any) -> str | None:
    """Return the reason why dgrad cannot add to the gradient of the extra output; None: it can."""
    spec = linear.planned_spec
    if not residual.in_place:
        return "without in_place=True the sum needs separate memory"
    if linear.reduced:
        return "the linear is fused with the sum over tp"
    if spec.style.dgrad.reduce is not None and spec.tp > 1:
        return "dx is summed over tp before the gradient of the extra output is added"
    if (
        spec.recipe.dx is not None
        or spec.recipe.dgrad.out_dtype is not None
        or len(linear.core.members) > 1
        or linear.pads
        or spec.recipe.x.clips
    ):
        return "dx is changed after the GEMM (rounding, mask, padding or sum over siblings)"
    return None


register_backward_fusion(Pattern(BackwardLinearIntoResidual, MakeExtraOutput, BasicLinear, obstacle=why_not))
