"""QuantizedParameter: one tensor around any format, on one rank."""

from __future__ import annotations

import io
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlp.quant import recipe as recipes
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import caps_of
from tests.cases import RECIPES
from tests.metrics import assert_bit_equal

HELD = [name for name in RECIPES if not caps_of(recipes.load(name).w.rowwise).slot]


def linear(recipe: str, dynamic: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    """A linear whose weight is quantized, and an x for it."""
    torch.manual_seed(0)
    made, chosen = nn.Linear(128, 256, dtype=torch.bfloat16), recipes.load(recipe)
    quantized = QuantizedParameter.from_float(made.weight, chosen.w.rowwise, chosen.x.rowwise if dynamic else None)
    made.weight = nn.Parameter(quantized, requires_grad=False)
    return made, torch.randn(32, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("recipe", HELD)
def test_multiplies_what_it_stands_for(recipe, dynamic):
    layer, x = linear(recipe, dynamic)
    quantizer = recipes.load(recipe).x.rowwise
    read = quantizer.cast(x, quantizer.observe(x)).dequantize(torch.bfloat16) if dynamic else x
    expected = F.linear(read.double(), layer.weight.dequantize(torch.float64), layer.bias.double())
    x.requires_grad_()
    y = layer(x)
    assert (y - expected).norm() < 4e-3 * expected.norm()
    y.sum().backward()
    assert_bit_equal(x.grad, torch.ones_like(y) @ layer.weight.dequantize())
    matrix = torch.mm(x.detach(), layer.weight.t()) + layer.bias
    assert (matrix - expected).norm() < 1e-2 * expected.norm(), "mm of the transposed weight"
    assert layer.weight.t().t().shape == layer.weight.shape


@pytest.mark.parametrize("recipe", HELD)
def test_is_saved_and_read_as_codes(recipe):
    layer, x = linear(recipe)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    other = nn.Linear(128, 256, dtype=torch.bfloat16)
    other.load_state_dict(read, assign=True)
    assert isinstance(other.weight, QuantizedParameter)
    assert_bit_equal(other(x), layer(x))
    assert recipe in ("bf16",) or file.getbuffer().nbytes < 0.7 * 128 * 256 * 2


@pytest.mark.parametrize("recipe", HELD)
def test_pieces_are_those_of_the_values(recipe):
    weight = linear(recipe)[0].weight
    values = weight.dequantize()
    for dim in (0, 1):
        half = weight.shape[dim] // 2
        pieces = weight.detach().split(half, dim)
        for piece, expected in zip(pieces, values.split(half, dim), strict=True):
            decoded = piece.dequantize() if isinstance(piece, QuantizedParameter) else piece
            assert_bit_equal(decoded.contiguous(), expected.contiguous())
        whole = torch.cat(list(pieces), dim)
        assert_bit_equal(whole.dequantize() if isinstance(whole, QuantizedParameter) else whole, values)
    turned = weight.detach().t()[:, :128]
    assert_bit_equal(turned.dequantize().contiguous(), values.t()[:, :128].contiguous())


def test_scales_of_their_own_are_not_joined():
    """One scale cannot stand for both: values are, instead."""
    quantizer = recipes.load("fp8_current").w.rowwise
    small, large = (QuantizedParameter.from_float(torch.full((16, 16), v), quantizer) for v in (1.0, 100.0))
    joined = torch.cat([small, large])
    assert_bit_equal(joined, torch.cat([small.dequantize(), large.dequantize()]))


def test_other_operations_decode_and_say_so_once(caplog):
    weight = linear("fp8_current")[0].weight
    with caplog.at_level(logging.WARNING, "dlp"):
        assert_bit_equal(torch.frac(weight), torch.frac(weight.dequantize()))
        torch.frac(weight)
    assert [record.message for record in caplog.records] == [
        "aten.frac.default of a quantized weight runs on its decoded values"
    ]
    with pytest.raises(ValueError, match="would write into a weight that is held as fp8_tensor"):
        weight.mul_(2)
    with pytest.raises(ValueError, match="would write into"):
        weight.copy_(torch.zeros(256, 128))


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_compiles(recipe):
    layer, x = linear(recipe)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    assert_bit_equal(compiled(x), layer(x))
    (dx,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert (dx - expected).norm() < 1e-2 * expected.norm()
    torch.compiler.reset()


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_x_and_y_are_in_the_dtype_of_autocast_and_what_is_inside_is_not(recipe):
    layer, x = linear(recipe)
    wide, x = x.float().requires_grad_(), x.requires_grad_()
    torch.compiler.reset()
    for each in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(wide)
            (dx,) = torch.autograd.grad(y.sum(), wide)
        assert_bit_equal(y, layer(x))
        assert_bit_equal(dx, torch.autograd.grad(layer(x).sum(), x)[0].float())
    torch.compiler.reset()


def test_a_history_is_refused():
    delayed, current = recipes.load("fp8_delayed"), recipes.load("fp8_current")
    with pytest.raises(ValueError, match="scales by history"):
        QuantizedParameter.from_float(torch.zeros(16, 16), delayed.w.rowwise)
    with pytest.raises(ValueError, match="casts x with a scale that is known before: pass x_scale"):
        QuantizedParameter.from_float(torch.zeros(16, 16), current.w.rowwise, delayed.x.rowwise)


def test_attributes_are_none_that_tensors_have():
    """Up to torch 2.11, `names` of a tensor are those of its dimensions."""
    layer, _ = linear("nvfp4")
    assert not vars(layer.weight).keys() & {"names", *dir(torch.Tensor)}
