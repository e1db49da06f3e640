"""Inputs of layers: layers refuse inputs that are not tensors, and cast inputs to the dtype of an enabled torch.autocast."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.spec import LayerOptions
from tests.cases import RECIPES
from tests.metrics import assert_bit_equal, assert_close


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_no_tensor_is_refused_by_name():
    layer = dlp.Linear(64, 64, recipe="fp8_current")
    quantizer = dlp.recipe("fp8_current").x.rowwise
    quantized = quantizer.cast(values(32, 64), quantizer.observe(values(32, 64)))
    with pytest.raises(TypeError, match=r"Linear: x is a QuantizedTensor \(fp8_tensor.*x\.dequantize\(dtype\)"):
        layer(quantized)
    assert layer(quantized.dequantize()).shape == (32, 64)
    with pytest.raises(TypeError, match="Linear: x must be a tensor; got list"):
        layer([1.0])


def trained(layer: nn.Module, x: Tensor, by_hand: bool = False, inside: bool = False) -> list[Tensor]:
    """Return y, dx and dw: under torch.autocast, with backward `inside` the region or after it; or, if `by_hand`,
    without autocast on an x that is cast to bf16."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not by_hand):
        y = layer(x.bfloat16() if by_hand else x)
        if inside:
            y.backward(torch.ones_like(y))
    if not inside:
        y.backward(torch.ones_like(y))
    (weight,) = layer.parameters()
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_means_x_in_its_dtype(recipe, inside):
    """The layer casts nothing again: the results have the bits of a layer, without autocast, whose x was cast to bf16."""
    torch.manual_seed(0)
    layer = dlp.Linear(64, 128, recipe=recipe)
    expected = trained(copy.deepcopy(layer), values(32, 64), by_hand=True)
    for got, wanted, what in zip(
        trained(layer, values(32, 64), inside=inside), expected, ("y", "dx", "dw"), strict=True
    ):
        assert_bit_equal(got, wanted, what)


def test_autocast_is_that_of_nn_linear():
    layer, plain, x = dlp.Linear(64, 128), nn.Linear(64, 128, bias=False), values(32, 64)
    plain.load_state_dict(layer.state_dict())
    for got, expected in zip(trained(layer, x), trained(plain, x), strict=True):
        assert got.dtype == expected.dtype
        assert_close(got, expected, 1e-2)
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("kind", ["attached", pytest.param("compiled", marks=pytest.mark.slow), "waiting"])
def test_autocast_of_layers_that_cast_at_the_boundary_are_compiled_or_wait(kind):
    def model() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(dlp.Linear(64, 64, recipe="fp8_current"))
        dlp.attach(made, torch.optim.SGD(made.parameters(), lr=0.1))
        made[0].core.set_spec(replace(made[0].core.spec, options=LayerOptions(delay_wgrad=kind == "waiting")))
        if kind == "compiled":
            made.compile(backend="aot_eager", fullgraph=True)
        return made

    one, other = model(), model()
    for _ in range(2):
        got, expected = trained(one, values(32, 64), inside=True), trained(other, values(32, 64), by_hand=True)
        if kind == "waiting":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                dlp.backward_dw(one)
            dlp.backward_dw(other)
            got[2], expected[2] = one[0].weight.grad, other[0].weight.grad
        for a, b in zip(got, expected, strict=True):
            assert_bit_equal(a, b)
        dlp.end_step(one)
        dlp.end_step(other)
