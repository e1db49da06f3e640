"""The autograd function of eager calls, keys of calls, modes of torch, and results that users may write to.

A linear (`dlp.parallel.linear.autograd`) and a sequence of ops (`dlp.ops.passes`) run through the same `PassFunction`, each
with a forward and a backward. Captured launches of a pass (`dlp.runtime.capture`) serve all calls with an equal key. Traced
calls of linears run through opaque ops instead (`dlp.parallel.linear.opaque`).
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

# Keys of calls


def multiplies_tf32(x: Tensor) -> bool:
    """Whether GEMMs of this x use TF32; the setting of torch may change between two calls."""
    return x.dtype is torch.float32 and gemms.tf32()


def shape_key(tensor: Tensor) -> Key:
    """Properties of a tensor, except the address, that launches depend on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, tensor.get_device()


def shape_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """`shape_key` of several tensors on one device, without a Python call for each."""
    found: list[Any] = [tensors[0].get_device(), *[address % ALIGNMENT for address in addresses]]
    for tensor in tensors:
        found += tensor.shape, tensor.stride(), tensor.dtype
    return tuple(found)


def layout_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """`shape_keys` without shapes and dtypes."""
    return *[address % ALIGNMENT for address in addresses], *[tensor.stride() for tensor in tensors]


def layout_key(tensor: Tensor) -> Key:
    """`shape_key` without shape and dtype."""
    return tensor.stride(), tensor.data_ptr() % ALIGNMENT


# Modes of torch


def opaque() -> bool:
    """Whether a tracer or a dispatch mode is active, so that a linear must run as the opaque ops."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def no_autocast(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """A context in which torch.autocast is off for the device of these tensors, since a layer chooses its dtypes itself."""
    return torch.autocast(next(tensor.device.type for tensor in tensors if tensor is not None), enabled=False)


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is on for the device of x."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast; y then has this dtype, as for nn.Linear."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.dtype in ACTIVATIONS else x


# The autograd function


class Passes(NamedTuple):
    """The forward and backward that `PassFunction` runs.

    forward    (ctx, run, tensors) -> results; saves the tensors for backward with `ctx.save_for_backward`
    backward   (ctx, run, grads) -> the gradient of each tensor, None where no gradient is needed. An entry of `grads` is None
               if nothing uses the result
    """

    forward: Callable[[Any, Any, Sequence[Any]], tuple[Tensor, ...]]
    backward: Callable[[Any, Any, Sequence[Tensor | None]], Sequence[Any]]


class PassFunction(torch.autograd.Function):
    """`apply_pass(passes, run, *tensors)` -> results of the forward. `run` belongs to one forward and the backward of it.

    Parameters may be DTensors: the passes unwrap them and wrap their gradients, since an autograd function that does so for
    each parameter takes as much host time as a small layer.
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
    """Run the backward for `create_graph=True`, such that a second differentiation raises.

    torch's `once_differentiable` raises only if an incoming gradient requires a gradient, but dx and dw depend on x and
    w as well. Here all incoming gradients therefore require a gradient.
    """
    return _differentiate(ctx, *[None if grad is None else grad.detach().requires_grad_() for grad in grads])


# `PassFunction.apply` without torch's Python wrapper, which searches every argument for tensors of torch.func's
# transforms and takes 3 of about 60 microseconds of host time of a tiny linear. `refuse_transforms` runs before it.
apply_pass: Callable[..., Any] = super(torch.autograd.Function, PassFunction).apply


def owned(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of an autograd function of `given` such that users can write to them. torch refuses writes to views
    that a function returns, so a view that shares memory with neither an input nor another result is detached; then it is
    no view."""
    return _without_views(results, given) if any([result._is_view() for result in results]) else results


def _without_views(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
    """`owned` of results some of which are views."""
    bases = [_base(result) for result in results]
    shared = [id(_base(tensor)) for tensor in given]
    shared += [id(base) for base in bases if sum([other is base for other in bases]) > 1]
    return [
        result.detach() if base is not result and id(base) not in shared else result
        for result, base in zip(results, bases, strict=True)
    ]


def _base(tensor: Tensor) -> Tensor:
    return tensor._base if tensor._is_view() else tensor  # type: ignore[return-value]


def refuse_transforms(name: str) -> None:
    """Raise RuntimeError inside of a transform of torch.func, whose tensors have no memory that kernels could read."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: transforms of torch.func (grad, vmap, jvp, ...) are not supported: use torch.autograd.grad, and "
            f"one more leading dimension for vmap"
        )
