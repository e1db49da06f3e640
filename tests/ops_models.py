"""Helpers of the tests of dlp.ops: tensors, small models, and functions that run forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dlp import ops
from tests.metrics import assert_close

H, FFN, M = 32, 64, 32
NAMES = ("y", "dx")


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(recipe: Any = "bf16", bias: bool = True, act: type = ops.SwiGLU) -> ops.Sequential:
    torch.manual_seed(0)
    wide = FFN if issubclass(act, ops.SwiGLU) else FFN // 2
    return ops.Sequential(
        ops.LayerNorm(H), ops.Linear(H, wide, bias, recipe=recipe), act(), ops.Linear(FFN // 2, H, bias, recipe=recipe)
    )


def run(model: nn.Module, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Clear the gradients of the parameters, and run forward and backward; return y, dx and the gradients."""
    x = values(seed, *(shape or (M, H))).to(dtype).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(values(seed + 1, *y.shape).to(dtype))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {
        f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def linear(recipe: str, size: int = H, **options: Any) -> ops.Linear:
    return ops.Linear(size, size, recipe=recipe, **options)


def same(found: dict[str, Tensor], expected: dict[str, Tensor], at_most: float = 1e-6) -> None:
    assert [name.replace(".", "_") for name in found] == [name.replace(".", "_") for name in expected]
    for (name, tensor), other in zip(found.items(), expected.values(), strict=True):
        assert_close(tensor, other, at_most, name)


class Watched(TorchDispatchMode):
    """Dispatch mode that changes nothing. Under a dispatch mode, a linear runs as opaque ops, and an ops.Sequential runs
    without fusions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recomputed(nn.Module):
    """Module that recomputes the forward of `inner` in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Branch(ops.BasicOperation):
    """Op with an extra input and an extra output: returns 2 * weight * x + extra, and x as the extra output. `lacks`: name
    of a result that the op wrongly leaves out."""

    num_extra_inputs = num_extra_outputs = 1

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.lacks, self.weight = lacks, nn.Parameter(torch.ones(1))

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **rest: Any) -> Any:
        ctx = basic_op_ctxs[0]
        ctx.factor = 2.0
        ctx.save_for_backward(input_, self.weight)
        more = () if self.lacks == "extra outputs" else (input_.clone(),)
        return ctx.factor * self.weight * input_ + basic_op_extra_inputs[0][0], [more]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        ctx = basic_op_ctxs[0]
        x, weight = ctx.saved_tensors
        of_weight = () if self.lacks == "gradients of parameters" else ((ctx.factor * x * grad_output).sum().view(1),)
        of_extra = () if self.lacks == "gradients of extra inputs" else (grad_output,)
        dx = ctx.factor * weight * grad_output + basic_op_grad_extra_outputs[0][0]
        return dx, [of_weight], [] if self.lacks == "tuples of gradients of extra inputs" else [of_extra]


class Twice(nn.Module):
    """Module that calls an ops.Sequential with the input x and the extra input 3 x. A Branch in the ops.Sequential reads the
    extra input. The module returns the sum of the output and the extra output."""

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.inner = ops.Sequential({"a": ops.Identity(), "branch": Branch(lacks), "act": ops.GELU()})

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.inner(x, 3.0 * x)
        return y + more  # type: ignore[no-any-return]
