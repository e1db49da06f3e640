"""The autograd function `PassFunction` of eager layers, and helpers: keys of inputs, modes of torch, writable results.

A linear (`dlp.parallel.linear.autograd`) and an `ops.Sequential` (`dlp.ops.passes`) give their forward and backward to
`PassFunction`. Captured launches of a pass (`dlp.runtime.capture`) are replayed for all inputs with the same key. Under
torch.compile, or in a dispatch mode, linears run as opaque ops instead (`dlp.parallel.linear.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlp.kernels import gemms
from dlp.runtime.capture import ALIGNMENT, Key

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)

# Keys of inputs: inputs with equal keys can use the same captured launches


def multiplies_tf32(x: Tensor) -> bool:
    """Return whether GEMMs of x use TF32. The setting of torch may change between two calls."""
    return x.dtype is torch.float32 and gemms.tf32()


def shape_key(tensor: Tensor) -> Key:
    """Return the properties of a tensor that launches depend on, except the address: shape, strides, dtype, alignment and
    device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, tensor.get_device()


def shape_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """Return the properties of `shape_key` for several tensors on one device, without a Python call for each tensor.

    addresses   `data_ptr()` of each tensor"""
    found: list[Any] = [tensors[0].get_device(), *[address % ALIGNMENT for address in addresses]]
    for tensor in tensors:
        found += tensor.shape, tensor.stride(), tensor.dtype
    return tuple(found)


def layout_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """Return alignments and strides of several tensors. addresses: `data_ptr()` of each tensor."""
    return *[address % ALIGNMENT for address in addresses], *[tensor.stride() for tensor in tensors]


def layout_key(tensor: Tensor) -> Key:
    """Return strides and alignment of a tensor."""
    return tensor.stride(), tensor.data_ptr() % ALIGNMENT


# Modes of torch


def opaque() -> bool:
    """Return whether torch.compile traces or a dispatch mode is active, so that a linear must run as opaque ops."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def no_autocast(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """Return a context manager that turns torch.autocast off on the device of these tensors, because dlp layers choose dtypes
    themselves."""
    return torch.autocast(next(tensor.device.type for tensor in tensors if tensor is not None), enabled=False)


def autocast_is_on(x: Tensor) -> bool:
    """Return whether torch.autocast is on for the device of x."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype of torch.autocast if x is bf16, fp16 or fp32; the output then has this dtype, as for nn.Linear."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.dtype in ACTIVATIONS else x


# The autograd function


class Passes(NamedTuple):
    """The forward and backward that `PassFunction` runs.

    forward    (ctx, run, tensors) -> results; saves tensors for backward with `ctx.save_for_backward`
    backward   (ctx, run, grads) -> the gradient of each of `tensors`, None if no gradient is needed. An entry of `grads` is
               None if the loss does not depend on the result with the same index
    """

    forward: Callable[[Any, Any, Sequence[Any]], tuple[Tensor, ...]]
    backward: Callable[[Any, Any, Sequence[Tensor | None]], Sequence[Any]]


class PassFunction(torch.autograd.Function):
    """Autograd function of a forward and a backward. Call `apply_pass(passes, run, *tensors)`; it returns the results.

    `run`: any object, which `passes` get in the forward and in the backward of this call. Parameters may be DTensors:
    `passes.forward` unwraps parameters and `passes.backward` wraps gradients, since `to_local` with autograd for each parameter
    takes as much host time as a small layer.
    """

    @staticmethod
    def forward(ctx: Any, passes: Passes, run: Any, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.passes, ctx.run = passes, run
        ctx.set_materialize_grads(False)
        return passes.forward(ctx, run, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _backward_once(ctx, *grads)
        if torch._C._is_any_autocast_enabled():
            with no_autocast(grads):
                return None, None, *ctx.passes.backward(ctx, ctx.run, grads)
        return None, None, *ctx.passes.backward(ctx, ctx.run, grads)


@once_differentiable
def _differentiate(ctx: Any, *grads: Tensor | None) -> Any:
    return PassFunction.backward(ctx, *grads)


def _backward_once(ctx: Any, *grads: Tensor | None) -> Any:
    """Run the backward for `create_graph=True`, such that a second differentiation raises RuntimeError.

    torch's `once_differentiable` makes the second differentiation raise only if an incoming gradient requires a gradient. dx
    and dw depend on x and w as well, so all incoming gradients are made to require a gradient.
    """
    return _differentiate(ctx, *[None if grad is None else grad.detach().requires_grad_() for grad in grads])


# `PassFunction.apply` without torch's Python wrapper, which costs host time in every call: it searches all arguments for
# tensors of torch.func's transforms. Callers call `refuse_transforms` first.
apply_pass: Callable[..., Any] = super(torch.autograd.Function, PassFunction).apply


def owned(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return results of an autograd function that users can write to in place.

    torch refuses writes to views that a custom function returns. A result that is a view, but shares memory neither with a
    tensor in `given`, the inputs, nor with another result, is therefore detached, so that it is no view any more."""
    return _without_views(results, given) if any([result._is_view() for result in results]) else results


def _without_views(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `owned` for results of which at least one is a view."""
    bases = [base_of(result) for result in results]
    shared = [id(base_of(tensor)) for tensor in given]
    shared += [id(base) for base in bases if sum([other is base for other in bases]) > 1]
    return [
        result.detach() if base is not result and id(base) not in shared else result
        for result, base in zip(results, bases, strict=True)
    ]


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a view reads; for another tensor, the tensor itself."""
    return tensor._base if tensor._is_view() else tensor  # type: ignore[return-value]


def refuse_transforms(name: str) -> None:
    """Raise RuntimeError inside of a transform of torch.func, whose tensors have no memory that kernels can read. `name`: name
    of the layer, for the message."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: transforms of torch.func (grad, vmap, jvp, ...) are not supported: use torch.autograd.grad, and "
            f"one more leading dimension for vmap"
        )
