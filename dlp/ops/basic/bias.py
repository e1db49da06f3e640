"""Bias: y = x + bias, of one tensor or of several siblings. ReturnedBias: y = x, and the bias as an extra output, for whoever
adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlp.kernels.launches import by_torch
from dlp.kernels.ops import Produced, Summed, rounded, stored
from dlp.ops.op import BasicOperation, Extras
from dlp.ops.values import HANDED, LAZY, MANY, Value, each, is_handed, joined, rows_of, tensor_of
from dlp.parallel.linear.modules import parameter_is_gone
from dlp.parallel.weight.local import held


class _Vectors(BasicOperation):
    """Vectors of this op, or of a linear. `where`: the module and the name of each."""

    where: Sequence[tuple[Any, str]]

    @classmethod
    def of(cls, linear: Any) -> Self:
        """Those of a `Linear`, whose parameters it reads."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        vars(made)["where"] = tuple((member.module, member.bias) for member in linear.core.members)
        return made

    def op_parameters(self) -> Sequence[Tensor]:
        try:
            return [module._parameters[name] for module, name in self.where]
        except KeyError as missing:
            parameter_is_gone(type(self).__name__, missing.args[0])

    def biases(self) -> list[Tensor]:
        """What this rank has of them."""
        return [held(parameter) for parameter in self.op_parameters()]

    def begin_sum(self, ctx: Any) -> list[Tensor]:
        """The vectors, that somebody adds."""
        biases = self.biases()
        ctx.dtypes = [bias.dtype for bias in biases]
        return biases


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return by_torch(torch.add, torch.empty_like(x), x, rounded(bias, x.dtype))


class Bias(_Vectors):
    """x [..., size] + bias [size]. Backward takes the sums of columns in the cast behind it, where one follows."""

    takes = frozenset({LAZY, MANY, HANDED})
    launches = none_grads = True
    looked_through = ("grad_output_quantizer",)

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        vars(self)["where"] = ((self, "bias"),)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def op_forward(self, ctx: Any, input_: Value, **quantizers: Any) -> Value:
        values, biases = [one.tensor() if is_handed(one) else one for one in each(input_)], self.begin_sum(ctx)
        if len(values) != len(biases):
            raise ValueError(f"Bias: it has {len(biases)} vectors and is given {len(values)} tensors")
        for one, bias in zip(values, biases, strict=True):
            if one.shape[-1:] != bias.shape:
                raise ValueError(f"Bias: it has {bias.shape[0]} features and is given a tensor {tuple(one.shape)}")
        return joined([_biased(tensor_of(one), bias) for one, bias in zip(values, biases, strict=True)], input_)

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
            passed.append(grad if is_handed(grad) else Produced(summed, grad.shape))
        return joined(passed, grad_output), sums

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        biases = self.op_parameters()
        return joined([one + bias.to(one.dtype) for one, bias in zip(each(x), biases, strict=True)], x)


class ReturnedBias(_Vectors):
    """Of a `Linear(return_bias=True)`: an extra output for each vector, in the dtype of x and in memory of its own."""

    takes = frozenset({LAZY, MANY, HANDED})
    none_grads = True

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        return len(self.where)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[Any], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        dtype = each(input_)[0].dtype
        return input_, [[bias.to(dtype, copy=True) for bias in self.begin_sum(basic_op_ctxs[0])]]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[Any], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Sequence[Sequence[Any]], Sequence[Sequence[Any]]]:
        grads = zip(basic_op_grad_extra_outputs[0], basic_op_ctxs[0].dtypes, strict=True)
        return grad_output, [[None if grad is None else grad.to(dtype) for grad, dtype in grads]], [()]

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        core = self.where[0][0].core
        return x, *[core.bias_for(i, y) for i, y in enumerate(each(x))]


class Later:
    """The sums of the columns of a gradient, taken in its cast where that is one that takes them, else now."""

    def __init__(self, summed: Any, dtype: torch.dtype) -> None:
        self.summed, self.wanted = summed, dtype

    def tensor(self) -> Tensor:
        return rounded(self.summed.sums(), self.wanted)
