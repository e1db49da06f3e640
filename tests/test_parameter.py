"""QuantizedParameter: one tensor class for any format, on one rank."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.quant import recipe as recipes
from dlp.quant.fp8 import CurrentScaling, Fp8Tensor, static
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.integers import IntScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.parameter import QuantizedParameter, allow
from dlp.quant.quantizer import caps_of
from tests.cases import RECIPES
from tests.metrics import assert_bit_equal
from tests.refusals import refuses

HELD = [name for name in RECIPES if not caps_of(recipes.load(name).w.rowwise).slot]


def linear(recipe: str, dynamic: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    """Return a linear with a quantized weight, and an x for the linear. If `dynamic`, the linear also quantizes x."""
    torch.manual_seed(0)
    made, chosen = nn.Linear(128, 256, dtype=torch.bfloat16), recipes.load(recipe)
    quantized = QuantizedParameter.from_float(made.weight, chosen.w.rowwise, chosen.x.rowwise if dynamic else None)
    made.weight = nn.Parameter(quantized, requires_grad=False)
    return made, torch.randn(32, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(64,), (2, 64, 64)])
def test_what_is_no_matrix_of_floats_is_refused(shape):
    quantizer = dlp.recipe("fp8_current").w.rowwise
    for values in (torch.zeros(shape), torch.zeros(64, 64, dtype=torch.int32)):
        with refuses(r"from_float takes one matrix \[N, K\] of floats; got .*: quantize matrices one"):
            QuantizedParameter.from_float(values, quantizer)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", "int8"])
def test_pickle_reads_back_what_it_wrote(recipe):
    torch.manual_seed(0)
    model = dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), recipe, mode="dynamic")
    x = torch.randn(8, 64)
    assert_bit_equal(pickle.loads(pickle.dumps(model))(x), model(x))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", "int8"])
def test_another_dtype_is_that_of_the_values_and_not_of_the_codes(recipe):
    torch.manual_seed(0)
    chosen = dlp.recipe(recipe)
    cast_x = static("e4m3") if recipe == "fp8_current" else chosen.x.rowwise
    scale = torch.tensor(0.1) if recipe == "fp8_current" else None
    weight = QuantizedParameter.from_float(torch.randn(64, 64), chosen.w.rowwise, cast_x, x_scale=scale)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    for other in (weight.to(torch.bfloat16), weight.bfloat16(), model.bfloat16()[0].weight):
        assert isinstance(other, QuantizedParameter) and other.dtype == other.dequantize().dtype == torch.bfloat16
        for part, before in zip(other.inside, weight.inside, strict=True):
            assert part.dtype == before.dtype
            assert_bit_equal(part, before)
        assert_bit_equal(other.dequantize(), weight.dequantize().bfloat16())
    assert weight.dtype == torch.float32
    assert model(torch.randn(8, 64).bfloat16()).dtype == torch.bfloat16


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


@dataclass(frozen=True)
class Mine(Fp8Tensor):
    """A user's format."""

    note: str = ""


@dataclass(frozen=True)
class MineScaling(CurrentScaling):
    note: str = ""

    @property
    def format(self):
        return Mine(self.element, self.note)


def test_a_format_from_outside_is_read_once_it_is_allowed(tmp_path):
    quantizer = MineScaling(note="kept")
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    layer.weight = nn.Parameter(QuantizedParameter.from_float(layer.weight, quantizer, quantizer), requires_grad=False)
    torch.save(layer.state_dict(), tmp_path / "mine.pt")
    for kind in (Mine, MineScaling):
        with refuses(rf"tests\.test_parameter\.{kind.__name__} was not an allowed global", pickle.UnpicklingError):
            torch.load(tmp_path / "mine.pt", weights_only=True)
        allow(kind)
    other = nn.Linear(64, 32)
    other.load_state_dict(torch.load(tmp_path / "mine.pt", weights_only=True), assign=True)
    assert other.weight.use == layer.weight.use and other.weight.use.activation.note == "kept"
    assert_bit_equal(other(x), layer(x))


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


