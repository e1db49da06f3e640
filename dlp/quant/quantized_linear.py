"""What runs behind a quantized weight: two opaque ops, which torch.compile and autograd see as one call each.

    dlp::quantized_linear   x [..., K], w [N, K] -> y [..., N]: casts x, multiplies by the kernel that the table has
    dlp::decoded            the values of w, for dgrad and for whatever has no codes of its own

An op takes tensors and numbers, so how a weight is read, a `Use`, goes by a number.
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
    """How a weight is read.

    activation  the quantizer that casts x first; None: x stays as it is
    options     of the GEMM
    shape       [N, K] of the values where the codes are those of a matrix that was padded with zeros; None: no padding
    """

    format: Format
    activation: Quantizer | None = None
    options: GemmOptions = PLAIN
    shape: tuple[int, int] | None = None

    def values_shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """[N, K] of the values that the parts stand for."""
        rows, columns = parts[0].shape
        return self.shape or (rows, columns * self.format.elements_per_code)


_NUMBERS: dict[Use, int] = {}  # what the opaque ops call a use
_USES: list[Use] = []


def number_of(use: Use) -> int:
    if use not in _NUMBERS:
        _NUMBERS[use] = len(_USES)
        _USES.append(use)
    return _NUMBERS[use]


@torch.library.custom_op("dlp::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, parts: list[Tensor], x_scale: Tensor | None, bias: Tensor | None, use: int
) -> Tensor:  # fmt: skip
    """x [..., K], the parts of w [N, K], b [N] -> y [..., N] in the dtype of x. `x_scale`: fp32 [], what a static cast
    multiplies x by."""
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
    """N of a weight [N, K]. ValueError for x of other features than K, and for x that holds no floats of 2 bytes or more."""
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ValueError(
            f"x of a quantized weight must be bf16, fp16, fp32 or fp64; got {x.dtype}: convert it before the layer"
        )
    rows, columns = _USES[use].values_shape(parts)
    if x.shape[-1] != columns:
        raise ValueError(
            f"x {tuple(x.shape)} has {x.shape[-1]} features, and the quantized weight [{rows}, {columns}] takes {columns}; "
            f"check the layer that makes x"
        )
    return rows


@quantized_linear.register_fake
def _(x: Tensor, parts: list[Tensor], x_scale: Any, bias: Any, use: int) -> Tensor:
    """ValueError where x and codes lie on different devices; torch calls this function for codes on the meta device too."""
    if x.device != parts[0].device:
        raise ValueError(
            f"x lies on {x.device} and the codes of the weight {tuple(parts[0].shape)} on {parts[0].device}: move one of "
            f"them; give a model on the meta device memory by to_empty(device=...) and load its codes"
        )
    return x.new_empty(*x.shape[:-1], _out_features(x, parts, use))


@torch.library.custom_op("dlp::decoded", mutates_args=())
def decoded(parts: list[Tensor], dtype: torch.dtype, use: int) -> Tensor:
    """The values [N, K] that parts stand for."""
    rows, columns = _USES[use].values_shape(parts)
    values = _USES[use].format.wrap(parts).dequantize(dtype)
    return values[:rows, :columns].clone(memory_format=torch.contiguous_format)


@decoded.register_fake
def _(parts: list[Tensor], dtype: torch.dtype, use: int) -> Tensor:
    return parts[0].new_empty(*_USES[use].values_shape(parts), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, _, _, ctx.use = inputs
    ctx.save_for_backward(*parts)


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast would have a product of x in its dtype."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """dx by the decoded weight, and the gradient of the bias; codes have none."""
    if autocasts(dy):
        with torch.autocast(dy.device.type, enabled=False):
            return _backward(ctx, dy)
    parts = list(ctx.saved_tensors)  # read once: checkpointing unpacks them once
    needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
    dx = dy @ decoded(parts, dy.dtype, ctx.use) if needs_x else None
    db = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0) if needs_bias else None
    return dx, [None] * len(parts), None, db, None


quantized_linear.register_autograd(_backward, setup_context=_keep)
