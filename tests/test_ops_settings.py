"""Settings of ops that change between a forward and its backward: the backward uses the settings of the forward.

Other tests in this file check constant factors of gradients. The losses of a training run would not show a wrong
factor.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlp import ops
from tests.metrics import assert_bit_equal
from tests.ops_models import FFN, H, M, Watched, values

# name of the case -> (function that makes the ops, index of the op that changes, changed attributes)
CHANGES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "scale": (lambda: [ops.GELU(), ops.ConstantScale(2.0)], 1, {"scale": 5.0}),
    "scale of a linear": (lambda: [ops.BasicLinear(H, H), ops.ConstantScale(2.0)], 1, {"scale": 5.0}),
    "scale of a sum": (
        lambda: [ops.BasicLinear(H, H), ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True)], 1, {"scale": 5.0},
    ),
    "p": (lambda: [ops.Dropout(0.25), ops.BasicLinear(H, H)], 0, {"p": 0.75}),
    "p to none": (lambda: [ops.Dropout(0.25), ops.BasicLinear(H, H)], 0, {"p": 0.0, "training": False}),
    "in_place": (lambda: [ops.MakeExtraOutput(), ops.GELU()], 0, {"in_place": True}),
    "in_place of a linear": (lambda: [ops.MakeExtraOutput(in_place=True), ops.BasicLinear(H, H)], 0, {"in_place": False}),
    "in_place of an extra input": (lambda: [ops.GELU(), ops.AddExtraInput()], 1, {"in_place": True}),
    "shape": (lambda: [ops.Reshape((-1, H // 2)), ops.GELU()], 0, {"shape": (1, -1)}),
    "eps of RMSNorm": (lambda: [ops.RMSNorm(H), ops.BasicLinear(H, H)], 0, {"eps": 10.0}),
    "gamma": (lambda: [ops.RMSNorm(H), ops.GELU()], 0, {"zero_centered_gamma": True}),
    "eps of LayerNorm": (lambda: [ops.LayerNorm(H), ops.GELU()], 0, {"eps": 10.0}),
    "eps of L2Normalization": (lambda: [ops.L2Normalization(), ops.GELU()], 0, {"eps": 10.0}),
    "strict": (
        lambda: [ops.Quantize(False, True, recipe="fp8_current"), ops.GELU()], 0, {"strict": True, "recipe": "int8"},
    ),
}  # fmt: skip


def gradients(model: nn.Module, op: nn.Module, change: dict[str, Any]) -> list[Tensor]:
    """Run forward, apply `change` to `op`, run backward and restore `op`; return dx and the gradients of parameters."""
    x = values(1, M, H).requires_grad_()
    extra = (values(2, M, H).requires_grad_() * 1,) if any(m.num_extra_inputs for m in model) else ()  # type: ignore[union-attr]
    model.zero_grad()
    torch.manual_seed(1)
    results = model(x, *extra)
    before = {name: getattr(op, name) for name in change}
    for name, value in change.items():
        setattr(op, name, value)
    sum((y * values(3, *y.shape)).sum() for y in (results if isinstance(results, tuple) else [results])).backward()
    for name, value in before.items():
        setattr(op, name, value)
    assert x.grad is not None
    return [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("case", list(CHANGES))
def test_a_backward_has_the_settings_of_its_forward(case: str):
    make, place, change = CHANGES[case]
    torch.manual_seed(0)
    model = ops.Sequential(*make())
    for _ in range(2):
        expected = gradients(model, model[place], {})
        found = gradients(model, model[place], change)
        for a, b in zip(found, expected, strict=True):
            assert_bit_equal(a, b, case)


def test_a_forward_has_the_settings_of_its_time():
    """Two forwards run, between which a setting changes, and then both backwards."""
    op = ops.ConstantScale(2.0)
    model = ops.Sequential(ops.BasicLinear(H, H), op)
    x = [values(1, M, H).requires_grad_() for _ in range(2)]
    first = model(x[0])
    op.scale = 4.0
    second = model(x[1])
    second.backward(values(2, M, H))
    first.backward(values(2, M, H))
    assert x[0].grad is not None and x[1].grad is not None
    assert_bit_equal(2 * x[0].grad, x[1].grad)


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_scales_the_gradient_as_its_output(p: float):
    x = torch.ones(M, FFN, requires_grad=True)
    y = ops.Dropout(p)(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_bit_equal(x.grad, y.detach())
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


@pytest.mark.parametrize("around", [nullcontext, Watched], ids=["fused", "traced"])
def test_the_slope_of_relu_at_zero_is_zero(around: Any):
    """The slope at 0.0 and at -0.0 is 0, as in torch, also in a gate and under a dispatch mode."""
    gate = torch.tensor([[0.0, -0.0, 1.0, -1.0]])
    for make, up, slope in ((ops.ReLU, [], 1.0), (ops.ReGLU, [torch.full((1, 4), 3.0)], 3.0)):
        x = torch.cat([gate, *up], 1).requires_grad_()
        with around():
            make()(x).backward(torch.ones(1, 4))
        assert x.grad is not None and x.grad[0, :4].tolist() == [0.0, 0.0, slope, 0.0]
