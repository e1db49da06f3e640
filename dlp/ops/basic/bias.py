"""Bias: y = x + bias, for one tensor or for each sibling. ReturnedBias: y = x, and the bias is an extra output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlp.kernels.launches import by_torch
from dlp.kernels.ops import Produced, Summed, rounded, stored
from dlp.ops.context import OperationContext
from dlp.ops.handed import BIAS_SUMS, LayerOperand
from dlp.ops.op import BasicOperation, Extras
from dlp.ops.values import HANDED, LAZY, MANY, Grads, Tensors, Value, each, is_handed, like_tuple, rows_of, tensor_of
from dlp.parallel.linear.modules import parameter_is_gone
from dlp.parallel.weight.local import local_tensor
from dlp.quant.recipe import Operand


class _BiasVectors(BasicOperation):
    """Base of ops with bias vectors, which are parameters of this op or of a linear.

    where: for each vector, the module that has the parameter, and the name of the parameter.
    """

    where: Sequence[tuple[Any, str]]

    @classmethod
    def of(cls, linear: Any) -> Self:
        """Create an op that reads the biases of a `Linear`. They remain parameters of the `Linear`."""
        op = cls.__new__(cls)
        nn.Module.__init__(op)
        vars(op)["where"] = tuple((member.module, member.bias) for member in linear.core.members)
        return op

    def parameter_places(self) -> Sequence[tuple[Any, str]]:
        return self.where

    def op_parameters(self) -> Sequence[Tensor]:
        try:
            return [module._parameters[name] for module, name in self.where]
        except KeyError as missing:
            parameter_is_gone(type(self).__name__, missing.args[0])

    def biases(self) -> list[Tensor]:
        """Return this rank's bias vectors as plain tensors."""
        return [local_tensor(parameter) for parameter in self.op_parameters()]

    def biases_for(self, ctx: OperationContext) -> list[Tensor]:
        """Return this rank's bias vectors for a forward, and store their dtypes in ctx, for the gradients."""
        biases = self.biases()
        ctx.dtypes = [bias.dtype for bias in biases]
        return biases


def check_bias(bias: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError if the size of a bias differs from the number of features of `shape`, since torch would broadcast a bias
    of size 1."""
    if tuple(bias.shape) != tuple(shape[-1:]):
        raise ValueError(f"Bias: expected {bias.shape[0]} features; got a tensor of shape {tuple(shape)}")


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return by_torch(torch.add, torch.empty_like(x), x, rounded(bias, x.dtype))


class Bias(_BiasVectors):
    """Add a bias.

    Backward returns dy unchanged. If the previous operation casts dy, the kernel of this cast also sums the columns of dy. db
    is summed in fp32 and then rounded.

    Args:
        size: number of features.
        device: device of the bias.
        dtype: dtype of the bias.

    Shape:
        - input, output: [..., size]
        - bias: [size]

    Raises:
        ValueError: for an input with another number of features, and for a tuple of siblings whose length is not the number of
            biases.

    Examples:
        >>> ops.Bias(64)(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    takes = frozenset({LAZY, MANY, HANDED})
    launches = none_grads = True
    passes_through = ("grad_output_quantizer",)

    def passed(self, quantizers: Operand | None) -> Operand | None:
        """Return the quantizers of dy with an obstacle: dy must stay in high precision, since db is the sum of dy."""
        assert quantizers is None or isinstance(quantizers, LayerOperand)
        return None if quantizers is None else replace(quantizers, obstacle=BIAS_SUMS)

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        vars(self)["where"] = ((self, "bias"),)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        values, biases = [one.tensor() if is_handed(one) else one for one in each(input_)], self.biases_for(ctx)
        if len(values) != len(biases):
            raise ValueError(f"Bias: expected {len(biases)} tensors, one for each bias; got {len(values)}")
        for one, bias in zip(values, biases, strict=True):
            check_bias(bias, one.shape)
        return like_tuple([_biased(tensor_of(one), bias) for one, bias in zip(values, biases, strict=True)], input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Value, *, lazy: bool = False
    ) -> tuple[Value, Sequence[Tensor | None]]:
        """Return dy, and its column sums as lazy gradients of the biases.

        lazy: whether a lazy dy stays lazy, so that the next cast computes dy and the sums together; False: dy is stored first.
        """
        grads, sums, passed = each(grad_output), list[Any](), list[Any]()
        for grad, dtype in zip(grads, ctx.dtypes, strict=True):
            if grad is None:
                sums.append(None)
                passed.append(None)
                continue
            rows = rows_of(grad)
            summed = Summed(rows if lazy else stored(rows))
            sums.append(LazyBiasGrad(summed, dtype))
            passed.append(grad if is_handed(grad) else Produced(summed, grad.shape))
        return like_tuple(passed, grad_output), sums

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        biases = self.op_parameters()
        for one, bias in zip(each(x), biases, strict=True):
            check_bias(bias, one.shape)
        return like_tuple([one + bias.to(one.dtype) for one, bias in zip(each(x), biases, strict=True)], x)


class ReturnedBias(_BiasVectors):
    """Return x unchanged, and as extra outputs a copy of each bias of a `Linear(return_bias=True)`, in the dtype of x."""

    takes = frozenset({LAZY, MANY, HANDED})
    none_grads = True

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        return len(self.where)

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras, **rest: Any
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:
        dtype = each(input_)[0].dtype
        return input_, [[bias.to(dtype, copy=True) for bias in self.biases_for(basic_op_ctxs[0])]]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        grads = zip(basic_op_grad_extra_outputs[0], basic_op_ctxs[0].dtypes, strict=True)
        return grad_output, [[None if grad is None else grad.to(dtype) for grad, dtype in grads]], [()]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        core = self.where[0][0].core
        return x, *[core.bias_for(i, y) for i, y in enumerate(each(x))]


class LazyBiasGrad:
    """Gradient of a bias. It is read after the backward of all ops, because the cast of dy may compute it.

    summed: dy, with column sums; dtype: dtype of the bias.
    """

    def __init__(self, summed: Summed, dtype: torch.dtype) -> None:
        self.summed, self.dtype = summed, dtype

    def tensor(self) -> Tensor:
        """Return the gradient [size], rounded to the dtype of the bias."""
        return rounded(self.summed.sums(), self.dtype)
