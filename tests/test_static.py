"""Static scales of x for formats besides per-tensor FP8, and the observers of calibration, bit by bit compared with
torchao's primitives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.quant.integers import unpack
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.static import StaticScaling
from tests.metrics import assert_bit_equal, assert_close

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
    """Codes of x as the layer casts x."""
    weight: Any = layer.weight
    return weight.use.activation.cast(x, None, slot=ScaleSlot(weight.x_scale, torch.zeros(())))


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_give_the_scales_of_torchaos_observers(symmetric: bool):
    """The test compares the scales of x and y."""
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
        assert getattr(model[i], f"{tensor}_scale") == 448 / max(high, -low)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@torch.no_grad()
def test_static_codes_are_those_of_torchaos_primitives(recipe: Any):
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    model = dlp.quantize_(calibrated(net(), observer="minmax"), recipe, mode="static")
    # Beyond the observed range, so that values saturate
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
    with pytest.raises(ValueError, match="save codes with dlp.quantized_state_dict, or quantize by fp8_current"):
        dlp.save_compressed(plain, tmp_path / "codes")

    frozen = nn.Sequential(*[dlp.Linear(*sizes, recipe="bf16", dtype=torch.float32) for sizes in ((64, 96), (96, 32))])
    frozen.insert(1, nn.SiLU())
    frozen.load_state_dict(net(bias=False).state_dict())
    calibrated(frozen, observer="minmax")
    if recipe is QAT:
        with pytest.raises(
            ValueError, match="a frozen layer has one static number for x: call dlp.quantize_ on the plain"
        ):
            dlp.freeze(frozen, "**", recipe, "static")
        return
    dlp.freeze(frozen, "**", recipe, "static")
    assert_bit_equal(frozen(x), y)
    frozen[0].core.session.end_step()
    assert_bit_equal(frozen(x), y, "scales stand still")
    assert dlp.quantized_state_dict(frozen).keys() == state.keys()


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
    with pytest.raises(ValueError, match="use a quantizer with one scale per row"):
        StaticScaling(Nvfp4Scaling())
