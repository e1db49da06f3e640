"""Bias: y = x + bias, of one tensor or of several siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlp.kernels.ops import Summed, rounded, stored
from dlp.ops.op import BasicOperation
from dlp.ops.values import LAZY, MANY, Produced, Value, each, joined, rows_of, tensor_of
from dlp.parallel.weight.local import held


class Bias(BasicOperation):
    """x [..., size] + bias [size]. Backward takes the sums of columns in the cast behind it, where one follows."""

    takes = frozenset({LAZY, MANY})
    launches = True

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        self.owner, self.names = None, ("bias",)

    @classmethod
    def of(cls, linear: Any) -> Bias:
        """That of a `Linear`, whose parameters it reads."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        vars(made).update(owner=linear, names=tuple(member.bias for member in linear.core.members))
        return made

    def op_parameters(self) -> Sequence[Tensor]:
        owner = self.owner or self
        return [owner._parameters[name] for name in self.names]  # type: ignore[misc]

    def biases(self) -> list[Tensor]:
        """What this rank has of them."""
        return [held(parameter) for parameter in self.op_parameters()]

    def can_launch(self, ctx: Any, which: str) -> bool:
        return which == "backward"  # the sum itself is torch's

    def begin_sum(self, ctx: Any) -> list[Tensor]:
        """The vectors, that somebody adds."""
        biases = self.biases()
        ctx.dtypes = [bias.dtype for bias in biases]
        return biases

    def op_forward(self, ctx: Any, input_: Value, **quantizers: Any) -> Value:
        values, biases = each(input_), self.begin_sum(ctx)
        if len(values) != len(biases):
            raise ValueError(f"Bias: it has {len(biases)} vectors and is given {len(values)} tensors")
        return joined([(x := tensor_of(one)) + b.to(x.dtype) for one, b in zip(values, biases, strict=True)], input_)

    def op_backward(self, ctx: Any, grad_output: Value, *, made: bool = False) -> tuple[Value, Sequence[Any]]:
        """`made`: a cast may make the gradient and its sums in one read; else it is stored before."""
        grads, sums, passed = each(grad_output), list[Any](), list[Any]()
        for grad, dtype in zip(grads, ctx.dtypes, strict=True):
            if grad is None:
                sums.append(None)
                passed.append(None)
                continue
            rows = rows_of(grad)
            summed = Summed(rows if made else stored(rows))
            sums.append(Later(summed, dtype))
            passed.append(Produced(summed, grad.shape))
        return joined(passed, grad_output), sums

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        biases = self.op_parameters()
        return joined([one + bias.to(one.dtype) for one, bias in zip(each(x), biases, strict=True)], x)


class Later:
    """The sums of the columns of a gradient, taken in its cast where that is one that takes them, else now."""

    def __init__(self, summed: Any, dtype: torch.dtype) -> None:
        self.summed, self.wanted = summed, dtype

    def tensor(self) -> Tensor:
        return rounded(self.summed.sums(), self.wanted)
