"""Activations act(x), and gates act(gate) * up, where gate and up are siblings or the halves of one tensor.

    GELU (tanh), QGELU, ReLU, SiLU, SReLU          act(x)
    SwiGLU, GEGLU, QGEGLU, ReGLU, SReGLU, GLU      act(gate) * up with SiLU, GELU, QGELU, ReLU, SReLU, sigmoid
    ClampedSwiGLU                                  a SwiGLU with clamped gate and up

Except for ClampedSwiGLU, forward and backward return lazy matrices (`dlp.kernels.lazy_activations`), which the next cast may
compute. The backward of a gate whose input is one tensor stores the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.launches import by_torch
from dlp.kernels.reference import ACTIVATIONS
from dlp.ops.context import OperationContext
from dlp.ops.op import BasicOperation
from dlp.ops.values import LAZY, MANY, Tensors, Value, each, one_tensor, rows_of, tensor_of
from dlp.quant.recipe import Operand


class _Activation(BasicOperation):
    """Base of the activations. act: name of the function in `dlp.kernels.reference.ACTIVATIONS`."""

    act: str
    takes = frozenset({LAZY})
    launches = True
    in_casts = False

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        x = tensor_of(input_)
        ctx.save_for_backward(x)
        return ops.Produced(ops.Activated(rows_of(x), self.act), x.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        (x,) = ctx.saved_tensors
        return ops.Produced(ops.ActivationGrad(rows_of(grad_output), rows_of(x), self.act), x.shape), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        return ACTIVATIONS[self.act](x.float())[0].to(x.dtype)


class GELU(_Activation):
    """Compute GELU with the tanh approximation: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.GELU()(torch.zeros(2))
        tensor([0., 0.])
    """

    act = "gelu"


class QGELU(_Activation):
    """Compute x / (1 + exp(-1.702 x)), the sigmoid approximation of GELU.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.QGELU()(torch.zeros(2))
        tensor([0., 0.])
    """

    act = "qgelu"


class ReLU(_Activation):
    """Compute max(x, 0).

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    act = "relu"


class SiLU(_Activation):
    """Compute x / (1 + exp(-x)).

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.SiLU()(torch.zeros(2))
        tensor([0., 0.])
    """

    act = "silu"


class SReLU(_Activation):
    """Compute max(x, 0)^2.

    Shape:
        - input, output: [...]

    Examples:
        >>> ops.SReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 4.])
    """

    act = "srelu"


def _joined(*halves: Tensor, out: Tensor) -> None:
    torch.cat(halves, dim=-1, out=out)


