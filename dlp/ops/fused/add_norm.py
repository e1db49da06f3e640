"""Fuse in forward: AddExtraInput, MakeExtraOutput (optional), RMSNorm.

The kernel that computes rstd of the norm also adds input and extra input, and writes the sum. If the dtypes of input and extra
input differ, torch adds them before the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import AddedNormed
from dlp.ops.basic.arithmetic import AddExtraInput, MakeExtraOutput
from dlp.ops.basic.norms import RMSNorm
from dlp.ops.context import OperationContext
from dlp.ops.fusions import Pattern, maybe, register_forward_fusion
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import Value, rows_of


class ForwardAddNorm(InnerFused):
    """RMSNorm that first adds the extra input."""

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        add, *branch, norm = self.basic_ops
        extra = basic_op_extra_inputs[0][0]
        assert extra is not None
        add.check(input_.shape, extra)
        norm.check_tokens(input_)
        if extra.dtype != input_.dtype:
            total = input_ + extra
            y = norm.op_forward(basic_op_ctxs[-1], total)
            return y, [(), *[(total,) for _ in branch], ()]
        norm.check(input_)
        lazy = AddedNormed(rows_of(input_), rows_of(extra), norm.scale_by_launch(), norm.eps)
        y = norm.normed(basic_op_ctxs[-1], lazy, input_.shape)
        extras: list[Any] = [(_LazySum(lazy, input_.shape),) for _ in branch]
        return y, [(), *extras, ()]


class _LazySum:
    """The sum in an `AddedNormed`, as an extra output [..., C]. It is read after all ops have run, when the norm has written
    it."""

    def __init__(self, normed: AddedNormed, shape: Sequence[int]) -> None:
        self.normed, self.shape = normed, shape

    def tensor(self) -> Tensor:
        return self.normed.matrix.view(self.shape)


def why_not(add: Any, *rest: Any) -> str | None:
    """Return the reason why the kernel of the norm cannot add the extra input; None: it can."""
    return "in_place=True writes the sum to the extra input" if add.in_place else None


register_forward_fusion(Pattern(ForwardAddNorm, AddExtraInput, maybe(MakeExtraOutput), RMSNorm, obstacle=why_not))
