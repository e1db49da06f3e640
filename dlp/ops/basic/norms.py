"""RMSNorm, LayerNorm and L2Normalization of x [..., C] over the last dimension, in fp32, rounded to the dtype of x.

RMSNorm and LayerNorm return a lazy matrix (`dlp.kernels.lazy_matrix`), which the cast of the next linear may compute. Backward
reads rstd and, for LayerNorm, mean of each row. The cast may compute rstd and mean, so they exist only after the forward of all
ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dlp.kernels import ops
from dlp.kernels.launches import by_torch
from dlp.ops.context import OperationContext
from dlp.ops.op import BasicOperation
from dlp.ops.values import LAZY, Tensors, Value, one_tensor, rows_of, tensor_of
from dlp.quant.recipe import Operand


def _widened(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x)


def _plus_one(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x).add_(1)


def _refuse_without(norm: nn.Module, parameter: str) -> NoReturn:
    """Raise ValueError for a parameter that is missing in a norm."""
    raise ValueError(
        f"{type(norm).__name__}: {parameter} is no longer a parameter of the op (torch.nn.utils.parametrize, "
        f"torch.nn.utils.prune and FSDP1 of torch remove parameters): use a module of torch for the norm, or "
        f"dlp.fully_shard instead of FSDP1"
    ) from None


class _Norm(BasicOperation):
    """Base of RMSNorm and LayerNorm.

    normalized_shape: C, or a sequence of length 1 with C; zero_centered_gamma: multiply by 1 + weight, computed in fp32. Raises
    ValueError for several normalized dimensions, and for an x with another number of features.
    """

    launches = True
    in_casts = True
    settings = "_eps", "zero_centered_gamma"
    takes = frozenset({LAZY})
    parameter_names: tuple[str, ...] = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter  # of LayerNorm

    def __init__(
        self, normalized_shape: int | Sequence[int], *, eps: float = 1e-5, zero_centered_gamma: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(normalized_shape, int) and len(normalized_shape) != 1:
            raise ValueError(
                f"{type(self).__name__} normalizes the last dimension; got normalized_shape {tuple(normalized_shape)}: "
                f"flatten the dimensions by ops.Reshape"
            )
        size = normalized_shape if isinstance(normalized_shape, int) else normalized_shape[0]
        self.size, self.eps, self.zero_centered_gamma = size, eps, zero_centered_gamma
        for name in self.parameter_names:
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, float(not self.zero_centered_gamma))
        if "bias" in self.parameter_names:
            nn.init.zeros_(self.bias)

    def op_parameters(self) -> Sequence[Tensor]:
        try:  # None if the user has set a parameter to None
            return [self._parameters[name] for name in self.parameter_names]  # type: ignore[misc]
        except KeyError as missing:
            _refuse_without(self, missing.args[0])

    @property
    def eps(self) -> float:
        return float(self._eps)

    @eps.setter
    def eps(self, value: float) -> None:
        """Store eps as text, since `torch.compile(dynamic=True)` would treat a float attribute as a variable."""
        self._eps = repr(float(value))

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps:g}{', zero_centered_gamma' * self.zero_centered_gamma}"

    def scale(self) -> Tensor:
        """Return the factor [C], weight or 1 + weight in fp32, as code that autograd differentiates."""
        return self.weight.float() + 1 if self.zero_centered_gamma else self.weight

    def scale_by_launch(self) -> Tensor:
        """Return `scale` inside a fuser: computed through `by_torch`, so that the pass can be captured, and without
        autograd."""
        weight = self.weight
        if not self.zero_centered_gamma:
            return weight
        return by_torch(_plus_one, torch.empty_like(weight, dtype=torch.float32), weight)

    def rows(self, input_: Value) -> Tensor:
        """Return x as a stored matrix [M, C]. Raises ValueError if C is not `size`."""
        self.check(input_)
        x: Tensor = ops.stored(rows_of(input_))
        return x

    def check(self, input_: Value) -> None:
        """Raise ValueError if the last dimension is not `size`."""
        if tuple(input_.shape[-1:]) != (self.size,):
            found = input_.shape[-1] if input_.shape else "no"
            raise ValueError(f"{type(self).__name__}: expected {self.size} features; got {found}")


def has_memory(x: Tensor) -> bool:
    """Whether x has memory: it is not traced, fake or meta. `plain` then runs the same kernels as a fuser even under a dispatch
    mode, so that results are bitwise equal to those of the fuser."""
    return not (torch.compiler.is_dynamo_compiling() or isinstance(x, FakeTensor) or x.is_meta)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm by kernels of dlp: x [..., C], weight [C] -> y [..., C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = rows_of(x)
        y, rstd = ops.rms_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, rstd = ctx.saved_tensors
        dx, dweight = ops.rms_norm_backward(rows_of(grads[0]), rows, weight, rstd)
        return dx.view(grads[0].shape), ops.rounded(dweight, weight.dtype), None


class _LayerNorm(torch.autograd.Function):
    """LayerNorm by kernels of dlp: x [..., C], weight and bias [C] -> y [..., C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = rows_of(x)
        normed = ops.LayerNormed(rows, weight, bias, eps)
        y: Tensor = normed.value
        ctx.save_for_backward(rows, weight, normed.mean, normed.rstd)
        ctx.bias_dtype = bias.dtype
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ops.layer_norm_backward(rows_of(grads[0]), rows, weight, mean, rstd)
        return dx.view(grads[0].shape), ops.rounded(dweight, weight.dtype), ops.rounded(dbias, ctx.bias_dtype), None


class RMSNorm(_Norm):
    """Compute root-mean-square normalization: x / sqrt(mean(x^2) + eps) * weight.

    Before a linear that casts bf16 x to E4M3, the kernel of the cast computes the normalization on a GPU. If it does not, the
    plan states the reason.

    Args:
        normalized_shape: size of the last dimension.
        eps: number added to the mean square.
        zero_centered_gamma: multiply by 1 + weight.
        device: device of the weight.
        dtype: dtype of the weight.

    Shape:
        - input, output: [..., C]
        - weight: [C]

    Examples:
        >>> ops.RMSNorm(64)(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        return self.normed(ctx, ops.RmsNormed(self.rows(input_), self.scale_by_launch(), self.eps), input_.shape)

    def normed(self, ctx: OperationContext, lazy: ops.RmsNormed, shape: Sequence[int]) -> Value:
        """Return a lazy norm as the output [..., C] of this op, and save the tensors for backward in ctx."""
        ctx.shape, ctx.weight_dtype = tuple(shape), self.weight.dtype
        ctx.save_for_backward(lambda: lazy.matrix, lazy.weight, lambda: lazy.rstd)
        return ops.Produced(lazy, shape)

    def op_backward(
        self, ctx: OperationContext, grad_output: Value, *, residual: Tensor | None = None
    ) -> tuple[Value, Sequence[Tensor | None]]:
        """Compute dx and dweight. residual: tensor [..., C] that the same kernel adds to dx; None: nothing is added."""
        x, weight, rstd = ctx.saved_tensors
        add = None if residual is None else rows_of(residual)
        dx, dweight = ops.rms_norm_backward(ops.stored(rows_of(grad_output)), x, weight, rstd, add)
        return dx.view(ctx.shape), [ops.rounded(dweight, ctx.weight_dtype)]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        self.check(x)
        if has_memory(x):
            return _RmsNorm.apply(x, self.scale(), self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.scale().float(), self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """Compute layer normalization: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Before a linear that casts bf16 x to E4M3, the kernel of the cast computes the normalization on a GPU. If it does not, the
    plan states the reason.

    Args:
        normalized_shape: size of the last dimension.
        eps: number added to the variance.
        zero_centered_gamma: multiply by 1 + weight.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - input, output: [..., C]
        - weight, bias: [C]

    Examples:
        >>> ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128, recipe="fp8_current"))(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    parameter_names = "weight", "bias"

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        x, weight = self.rows(input_), self.scale_by_launch()
        bias: Tensor = self.bias
        if weight.dtype == torch.float32 != bias.dtype:  # kernels read weight and bias of one dtype
            bias = by_torch(_widened, torch.empty_like(bias, dtype=torch.float32), bias)
        normed = ops.LayerNormed(x, weight, bias, self.eps)
        ctx.shape, ctx.dtypes = tuple(input_.shape), (self.weight.dtype, self.bias.dtype)
        ctx.save_for_backward(x, weight, lambda: normed.mean, lambda: normed.rstd)
        return ops.Produced(normed, input_.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ops.layer_norm_backward(ops.stored(rows_of(grad_output)), x, weight, mean, rstd)
        of_weight, of_bias = ctx.dtypes
        return dx.view(ctx.shape), [ops.rounded(dweight, of_weight), ops.rounded(dbias, of_bias)]

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        self.check(x)
        if has_memory(x):
            return _LayerNorm.apply(x, self.scale(), self.bias, self.eps)
        return F.layer_norm(x.float(), x.shape[-1:], self.scale().float(), self.bias.float(), self.eps).to(x.dtype)


class L2Normalization(BasicOperation):
    """Normalize over the last dimension: x / sqrt(sum(x^2) + eps).

    Args:
        eps: number added to the sum of squares.

    Shape:
        - input, output: [..., C]

    Examples:
        >>> ops.L2Normalization()(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    in_casts = False

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def op_forward(self, ctx: OperationContext, input_: Value, **quantizers: Operand | None) -> Value:
        inverse = torch.rsqrt((input_.float() ** 2).sum(-1, keepdim=True) + self.eps)
        ctx.save_for_backward(input_, inverse)
        return (input_ * inverse).to(input_.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        x, inverse = ctx.saved_tensors
        n, g = x.float() * inverse, tensor_of(grad_output).float()
        return ((g - n * (g * n).sum(-1, keepdim=True)) * inverse).to(x.dtype), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        x = one_tensor(x)
        return (x * torch.rsqrt((x.float() ** 2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)
