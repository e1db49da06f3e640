"""Models that users could build from `dlp.ops`, each with one input x [M, WIDTH]. The models cover one ops.Sequential,
quantized-only weights with an autocast region, extra inputs and outputs, two ops.Sequential, a user-defined op, and a
user-defined fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dlp
from dlp import ops

WIDTH, FFN, RECIPE = 32, 64, "fp8_current"


class LearnableScale(ops.BasicOperation):
    """User-defined op: multiply the input by an fp32 scalar. `shape`: shape of the parameter: (), or (1,) for FSDP,
    which accepts no parameter without dimensions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def op_forward(
        self, ctx: Any, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        ctx.save_for_backward(input_, self.scale)
        return self.scale * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        x, scale = ctx.saved_tensors
        return scale * grad_output, [torch.inner(x.reshape(-1), grad_output.reshape(-1)).reshape(scale.shape)]


class ScaleAdd(ops.FusedOperation):
    """User-defined fusion of ConstantScale and AddExtraInput, for forward only. `runs`: number of forwards."""

    runs = 0

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **rest: Any) -> Any:
        ScaleAdd.runs += 1
        return torch.add(basic_op_extra_inputs[1][0], input_, alpha=self.basic_ops[0].scale), [(), ()]


def fuse_scale_add(fused: Sequence[Any], *, recipe: Any) -> list[Any]:
    out, left = [], list(fused)
    while left:
        window = left[:2]
        if len(window) == 2 and isinstance(window[0], ops.ConstantScale) and isinstance(window[1], ops.AddExtraInput):
            out.append(ScaleAdd(window))
            left = left[2:]
        else:
            out.append(left.pop(0))
    return out


def a_sequence() -> nn.Module:
    first, second = ops.Linear(WIDTH, FFN, recipe=RECIPE), ops.Linear(FFN // 2, WIDTH, recipe=RECIPE)
    return ops.Sequential(ops.LayerNorm(WIDTH), first, ops.SwiGLU(), second)


class Quantized(nn.Module):
    """Model with quantized-only weights and a forward in an autocast region. The backward runs outside of the region."""

    def __init__(self) -> None:
        super().__init__()
        with dlp.quantized_model_init(recipe=RECIPE):
            linears = ops.Linear(WIDTH, FFN), ops.Linear(FFN // 2, WIDTH)
        self.inner = ops.Sequential(ops.LayerNorm(WIDTH), linears[0], ops.SwiGLU(), linears[1])

    def forward(self, x: Tensor) -> Any:
        with dlp.autocast(recipe=RECIPE):
            return self.inner(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = ops.Linear(WIDTH, FFN, recipe=RECIPE)
        self.fc1 = ops.Sequential(ops.LayerNorm(WIDTH), ops.MakeExtraOutput(), first, ops.SwiGLU())
        self.fc2 = ops.Sequential(ops.Linear(FFN // 2, WIDTH, recipe=RECIPE), ops.AddExtraInput())

    def forward(self, x: Tensor) -> Any:
        return self.fc2(*self.fc1(x))


class Split(nn.Module):
    """Model with two ops.Sequential, of which the first returns a quantized tensor to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ops.Sequential(ops.LayerNorm(WIDTH), ops.Quantize(recipe=RECIPE, strict=True))
        self.fc1 = ops.Sequential(ops.Linear(WIDTH, WIDTH, recipe=RECIPE))

    def forward(self, x: Tensor) -> Any:
        return self.fc1(self.norm(x))


class OwnOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.RMSNorm(WIDTH), LearnableScale(1), ops.Linear(WIDTH, WIDTH, recipe=RECIPE))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class OwnFusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = ops.Linear(WIDTH, WIDTH, recipe=RECIPE)
        self.inner = ops.Sequential(linear, ops.GELU(), ops.ConstantScale(0.5), ops.AddExtraInput())

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (a_sequence, Quantized, Branching, Split, OwnOp, OwnFusion)
}


def codes_only(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are quantized-only: placeholders with stride 0."""
    return {parameter for parameter in model.parameters() if 0 in parameter.stride()}
