"""Fuse in forward: BasicLinear, Bias. The GEMM adds the bias to its fp32 sums, so y is rounded once instead of twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.ops.basic.bias import Bias
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, register_forward_fusion
from dlp.ops.linear import BasicLinear
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, MANY, Value


class ForwardLinearBias(InnerFused):
    """Linear whose GEMM adds the bias."""

    takes = frozenset({LAZY, MANY, HANDED})

    def obstacle(self, basic_op_ctxs: Sequence[OperationContext], which: str) -> str:
        return self.basic_ops[0].obstacle(basic_op_ctxs[:1], which)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        linear, bias = self.basic_ops
        ys = linear.multiply(basic_op_ctxs[0], input_, basic_op_ctxs[0].bound, bias.biases_for(basic_op_ctxs[1]))
        return (ys if len(ys) > 1 else ys[0]), [(), ()]


def why_not(linear: Any, bias: Any) -> str | None:
    """Return the reason why the GEMM cannot add the bias; None: it can."""
    if len(bias.where) != len(linear.core.members):
        return "the number of biases differs from the number of siblings"
    if linear.planned_spec.recipe.y is not None:
        return "the recipe quantizes y before the bias is added"
    return None


register_forward_fusion(Pattern(ForwardLinearBias, BasicLinear, Bias, obstacle=why_not))
