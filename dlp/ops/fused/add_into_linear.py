"""Fuse in forward: BasicLinear, Bias (optional), ConstantScale (optional), AddExtraInput(in_place=True).

The GEMM scales its fp32 sums and adds them to the extra input, so y is rounded once; separate ops would round several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlp.kernels.launches import by_torch
from dlp.ops.basic.arithmetic import AddExtraInput, ConstantScale
from dlp.ops.basic.bias import Bias
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, maybe, register_forward_fusion
from dlp.ops.linear import BasicLinear
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import HANDED, LAZY, Value, share_bytes, tensor_of
from dlp.parallel.linear.functional import Finish


class LinearIntoExtraInput(InnerFused):
    """Linear whose GEMM adds y to the extra input, in place. If the extra input shares memory with x, is not contiguous, or has
    another dtype than x, torch adds y instead."""

    takes = frozenset({LAZY, HANDED})

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        linear, *between, add = self.basic_ops
        ctx, extra = basic_op_ctxs[0], basic_op_extra_inputs[-1][0]
        assert extra is not None
        biases, alpha = None, 1.0
        for op, op_ctx in zip(between, basic_op_ctxs[1:], strict=False):
            if isinstance(op, Bias):
                biases = op.biases_for(op_ctx)
            else:
                alpha = op.scale_for(op_ctx)
        add.check(_y_shape(ctx, input_), extra)
        overwrites_x = isinstance(input_, Tensor) and share_bytes(input_, extra)
        if overwrites_x or not extra.is_contiguous() or extra.dtype != input_.dtype:
            y = tensor_of(linear.multiply(ctx, input_, ctx.bound, biases, Finish(alpha))[0])
            by_torch(torch.add, extra, extra, y)
        else:
            linear.multiply(ctx, input_, ctx.bound, biases, Finish(alpha, extra.view(-1, extra.shape[-1])))
        basic_op_ctxs[-1].mark_dirty(extra)
        return extra, [()] * len(self.basic_ops)


def _y_shape(ctx: OperationContext, x: Value) -> Sequence[int]:
    """Return the shape of y: [..., N] with the leading dimensions of x; [tokens, N] if the linear gathers tokens."""
    spec, features = ctx.bound.spec, ctx.pass_tensors[0][0].shape[0]
    return (*x.shape[:-1], features) if spec.style.gathers is None else (x.shape[0] * spec.tp, features)


def why_not(linear: Any, *behind: Any) -> str | None:
    """Return the reason why the GEMM cannot add y to the extra input; None: it can."""
    spec, kinds = linear.planned_spec, [type(op) for op in behind]
    if not behind[-1].in_place:
        return "without in_place=True the sum needs separate memory"
    if len(linear.core.members) > 1:
        return "the linear has several siblings"
    if spec.style.fprop.reduce is not None and spec.tp > 1:
        return "y is summed over tp before the extra input is added"
    if spec.recipe.y is not None or spec.recipe.fprop.out_dtype is not None:
        return "the recipe quantizes y or sets the dtype of y"
    if ConstantScale in kinds and Bias in kinds:
        return "the scale would have to multiply the bias, too"
    if linear.pads:
        return "the recipe pads out_features"
    return None


register_forward_fusion(
    Pattern(LinearIntoExtraInput, BasicLinear, maybe(Bias), maybe(ConstantScale), AddExtraInput, obstacle=why_not),
    prepend=True,
)
