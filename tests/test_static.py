"""Static scales of x for formats other than per-tensor FP8, and the observers of calibration. Both are compared bit
by bit with torchao's primitives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.quant.fp8 import CurrentScaling, DelayedScaling, static
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.gemm import kernel_name
from dlp.quant.integers import IntScaling, unpack
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.static import StaticScaling, reach_of
from tests.metrics import assert_all_bit_equal, assert_bit_equal, assert_close
from tests.refusals import refuses

QAT = dlp.recipe("qat", weight="int8 channel", activation="int8 token")  # codes of x have zero points
RECIPES = ["int8", dlp.recipe("int8", narrow=False), "fp8_rowwise", QAT]


def net(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias), nn.SiLU(), nn.Linear(96, 32, bias))


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) * (i + 1) + 0.5 for i in range(count)]


def calibrated(model: nn.Module, **options: Any) -> nn.Module:
    with torch.no_grad(), dlp.calibrate(model, "**", **options):
        for x in batches():
            model(x)
    return model


def static_codes(layer: nn.Linear, x: Tensor) -> Any:
    """Cast x with the static scale of the layer, as the layer does."""
    weight: Any = layer.weight
    return weight.use.activation.cast(x, None, slot=ScaleSlot(weight.x_scale, torch.zeros(())))


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_give_the_scales_of_torchaos_observers(symmetric: bool):
    """The test compares the ranges and scales of x and y."""
    observers = pytest.importorskip("torchao.quantization.observer")
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    mapping = ao.MappingType.SYMMETRIC if symmetric else ao.MappingType.ASYMMETRIC
    model = calibrated(net(), observer="minmax", tensors=("x", "y"))
    theirs = {
        (i, tensor): observers.AffineQuantizedMinMaxObserver(mapping, torch.int8, observers.PerTensor())
        for i in (0, 2) for tensor in "xy"
    }  # fmt: skip
    with torch.no_grad():
        for x in batches():
            for i, layer in enumerate(model):
                y = layer(x)
                if i != 1:
                    theirs[i, "x"](x)
                    theirs[i, "y"](y)
                x = y
    for (i, tensor), observer in theirs.items():
        low, high = getattr(model[i], f"{tensor}_range")
        assert (low, high) == (min(observer.min_val, 0), observer.max_val), "smallest and largest value"
        made = dlp.quant.affine.choose_qparams_affine_with_min_max(low, high, (-128, 127), symmetric=symmetric)
        for mine, expected in zip(made, observer.calculate_qparams(), strict=True):
            assert_bit_equal(mine, expected.reshape(()).to(mine.dtype), f"{i}.{tensor}")
        assert getattr(model[i], f"{tensor}_scale") == torch.tensor(448.0) / max(high, -low)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@torch.no_grad()
def test_static_codes_are_those_of_torchaos_primitives(recipe: Any):
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    model = dlp.quantize_(calibrated(net(), observer="minmax"), recipe, mode="static")
    # x exceeds the observed range, so that values saturate
    x, (low, high) = 2 * batches()[0], calibrated(net(), observer="minmax")[0].x_range
    q = static_codes(model[0], x)
    if recipe == "fp8_rowwise":
        scale = torch.exp2(torch.ceil(torch.log2(torch.maximum(high, -low) / 448)))
        codes = ao._quantize_affine_float8(x, scale.reshape(1, 1))
        decoded = ao._dequantize_affine_float8(codes, scale.reshape(1, 1))
        found = q.parts[0].view(torch.uint8), codes.view(torch.uint8)
    else:
        asymmetric, narrow = recipe is QAT, recipe == "int8"
        mapping = ao.MappingType.ASYMMETRIC if asymmetric else ao.MappingType.SYMMETRIC
        ends = (-127 if narrow else -128, 127)
        eps = torch.finfo(torch.float32).smallest_normal
        scale, zero = ao.choose_qparams_affine_with_min_max(low, high, mapping, (), torch.int8, *ends, eps)
        codes = ao.quantize_affine(x, (16, 64), scale, zero, torch.int8, *ends)
        decoded = ao.dequantize_affine(codes, (16, 64), scale, zero, torch.int8, *ends)
        found = unpack(q.parts[0], 8), codes
        assert (len(q.parts) == 3 and bool(q.parts[2].ne(0).all())) == asymmetric, "zero points"
    assert torch.equal(*found) and len({*found[0].flatten().tolist()}) > 50
    assert_bit_equal(q.dequantize(), decoded)
    weight: Any = model[0].weight
    expected = decoded.double() @ weight.dequantize().double().t() + model[0].bias
    assert_close(model[0](x).double(), expected, 1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@torch.no_grad()
def test_static_models_are_saved_compiled_and_frozen(recipe: Any, tmp_path: Any):
    plain = dlp.quantize_(calibrated(net(bias=False), observer="minmax"), recipe, mode="static")
    x, exact = batches()[0], net(bias=False)(batches()[0])
    y = plain(x)
    assert 0 < (y - exact).norm() < 0.06 * exact.norm()
    assert torch.equal(torch.compile(plain, backend="aot_eager", fullgraph=True)(x), y)
    state = dlp.quantized_state_dict(plain)
    assert {"0.x_amax", "2.x_amax"} <= state.keys() and state["0.x_amax"].shape == ((2,) if recipe is QAT else ())
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    assert_bit_equal(torch.load(tmp_path / "model.pt", weights_only=True)["0.weight"].x_scale, state["0.x_amax"])
    other = dlp.quantize_(calibrated(net(bias=False)), recipe, mode="static")  # other scales, which the load replaces
    dlp.load_quantized_state_dict(other, state)
    assert_bit_equal(other(x), y)

    frozen = nn.Sequential(*[dlp.Linear(*sizes, recipe="bf16", dtype=torch.float32) for sizes in ((64, 96), (96, 32))])
    frozen.insert(1, nn.SiLU())
    frozen.load_state_dict(net(bias=False).state_dict())
    calibrated(frozen, observer="minmax")
    dlp.freeze(frozen, "**", recipe, "static")
    assert_bit_equal(frozen(x), y)
    frozen[0].core.session.end_step()
    assert_bit_equal(frozen(x), y, "scales stand still")
    assert_bit_equal(torch.compile(frozen, backend="aot_eager")(x), y)
    assert_all_bit_equal(dlp.quantized_state_dict(frozen), state)
    for scale in ("0.x_amax", "2.x_amax"):
        state[scale] = 2 * state[scale]
    dlp.load_quantized_state_dict(frozen, state)
    dlp.load_quantized_state_dict(plain, state)
    assert not torch.equal(frozen(x), y)
    assert_bit_equal(frozen(x), plain(x), "both numbers of a range are loaded")


ZEROS = IntScaling(8, symmetric=False)
GROUPS = IntScaling(4, 32, symmetric=False)


def by_hand(x: Any, w: Any, y: Any = None) -> Any:
    casts = {"linear_input": x, "linear_weight": w, "linear_output": y}
    return dlp.CustomRecipe(casts.get, name="by hand")


def converted(recipe: str = "bf16") -> nn.Module:
    """Return `net` built from layers of dlp, with the same weights."""
    model = nn.Sequential(
        *[dlp.Linear(*sizes, bias=True, recipe=recipe, dtype=torch.float32) for sizes in ((64, 96), (96, 32))]
    )
    model.insert(1, nn.SiLU())
    model.load_state_dict(net().state_dict())
    return model


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("x", "w", "kernel"),
    [
        (ZEROS, IntScaling(), "reference"), (IntScaling(), ZEROS, "reference"), (ZEROS, ZEROS, "reference"),
        (ZEROS, IntScaling(4, 32), "decode + fp32 mm"), (IntScaling(), GROUPS, "decode + fp32 mm"),
        (IntScaling(4, symmetric=False), IntScaling(), "decode + bf16 mm"),
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_frozen_layers_have_zero_points(x: Any, w: Any, kernel: str, mode: Any, caplog: Any):
    """y equals the product of the decoded operands within rounding. If both operands are int8 with scales per row,
    the GEMM multiplies the codes; other pairs of formats are decoded first, and the log has a line for each such
    layer."""
    frozen, plain = calibrated(converted(), observer="minmax"), calibrated(net(), observer="minmax")
    dlp.freeze(frozen, "**", by_hand(x, w), mode)
    dlp.quantize_(plain, by_hand(x, w), mode=mode)
    rows = batches()[0]
    assert_bit_equal(frozen(rows), plain(rows))
    recipe = frozen[0].core.spec.recipe
    a, b = recipe.x.rowwise, recipe.w.rowwise
    assert kernel_name(a.format, b.format, "cpu") == kernel
    noted = [record.message for record in caplog.records if "decodes x" in record.message]
    assert noted == [
        f"plan: fprop of by hand, {mode} decodes x ({a.format.name}) and w ({b.format.name}): {kernel}"
    ] * (2 * (kernel != "reference")), "once for each layer that was constructed explicitly"
    left = static_codes(plain[0], rows) if mode == "static" else a.cast(rows, a.observe(rows))
    left, right = left.dequantize().double(), plain[0].weight.dequantize().double()
    bound = (5 if kernel == "reference" else 70) * 2**-24 * (left.abs() @ right.abs().t() + 1)
    assert ((frozen[0](rows) - (left @ right.t() + frozen[0].bias)).abs() <= bound).all()


@torch.no_grad()
def test_zero_points_have_the_bits_of_the_fake_quantized_forward_where_scales_are_powers_of_two():
    model, rows = converted("bf16"), batches()[0]
    layer = model[0]
    w = torch.randint(-127, 128, (96, 64)) / 128
    w[:, 0] = 127 / 128
    layer.weight.copy_(w)[:, 0] = 127.5 / 128  # the amax gives the scale 1/128, with which the amax is clipped
    with dlp.calibrate(model, observer="minmax"):
        model(rows)
    layer.x_range.copy_(torch.tensor([-3.0, 4.96875]))  # a range of 255 codes with scale 1/32
    dlp.freeze(model, "0", QAT, "static")
    zero, step = -32, 1 / 32
    fake = ((rows / step).round() + zero).clamp(-128, 127).sub(zero).mul(step)
    assert_bit_equal(layer(rows), nn.functional.linear(fake, w) + layer.bias)


@pytest.mark.parametrize("y", [CurrentScaling(), RowwiseScaling(), IntScaling(), ZEROS], ids=str)
@torch.no_grad()
def test_static_scales_of_y_round_the_outputs_of_frozen_layers(y: Any, tmp_path: Any):
    recipe, rows = by_hand(IntScaling(), IntScaling(), y), batches()[0]
    model = calibrated(converted(), observer="minmax", tensors=("x", "y"))
    ranges = [model[i].y_range.clone() for i in (0, 2)]
    plain = dlp.quantize_(calibrated(net(), observer="minmax"), by_hand(IntScaling(), IntScaling()), mode="static")
    dlp.freeze(model, "**", recipe, "static")

    def rounded(values: Tensor, extremes: Tensor) -> Tensor:
        scale = torch.tensor(448.0) / extremes.abs().max() if isinstance(y, CurrentScaling) else reach_of(y, *extremes)
        quantizer = static() if isinstance(y, CurrentScaling) else StaticScaling(y)
        return quantizer.cast(values, None, slot=ScaleSlot(scale, torch.zeros(()))).dequantize()

    first = rounded(plain[0](rows), ranges[0])
    expected = rounded(plain[2](plain[1](first)), ranges[1])
    assert_bit_equal(model[0](rows), first)
    assert_bit_equal(model(rows), expected)
    assert not torch.equal(plain(rows), expected) and (plain(rows) - expected).norm() < 0.1 * expected.norm()
    key = "0.y_scale" if isinstance(y, CurrentScaling) else "0.y_amax"
    state = dlp.quantized_state_dict(model)
    assert state[key].shape == ((2,) if y is ZEROS else ())
    other = calibrated(converted(), tensors=("x", "y"))
    other[0].y_scale.mul_(4), other[0].y_range.div_(4)
    dlp.freeze(other, "**", recipe, "static")
    assert not torch.equal(other(rows), expected)
    dlp.load_quantized_state_dict(other, state)
    assert_bit_equal(other(rows), expected)
    with pytest.raises(ValueError, match="0: compressed-tensors files of dlp have no entry for a quantized y"):
        dlp.save_compressed(model, tmp_path)


@torch.no_grad()
def test_siblings_share_the_scale_of_y_and_dynamic_layers_round_y_as_in_training():
    pair, rows = dlp.Linear(64, (32, 96), recipe="bf16", dtype=torch.float32), batches()[0]
    pair.weight_1.mul_(4)
    model = nn.Sequential(pair)
    with dlp.calibrate(model, tensors=("x", "y")):
        wide = model(rows)[1].abs().max()
    assert pair.y_range.tolist() == [-wide, wide]
    dlp.freeze(model, "0", by_hand(IntScaling(), IntScaling(), ZEROS), "static")
    for factor in (1, 2):
        for y in model(rows):
            codes = y / (2 * factor * wide / 255)
            assert (codes - codes.round()).abs().max() < 1e-4 and codes.unique().numel() > 15
        state = dlp.quantized_state_dict(model)
        dlp.load_quantized_state_dict(model, state | {"0.y_amax": 2 * state["0.y_amax"]})
    with pytest.raises(ValueError, match="no entry for several weights of one module: save codes with dlp.quantized"):
        dlp.save_compressed(nn.Sequential(frozen_pair()), "codes")

    trained = converted(by_hand(IntScaling(), IntScaling(), RowwiseScaling()))
    y = trained(rows)
    dlp.freeze(trained, "**", by_hand(IntScaling(), IntScaling(), RowwiseScaling()), "dynamic")
    assert_bit_equal(trained(rows), y)


def frozen_pair() -> nn.Module:
    pair = nn.Sequential(dlp.Linear(64, (32, 96), recipe="bf16"))
    dlp.freeze(pair, "0", "int8")
    return pair


def test_what_has_no_static_scale_is_refused():
    with (
        pytest.raises(ValueError, match='tensors must be a sequence of "x", "y" or both'),
        dlp.calibrate(net(), tensors="x"),
    ):
        pass
    with pytest.raises(ValueError, match="y of 0 was not finite in a batch"):
        model = net()
        model[0].bias.data[0] = torch.inf
        calibrated(model, tensors=("y",))
    with pytest.raises(ValueError, match="0 returned only zeros or no tokens"):
        model = net()
        model[0].weight.data.zero_(), model[0].bias.data.zero_()
        calibrated(model, tensors=("y",))
    with pytest.raises(ValueError, match="a static scale needs a quantizer with one scale per row"):
        StaticScaling(Nvfp4Scaling())
    recipe = by_hand(IntScaling(), IntScaling(), ZEROS)
    model = calibrated(converted())
    with pytest.raises(ValueError, match=r'0: static mode has no scale of y: .*, with tensors=\("x", "y"\)'):
        dlp.freeze(model, "**", recipe, "static")
    for y, mode, said in (
        (MxScaling(), "static", "by hand casts y differently: choose mode 'dynamic'"),
        (DelayedScaling(), "dynamic", "by hand uses delayed scaling for y: choose mode 'static'"),
    ):
        with pytest.raises(ValueError, match=said):
            dlp.freeze(model, "**", by_hand(IntScaling(), IntScaling(), y), mode)
    with refuses("0: by hand quantizes y, which an nn.Linear with codes returns in high precision"):
        dlp.quantize_(net(), recipe, mode="dynamic")
    dlp.quantize_(net(), recipe)  # weights only
