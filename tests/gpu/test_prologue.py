"""A linear with a prologue on a GPU: the bits of the producer's kernel followed by the same linear, step after step, in
functions and in the programs that they become; and where the plan says so, x is nowhere stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.parallel.linear import prologue
from dlp.parallel.linear.capture import DIRECTIONS
from dlp.parallel.linear.modules import Linear
from dlp.parallel.model.rows import prologue_note
from dlp.quant.recipe import load
from tests.cases import BY_SCALES
from tests.metrics import assert_bit_equal
from tests.multigpu.test_prologue import GATES, Before
from tests.twins import check_used

RECIPES, WIDTH, STEPS = BY_SCALES, 256, 4


def inputs_of(name: str, tokens: int, device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(tokens, WIDTH, generator=generator).bfloat16().to(device) for _ in range(2))
    beside = [second] if name in GATES else list(second[:2].float())[: len(prologue.PROLOGUES[name].reads) - 1]
    return [first.requires_grad_(), *[each.requires_grad_() for each in beside]]


def layer_of(recipe: str, device: str, **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(WIDTH, (128, 384), True, recipe=recipe, device=device, dtype=torch.bfloat16, **options)


def run(layer: Linear, name: str, fused: bool, tokens: int, device: str, step: int) -> list[Tensor]:
    inputs = inputs_of(name, tokens, device, step)
    ys = layer(*inputs) if fused else layer(Before.apply(name, *inputs))
    generator = torch.Generator().manual_seed(100 + step)
    dys = [torch.randn(y.shape, generator=generator).to(device, y.dtype) for y in ys]
    torch.autograd.backward(ys, dys)
    results = [*(y.detach() for y in ys), *(leaf.grad for leaf in (*inputs, *layer.parameters()))]
    for parameter in layer.parameters():
        parameter.grad = None
    return results


@pytest.mark.parametrize("tokens", [256, 200])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", prologue.PROLOGUES)
def test_a_prologue_has_the_bits_of_its_producer(device, name, recipe, tokens):
    fused, apart = layer_of(recipe, device, prologue=name), layer_of(recipe, device)
    for step in range(STEPS):
        made, expected = (run(layer, name, layer is fused, tokens, device, step) for layer in (fused, apart))
        for i, (a, b) in enumerate(zip(made, expected, strict=True)):
            assert_bit_equal(a, b, f"result {i} of step {step}")
    if tokens == 256:  # no padding, which torch does
        check_used(fused, *DIRECTIONS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", prologue.PROLOGUES)
def test_x_is_stored_only_where_the_plan_says_so(device, monkeypatch, name, recipe):
    made = prologue.load(name)
    (note,) = prologue_note(made, load(recipe), "cuda")
    assert ("in the cast of x" in note) == (made.in_cast and recipe not in ("bf16", "nvfp4"))
    x = made.make("layer", *(t.detach() for t in inputs_of(name, 128, device, 0)))
    kind, times = type(x.matrix), []
    value = kind.value.fget if isinstance(kind.value, property) else kind.value.func
    monkeypatch.setattr(kind, "value", property(lambda self: times.append(1) or value(self)))
    run(layer_of(recipe, device, prologue=name), name, True, 256, device, 0)
    assert bool(times) == ("apart" in note)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_gradients_are_the_reference_s(device, dtype):
    for recipe in RECIPES:
        layer = Linear(128, 256, True, recipe=recipe, device=device, dtype=dtype)
        for step in range(3):
            dy = torch.randn(320, 256, generator=torch.Generator().manual_seed(step)).to(dtype)
            layer.bias.grad = None
            layer(torch.randn(320, 128, device=device, dtype=dtype)).backward(dy.to(device))
            assert_bit_equal(layer.bias.grad.cpu(), ops.column_sums(dy).to(dtype), f"{recipe} step {step}")


def test_a_mutated_norm_is_noticed(device, monkeypatch):
    """What the comparison above is worth."""
    monkeypatch.setattr(prologue.RmsNorm, "kept", lambda self, made: [made.matrix.rstd * 1.01])
    made, expected = (
        run(
            layer_of("fp8_current", device, **({"prologue": "rms_norm"} if fused else {})),
            "rms_norm",
            fused,
            256,
            device,
            0,
        )
        for fused in (True, False)
    )
    assert not all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