@pytest.mark.parametrize(
    ("quantizer", "along_k"),
    [
        (IntScaling(2), 4),
        (IntScaling(4), 2),
        (IntScaling(4, 32, symmetric=False), 32),
        (IntScaling(4, 33), 66),  # groups that end in the middle of a byte
        (Nvfp4Scaling(), 16),
        (BlockScaling(tile=True), 128),
    ],
    ids=str,
)
def test_any_slice_is_that_of_the_values(quantizer, along_k):
    """A slice keeps codes if it consists of complete bytes and complete blocks (the last block may be partial);
    otherwise it is a plain tensor of values."""
    rows, columns = 300, 1056 if along_k == 66 else 512
    weight = QuantizedParameter.from_float(torch.randn(rows, columns), quantizer)
    values, along_n = weight.dequantize(), quantizer.format.block[0]
    for first, last in [
        (0, 4),
        (1, 5),
        (2, 6),
        (16, 48),
        (33, 66),
        (66, 132),
        (128, 256),
        (0, 256),
        (256, 300),
        (299, 300),
    ]:
        for dim, unit in ((0, along_n), (1, along_k)):
            piece, expected = weight.narrow(dim, first, last - first), values.narrow(dim, first, last - first)
            whole = first % unit == 0 and (last % unit == 0 or last == weight.shape[dim])
            assert isinstance(piece, QuantizedParameter) == whole, (dim, first, last)
            assert_bit_equal((piece.dequantize() if whole else piece).contiguous(), expected.contiguous())
            turned = weight.t().narrow(1 - dim, first, last - first)
            assert_bit_equal((turned.dequantize() if whole else turned).contiguous(), expected.t().contiguous())
    assert weight.new_zeros(128, columns).shape == (128, columns)
    assert weight.new_zeros(128, 3).shape == (128, 3)
    strides = (rows, columns), (1, rows)
    assert_bit_equal(weight.as_strided(*strides), values.as_strided(*strides))


def static_weight(value: float, x_scale: float | None = 2.0, size: int = 16) -> QuantizedParameter:
    scale = None if x_scale is None else torch.tensor(x_scale)
    cast = None if x_scale is None else static()
    return QuantizedParameter.from_float(torch.full((size, 16), value), CurrentScaling(), cast, x_scale=scale)


def test_a_copy_brings_the_scale_of_x():
    """`copy_`, as in `load_state_dict` without assign, also copies the static scale of x."""
    model, saved = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    model.weight, saved.weight = (
        nn.Parameter(static_weight(*given), requires_grad=False) for given in ((1.0, 2.0), (3.0, 5.0))
    )
    model.load_state_dict(saved.state_dict())
    x = torch.randn(4, 16)
    assert_bit_equal(model(x), saved(x))
    assert model.weight.x_scale == 5 and model.weight.x_scale is not saved.weight.x_scale


def test_a_copy_of_other_codes_is_refused():
    weight = static_weight(1.0)
    for other, why in (
        (static_weight(3.0).t(), "one of the two is transposed"),
        (static_weight(3.0, None), "one of the two has a static scale of x"),
        (static_weight(3.0, size=8), r"the source has the shape \(8, 16\)"),
        (QuantizedParameter.from_float(torch.ones(16, 16), IntScaling()), r"the source has the format int8\[row\]"),
    ):
        with pytest.raises(ValueError, match=rf"a weight of fp8_tensor.* \(16, 16\) cannot be overwritten: {why}"):
            weight.copy_(other)
    assert (weight.dequantize() == 1).all()
    weight.t().copy_(static_weight(3.0).t())
    assert (weight.dequantize() == 3).all()


def test_what_is_made_anew_shares_nothing():
    weight = static_weight(1.0)
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert torch.zeros_like(weight.view(-1)).shape == (256,) and weight.new_zeros(8, 16).x_scale == 2
    for made in (weight.clone(), torch.empty_like(weight), weight.to(torch.bfloat16), copy.deepcopy(layer).weight):
        for old, new in zip((*weight.parts, weight.x_scale), (*made.parts, made.x_scale), strict=True):
            assert old.data_ptr() != new.data_ptr()
    assert weight.detach().x_scale is weight.x_scale and weight[:8].x_scale is weight.x_scale


