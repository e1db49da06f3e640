"""Custom ops for linears with a quantized weight. The ops are opaque to torch.compile and autograd.

    dlp::quantized_linear   x [..., K], w [N, K], bias -> y [..., N]: cast x, then run the GEMM for the formats of x and w
    dlp::decoded            decoded values of w, for dgrad and for operations that have no quantized implementation

An op takes only tensors and plain values. A `Use`, which describes how a weight is used, is therefore passed as a number
(`number_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.quant.gemm import Gemm, GemmOptions
from dlp.quant.quantizer import Quantizer, ScaleSlot
from dlp.quant.tensor import Format, HighPrecision, QuantizedTensor

_HP, PLAIN = HighPrecision(), GemmOptions()


@dataclass(frozen=True)
class Use:
    """Description of a quantized weight and of the forward of linears with this weight.

    format      format of the weight
    activation  quantizer of x; None: x stays in high precision
    options     options of the GEMM
    shape       [N, K] of the values, if the codes belong to a zero-padded matrix; None: no padding
    """

    format: Format
    activation: Quantizer | None = None
    options: GemmOptions = PLAIN
    shape: tuple[int, int] | None = None

    def values_shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """Return [N, K] of the decoded values of the parts."""
        rows, columns = parts[0].shape
        return self.shape or (rows, self.format.elements(columns))


_NUMBERS: dict[Use, int] = {}  # number of each Use, the argument `use` of the ops
_USES: list[Use] = []  # inverse of _NUMBERS


def number_of(use: Use) -> int:
    """Return the number of a `Use`, which stays the same in this process."""
    if use not in _NUMBERS:
        _NUMBERS[use] = len(_USES)
        _USES.append(use)
    return _NUMBERS[use]


@torch.library.custom_op("dlp::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, parts: list[Tensor], x_scale: Tensor | None, bias: Tensor | None, use: int
) -> Tensor:  # fmt: skip
    """Return y = x w^T + bias [..., N], in the dtype of x, for x [..., K].

    parts     parts of the quantized w [N, K]
    x_scale   scale or range of a static quantizer of x, fp32 [] or [2]; None if the quantizer of x is not static
    bias      [N], or None
    use       number of the `Use` of w"""
    how, rows = _USES[use], x.reshape(x.shape[:-1].numel(), x.shape[-1])
    w, features = how.format.wrap(parts), _out_features(x, parts, use)
    if how.shape is not None:
        rows = F.pad(rows, (0, w.shape[1] - rows.shape[1]))
        bias = None if bias is None else F.pad(bias, (0, w.shape[0] - features))
    if how.activation is None:
        a = QuantizedTensor(_HP, (rows,))
    else:
        given: dict[str, Any] = {} if x_scale is None else {"slot": ScaleSlot(x_scale, torch.zeros_like(x_scale))}
        a = how.activation.cast(rows, how.activation.observe(rows), **given)
    y = Gemm("fprop", w, x.dtype, bias=bias, options=how.options)(a)
    return y[:, :features].reshape(*x.shape[:-1], features).contiguous()


def _out_features(x: Tensor, parts: Sequence[Tensor], use: int) -> int:
    """Return N of a weight [N, K]. Raises ValueError if the last dimension of x is not K, or if x is not bf16, fp16, fp32 or
    fp64."""
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ValueError(
            f"x of a quantized weight must be bf16, fp16, fp32 or fp64; got {x.dtype}: convert x before the layer"
        )
    rows, columns = _USES[use].values_shape(parts)
    if x.shape[-1] != columns:
        raise ValueError(
            f"x {tuple(x.shape)} has {x.shape[-1]} features, and the quantized weight [{rows}, {columns}] takes {columns}; "
            f"check the previous layer"
        )
    return rows


@quantized_linear.register_fake
def _(x: Tensor, parts: list[Tensor], x_scale: Any, bias: Any, use: int) -> Tensor:
    """Return an empty y. Raises ValueError if x and the codes are on different devices; this includes codes on the meta device,
    for which torch calls this function in eager code too."""
    if x.device != parts[0].device:
        raise ValueError(
            f"x is on {x.device}, and the codes of the weight {tuple(parts[0].shape)} are on {parts[0].device}: move x or the "
            f"weight to the same device; for a model on the meta device call to_empty(device=...) and load the codes"
        )
    return x.new_empty(*x.shape[:-1], _out_features(x, parts, use))


@torch.library.custom_op("dlp::decoded", mutates_args=())
def decoded(parts: list[Tensor], dtype: torch.dtype, use: int) -> Tensor:
    """Return the decoded values [N, K] of the parts."""
    rows, columns = _USES[use].values_shape(parts)
    values = _USES[use].format.wrap(parts).dequantize(dtype)
    shares = any(values.untyped_storage().data_ptr() == part.untyped_storage().data_ptr() for part in parts)
    if values.shape == (rows, columns) and values.is_contiguous() and not shares:
        return values
    # Copy, since a custom op must not return a view of its arguments
    return values[:rows, :columns].clone(memory_format=torch.contiguous_format)


@decoded.register_fake
def _(parts: list[Tensor], dtype: torch.dtype, use: int) -> Tensor:
    return parts[0].new_empty(*_USES[use].values_shape(parts), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, _, _, ctx.use = inputs
    ctx.save_for_backward(*parts)


def autocasts(x: Tensor) -> bool:
    """Return whether torch.autocast is on for the device of x and casts the dtype of x, which means all dtypes except fp64."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients dx = dy w, with the decoded weight, and db; the codes have no gradient."""
    if autocasts(dy):
        with torch.autocast(dy.device.type, enabled=False):
            return _backward(ctx, dy)
    parts = list(ctx.saved_tensors)  # read once, because checkpointing unpacks saved tensors only once
    needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
    dx = dy @ decoded(parts, dy.dtype, ctx.use) if needs_x else None
    db = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0) if needs_bias else None
    return dx, [None] * len(parts), None, db, None


quantized_linear.register_autograd(_backward, setup_context=_keep)
