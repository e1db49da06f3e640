"""Forward: AddExtraInput, MakeExtraOutput?, RMSNorm. The sum is made, and kept, in the read that takes the rows' squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlp.kernels.ops import AddedNormed
from dlp.ops.basic.arithmetic import AddExtraInput, MakeExtraOutput
from dlp.ops.basic.norms import RMSNorm
from dlp.ops.fusions import Pattern, maybe, register_forward_fusion
from dlp.ops.op import Extras, InnerFused
from dlp.ops.values import Value, rows_of


class ForwardAddNorm(InnerFused):
    def fuser_forward(
        self, basic_op_ctxs: Sequence[Any], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Any]]]:
        add, *kept, norm = self.basic_ops
        extra = basic_op_extra_inputs[0][0]
        assert extra is not None
        add.check(input_, extra)
        norm.check_tokens(input_)
        if extra.dtype != input_.dtype:
            total = input_ + extra
            y = norm.op_forward(basic_op_ctxs[-1], total)
            return y, [(), *[(total,) for _ in kept], ()]
        norm.check(input_)
        made = AddedNormed(rows_of(input_), rows_of(extra), norm.scale_made(), norm.eps)
        y = norm.normed(basic_op_ctxs[-1], made, input_.shape)
        return y, [(), *[(_Sum(made, input_.shape),) for _ in kept], ()]


class _Sum:
    """That of an `AddedNormed`, once its cast has made it."""

    def __init__(self, made: AddedNormed, shape: Sequence[int]) -> None:
        self.made, self.shape = made, shape

    def tensor(self) -> Tensor:
        return self.made.matrix.view(self.shape)


def why_not(add: Any, *rest: Any) -> str | None:
    return "the sum is written to the extra input" if add.in_place else None


register_forward_fusion(Pattern(ForwardAddNorm, AddExtraInput, maybe(MakeExtraOutput), RMSNorm, obstacle=why_not))
