"""What every autograd function of dlp needs: keys of calls, modes of torch, results that users may write to.

A linear (`dlp.parallel.linear.autograd`) and a sequence of ops (`dlp.ops.passes`) are one autograd function each, of two
directions. Captured launches of a direction (`dlp.runtime.capture`) serve all calls with an equal key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlp.kernels import gemms
from dlp.runtime.capture import ALIGNMENT, Key

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)

# Keys of calls


def multiplies_tf32(x: Tensor) -> bool:
    """Whether GEMMs of this x are rounded to TF32: a switch of torch's, which may change between two calls."""
    return x.dtype is torch.float32 and gemms.tf32()


def shape_key(tensor: Tensor) -> Key:
    """All that launches over a tensor depend on but its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, tensor.get_device()


def shape_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """`shape_key` of several tensors on one device, without a Python call for each."""
    found: list[Any] = [tensors[0].get_device(), *[address % ALIGNMENT for address in addresses]]
    for tensor in tensors:
        found += tensor.shape, tensor.stride(), tensor.dtype
    return tuple(found)


def layout_keys(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Key:
    """The part of `shape_keys` that shapes and dtypes leave open."""
    return *[address % ALIGNMENT for address in addresses], *[tensor.stride() for tensor in tensors]


def layout_key(tensor: Tensor) -> Key:
    """The part of `shape_key` that shape and dtype leave open."""
    return tensor.stride(), tensor.data_ptr() % ALIGNMENT


# Modes of torch


def opaque() -> bool:
    """Whether something traces or watches, so that a linear must run as the opaque ops."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def no_autocast(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """A context in which torch.autocast is off for the device of these tensors, since a layer chooses its dtypes itself."""
    return torch.autocast(next(tensor.device.type for tensor in tensors if tensor is not None), enabled=False)


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is on for the device of x."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast, which y then has, too, as for nn.Linear."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.dtype in ACTIVATIONS else x


# Autograd functions


def past_functorch(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without torch's Python wrapper, which looks at every argument for tensors of torch.func's transforms: 3
    of the some 60 microseconds of host time of a tiny linear. `refuse_transforms` runs before it."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def owned(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of an autograd function, which was called with `given`, such that a user may write to them: torch refuses
    that for a view that a function returns. A view that shares its memory with no input and no other result is detached, so
    that it is no view any more."""
    if not any([result._is_view() for result in results]):
        return results
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
    """RuntimeError inside of a transform of torch.func, whose tensors have no memory that kernels could read."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: it does not run inside of torch.func's transforms (grad, vmap, jvp, ...): use torch.autograd.grad, and "
            f"one more leading dimension for vmap"
        )


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` for `create_graph=True`: a second differentiation raises. torch's `once_differentiable` raises only if one of
    the incoming gradients requires a gradient, though dx and dw depend on x and w as well; so here they all require one."""
    refusing = once_differentiable(backward)

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        return refusing(ctx, *[None if grad is None else grad.detach().requires_grad_() for grad in grads])

    return run
