"""Ops without GEMM: add an extra input, return an extra output, scale, dropout, reshape, identity.

AddExtraInput     x, extra -> x + extra             backward: dy to both
MakeExtraOutput   x -> x, and x as an extra output  backward: the sum of both gradients
ConstantScale     x -> scale * x
Dropout           x -> x * mask / (1 - p)           in eval mode: x -> x
Reshape           x -> x.reshape(shape)
Identity          x -> x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels.launches import by_torch
from dlp.ops.context import OperationContext
from dlp.ops.op import BasicOperation, Extras
from dlp.ops.values import HANDED, LAZY, MANY, Grads, Tensors, Value, one_tensor
from dlp.quant.recipe import Operand


def added(x: Tensor, other: Tensor) -> Tensor:
    """Return x + other in new memory, computed by torch through `by_torch`, so that the pass can be captured."""
    return by_torch(torch.add, torch.empty_like(x, dtype=torch.result_type(x, other)), x, other)


class AddExtraInput(BasicOperation):
    """Add an extra input to the input.

    Args:
        in_place: write the sum into the extra input. The former values are lost: no other code may need them.

    Shape:
        - input, extra input, output: [...], equal shapes

    Raises:
        ValueError: for different shapes, and with in_place=True, if gradients are enabled, for an extra input
            that is a leaf and requires a gradient.

    Examples:
        >>> model = ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput())
        >>> x, residual = torch.randn(16, 64), torch.randn(16, 64)
        >>> model(x, residual).shape
        torch.Size([16, 64])
    """

    num_extra_inputs = 1
    launches = True
    settings = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def check(self, shape: Sequence[int], extra: Tensor) -> None:
        """Raise ValueError for an extra input whose shape differs from `shape`, the shape of the input, and for a leaf that
        needs a gradient but would be written to."""
        if tuple(extra.shape) != tuple(shape):
            raise ValueError(f"AddExtraInput: the input is {tuple(shape)} and the extra input {tuple(extra.shape)}")
        if self.in_place and extra.requires_grad and extra.is_leaf and torch.is_grad_enabled():
            raise ValueError(
                "AddExtraInput(in_place=True) would write to a leaf that needs a gradient: set in_place=False"
            )

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras,
        basic_op_kwargs: Sequence[Mapping[str, Any]], **quantizers: Operand | None,
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        extra = basic_op_extra_inputs[0][0]
        assert extra is not None
        self.check(input_.shape, extra)
        if not self.in_place:
            return added(input_, extra), [()]
        basic_op_ctxs[0].mark_dirty(extra)
        return by_torch(torch.add, extra, extra, input_), [()]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        return grad_output, [()], [(grad_output,)]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        self.check(x.shape, extra_inputs[0])
        return x + extra_inputs[0]


class MakeExtraOutput(BasicOperation):
    """Return the input as the output and as an extra output; backward adds both gradients.

    Args:
        in_place: write the sum of the gradients into the gradient of the extra output. Its former values are lost: no other
            code may need them. If autograd passes the same gradient tensor for another output, too, new memory is used.

    Shape:
        - input, output, extra output: [...]

    Examples:
        >>> y, residual = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(64, 128))(torch.randn(16, 64))
        >>> y.shape, residual.shape
        (torch.Size([16, 128]), torch.Size([16, 64]))
    """

    num_extra_outputs = 1
    none_grads = True
    launches = True
    settings = ("in_place",)
    takes = frozenset({LAZY})

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def fuser_forward(
        self, basic_op_ctxs: Sequence[OperationContext], input_: Value, *, basic_op_extra_inputs: Extras,
        basic_op_kwargs: Sequence[Mapping[str, Any]], **quantizers: Operand | None,
    ) -> tuple[Value, Sequence[Sequence[Tensor]]]:  # fmt: skip
        basic_op_ctxs[0].in_place = self.in_place
        return input_, [(input_,)]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Value, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Value, Grads, Grads]:
        extra = basic_op_grad_extra_outputs[0][0]
        if extra is None:
            return grad_output, [()], [()]
        grad = grad_output if isinstance(grad_output, Tensor) else grad_output.tensor()
        into = (
            getattr(basic_op_ctxs[0], "in_place", self.in_place)
            and extra.data_ptr() not in basic_op_ctxs[0].shared_addresses
        )
        return by_torch(torch.add, extra, extra, grad) if into else added(grad, extra), [()], [()]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        return one_tensor(x), one_tensor(x)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return by_torch(partial(torch.mul, other=scale), torch.empty_like(x), x)


class ConstantScale(BasicOperation):
    """Multiply by a constant.

    Args:
        scale: the constant.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.ConstantScale(0.5)(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    launches = True
    settings = ("scale",)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return _scaled(input_, self.scale_for(ctx))

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return _scaled(grad_output, self.scale_of(ctx)), ()

    def scale_for(self, ctx: OperationContext) -> float:
        """Return the scale for this forward, and store it in ctx. Backward uses the stored scale, even if the attribute `scale`
        has changed."""
        ctx.scale = self.scale
        return self.scale

    def scale_of(self, ctx: OperationContext) -> float:
        """Return the scale of the forward of this context; the current `scale` if no scale is stored, because a user-defined
        fused op ran that forward."""
        scale: float = getattr(ctx, "scale", self.scale)
        return scale

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        return x * self.scale


class Dropout(BasicOperation):
    """In training, set each element to zero with probability p and multiply the others by 1 / (1 - p).

    Args:
        p: probability with which an element is set to zero.

    Shape:
        - input, output: [...]

    Raises:
        ValueError: for p outside [0, 1).

    Examples:
        >>> ops.Dropout(0.1)(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout: p must be at least 0 and less than 1; got {p}")
        self.p = p

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        if not self.training or self.p == 0:
            ctx.factor = None
            return input_
        ctx.factor, kept = 1 / (1 - self.p), torch.rand_like(input_, dtype=torch.float32) >= self.p
        ctx.save_for_backward(kept)
        return input_ * kept * ctx.factor

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return (grad_output if ctx.factor is None else grad_output * ctx.saved_tensors[0] * ctx.factor), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        return F.dropout(x, self.p, self.training)


class Reshape(BasicOperation):
    """Return x.reshape(shape).

    Args:
        shape: new shape; one size may be -1.

    Shape:
        - input: [...]
        - output: `shape`

    Examples:
        >>> ops.Reshape((-1, 32))(torch.randn(16, 64)).shape
        torch.Size([32, 32])
    """

    launches = True
    settings = ("shape",)

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        ctx.before = tuple(input_.shape)
        return input_.reshape(self.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return grad_output.reshape(ctx.before), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        return x.reshape(self.shape)


class Identity(BasicOperation):
    """Return the input.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.Identity()(torch.zeros(2))
        tensor([0., 0.])
    """

    takes = frozenset({LAZY, MANY, HANDED})
    launches = none_grads = True

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return grad_output, ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        return x