def test_memory_is_shared_with_other_processes():
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(static_weight(1.0), requires_grad=False)
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert isinstance(layer.weight, QuantizedParameter) and layer.weight.is_shared()
    assert all(each.is_shared() for each in (*layer.weight.parts, layer.weight.x_scale))


def test_scales_of_x_that_differ_are_not_joined():
    joined = torch.cat([static_weight(1.0), static_weight(1.0, 5.0)])
    assert not isinstance(joined, QuantizedParameter)
    joined = torch.cat([static_weight(1.0), static_weight(1.0)])
    assert isinstance(joined, QuantizedParameter) and joined.x_scale == 2


def test_activations_may_be_recomputed():
    """Activations of a layer with a quantized weight can be recomputed, as in training of adapters. Recomputation
    requires that hooks of saved tensors get each tensor once."""
    layer, x = linear("mxfp8")
    grads = []
    for run in (layer, partial(checkpoint, layer, use_reentrant=False)):
        x = x.detach().requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    assert_bit_equal(*grads)


def test_linear_takes_keywords():
    layer, x = linear("fp8_current")
    for y in (
        F.linear(input=x, weight=layer.weight, bias=layer.bias),
        F.linear(x, weight=layer.weight, bias=layer.bias),
        F.linear(x, layer.weight, bias=layer.bias),
    ):
        assert_bit_equal(y, layer(x))
    assert_bit_equal(F.linear(weight=layer.weight, input=x), F.linear(x, layer.weight))


def test_scales_of_their_own_are_not_joined():
    """`torch.cat` of parameters with different scales per tensor returns values, because one scale cannot represent
    both."""
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
    with pytest.raises(ValueError, match="would write to a weight that is stored as fp8_tensor"):
        weight.mul_(2)
    for writes in (
        lambda: weight.copy_(torch.zeros(256, 128)),
        lambda: torch._foreach_mul_([weight.detach()], 2.0),
        lambda: torch.add(torch.zeros(256, 128), 1, out=weight.detach()),
    ):
        with pytest.raises(ValueError, match="would write to"):
            writes()


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
    with pytest.raises(ValueError, match="has delayed scales"):
        QuantizedParameter.from_float(torch.zeros(16, 16), delayed.w.rowwise)
    with pytest.raises(ValueError, match="computes no scale from x: pass x_scale"):
        QuantizedParameter.from_float(torch.zeros(16, 16), current.w.rowwise, delayed.x.rowwise)


def test_attributes_are_none_that_tensors_have():
    """QuantizedParameter stores no attribute whose name torch.Tensor uses, such as `names`, which tensors have up to torch
    2.11."""
    layer, _ = linear("nvfp4")
    assert not vars(layer.weight).keys() & {"names", *dir(torch.Tensor)}


@pytest.mark.parametrize(
    "quantizer",
    [
        *(recipes.load(name).w.rowwise for name in ("fp8_current", "fp8_rowwise", "mxfp8", "int8")),
        Nvfp4Scaling(), IntScaling(4, 32), IntScaling(8, symmetric=False),
    ],
    ids=str,
)  # fmt: skip
def test_an_embedding_decodes_the_rows_that_are_looked_up(quantizer, caplog):
    torch.manual_seed(0)
    table, index = nn.Embedding(48, 128, dtype=torch.bfloat16), torch.tensor([[1, 47, 1], [0, 5, 9]])
    table.weight = nn.Parameter(QuantizedParameter.from_float(table.weight, quantizer), requires_grad=False)
    with caplog.at_level(logging.WARNING, "dlp"):
        found = table(index)
    assert not caplog.records, "no decoded table"
    assert_bit_equal(found, table.weight.dequantize()[index])
    whole = nn.Embedding(256, 128, dtype=torch.bfloat16)
    whole.weight = nn.Parameter(
        QuantizedParameter.from_float(whole.weight, BlockScaling(tile=True)), requires_grad=False
    )
    assert_bit_equal(whole(index), whole.weight.dequantize()[index])