class _Gate(BasicOperation):
    """Base of the gates. act: name of the function that is applied to gate, in `dlp.kernels.reference.ACTIVATIONS`."""

    act: str
    takes = frozenset({LAZY, MANY})
    launches = True
    in_casts = False

    def halves(self, input_: Value) -> tuple[Tensor, Tensor]:
        """Return gate and up, each [..., F]: the two siblings, or the halves of one tensor [..., 2 F]. Raises ValueError for
        more than two tensors, siblings of different shapes, and an odd number of features."""
        values = each(input_)
        if len(values) == 2:
            gate, up = tensor_of(values[0]), tensor_of(values[1])
            if gate.shape != up.shape:
                raise ValueError(
                    f"{type(self).__name__}: gate is {tuple(gate.shape)} and up {tuple(up.shape)}: pass siblings of "
                    f"equal shape"
                )
            return gate, up
        if len(values) != 1:
            raise ValueError(
                f"{type(self).__name__}: expected (gate, up), or one tensor with both halves; got {len(values)} tensors"
            )
        x = tensor_of(values[0])
        if x.shape[-1] % 2:
            raise ValueError(
                f"{type(self).__name__}: the input is split into halves, gate and up; got {x.shape[-1]} features: pass "
                f"siblings, Linear(in_features, (gate, up))"
            )
        gate, up = x.chunk(2, dim=-1)
        return gate, up

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        gate, up = self.halves(input_)
        ctx.many = isinstance(input_, tuple)
        ctx.save_for_backward(*((gate, up) if ctx.many else (tensor_of(input_),)))
        pair = rows_of(gate), rows_of(up)
        lazy = ops.Gated(*pair) if self.act == "silu" else ops.GatedBy(*pair, self.act)
        return ops.Produced(lazy, gate.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        saved = ctx.saved_tensors
        gate, up = self.halves(saved if ctx.many else saved[0])
        both = ops.GatedGrads(rows_of(grad_output), rows_of(gate), rows_of(up), self.act)  # computed when first read
        grads = ops.Produced(ops.GatedGrad(both, 0), gate.shape), ops.Produced(ops.GatedGrad(both, 1), up.shape)
        if ctx.many:
            return grads, ()
        dx = torch.empty_like(rows_of(saved[0]), memory_format=torch.contiguous_format)
        return by_torch(_joined, dx, *[rows_of(grad.tensor()) for grad in grads]).view(saved[0].shape), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        gate, up = self.halves(x)
        return (ACTIVATIONS[self.act](gate.float())[0] * up.float()).to(gate.dtype)


class SwiGLU(_Gate):
    """Compute silu(gate) * up.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.Sequential(ops.Linear(64, (128, 128)), ops.SwiGLU())(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    act = "silu"
    in_casts = True


class GEGLU(_Gate):
    """Compute gelu(gate) * up, with the tanh approximation of GELU.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.Sequential(ops.Linear(64, (128, 128)), ops.GEGLU())(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    act = "gelu"


class QGEGLU(_Gate):
    """Compute gate * sigmoid(1.702 gate) * up.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.QGEGLU()(torch.randn(16, 128)).shape
        torch.Size([16, 64])
    """

    act = "qgelu"


class ReGLU(_Gate):
    """Compute relu(gate) * up.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.ReGLU()(torch.randn(16, 128)).shape
        torch.Size([16, 64])
    """

    act = "relu"


class SReGLU(_Gate):
    """Compute relu(gate)^2 * up.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.SReGLU()(torch.randn(16, 128)).shape
        torch.Size([16, 64])
    """

    act = "srelu"


class GLU(_Gate):
    """Compute sigmoid(gate) * up.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for more than two tensors, siblings of different shapes, or an odd number of features.

    Examples:
        >>> ops.GLU()(torch.randn(16, 128)).shape
        torch.Size([16, 64])
    """

    act = "sigmoid"


class ClampedSwiGLU(_Gate):
    """Compute g * sigmoid(alpha * g) * (u + glu_linear_offset), with g = min(gate, limit) and u = clamp(up, -limit, limit).

    Args:
        limit: upper bound of gate, and bound of the magnitude of up.
        alpha: factor inside the sigmoid.
        glu_linear_offset: constant added to u.

    Shape:
        - input: siblings (gate [..., F], up [..., F]), or one tensor [gate, up] of [..., 2 F]
        - output: [..., F]

    Raises:
        ValueError: for a limit that is not positive, more than two tensors, siblings of different shapes, or an odd number of
            features.

    Examples:
        >>> ops.ClampedSwiGLU(limit=7.0)(torch.randn(16, 128)).shape
        torch.Size([16, 64])
    """

    launches = False  # computes by operations of torch, which a replay of launches would not repeat
    settings = "limit", "alpha", "glu_linear_offset"

    def __init__(self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> None:
        super().__init__()
        if limit <= 0:
            raise ValueError(f"ClampedSwiGLU: limit must be positive; got {limit}")
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        gate, up = self.halves(input_)
        ctx.many, ctx.how = isinstance(input_, tuple), (self.limit, self.alpha, self.glu_linear_offset)
        ctx.save_for_backward(*((gate, up) if ctx.many else (tensor_of(input_),)))
        return self.plain((gate, up))

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        saved, (limit, alpha, offset) = ctx.saved_tensors, ctx.how
        gate, up = self.halves(saved if ctx.many else saved[0])
        dh, g, u = tensor_of(grad_output).float(), gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        s = torch.sigmoid(alpha * g)
        slope = s * (1 + alpha * g * (1 - s))
        dgate = torch.where(gate.float() <= limit, dh * (u + offset) * slope, 0).to(gate.dtype)
        dup = torch.where(up.float().abs() <= limit, dh * g * s, 0).to(gate.dtype)
        return ((dgate, dup) if ctx.many else torch.cat((dgate, dup), dim=-1)), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        gate, up = self.halves(x)
        g, u = gate.float().clamp(max=self.limit), up.float().clamp(-self.limit, self.limit)
        return (g * torch.sigmoid(self.alpha * g) * (u + self.glu_linear_offset)).to(gate.dtype)
