"""Comparison with torchao on the same inputs, as docs/from-torchao.md describes. Inference: weights and outputs in float8
(scaled per tensor or per row) and int8, weight only and dynamic. Training: the three float8 recipes of torchao.

torchao's `quantize_` computes the scale (in float8, amax / 448) in the dtype of the tensor, so that scales of bf16
tensors are rounded to bf16; scales of dlp are fp32. For fp32 tensors, and where the scale is exact in bf16, codes are
equal, and only the rounding of y differs.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Operand
from tests.metrics import assert_bit_equal, sqnr

INT8 = {"name": "int8", "narrow": False}
ROWWISE = {"name": "fp8_rowwise", "power_of_two": False}
CASES = [
    pytest.param("fp8_current", "dynamic", id="dynamic by tensors"),
    pytest.param(ROWWISE, "dynamic", id="dynamic by rows"),
    pytest.param(ROWWISE, "weight_only", id="weight only"),
    pytest.param(INT8, "dynamic", id="dynamic int8"),
    pytest.param(INT8, "weight_only", id="weight only int8"),
]


@pytest.fixture
def ao(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return torchao's module without its check of the hardware: torchao demands a GPU for casts of activations, but
    also runs on a CPU."""
    api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(api, "_check_hardware_support", lambda granularity: None)
    return api


def scales_rows_on_cpus() -> bool:
    """Whether torch's `_scaled_mm` accepts scales of rows on a CPU. torch 2.11 does not."""
    codes, ones = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def config(ao: ModuleType, recipe: Any, mode: str) -> Any:
    if recipe == INT8:
        return ao.Int8WeightOnlyConfig() if mode == "weight_only" else ao.Int8DynamicActivationInt8WeightConfig()
    if mode == "weight_only":
        return ao.Float8WeightOnlyConfig()
    return ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao.PerTensor() if recipe != ROWWISE else ao.PerRow()
    )


def linear(dtype: torch.dtype, exact: bool, largest: float = 448) -> tuple[nn.Sequential, Tensor]:
    """Return a linear and x. `exact`: the largest value of every row is `largest` times a power of two."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 96, bias=False)), torch.randn(32, 128)
    if exact:
        x[:, 3], model[0].weight.data[:, 5] = [largest * 2.0 ** round(math.log2(near / largest)) for near in (7, 0.11)]
    return model.to(dtype), x.to(dtype)


def both(
    ao: ModuleType, recipe: Any, mode: str, dtype: torch.dtype, exact: bool
) -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    """Return (ours, whole, theirs, x): an nn.Linear quantized by dlp, a frozen linear of dlp and an nn.Linear quantized by
    torchao, with the same weights, and an input."""
    if recipe == ROWWISE and mode == "dynamic" and not scales_rows_on_cpus():
        pytest.skip("torchao multiplies by torch._scaled_mm, which takes no scales of rows on a CPU here")
    largest = 127.5 if recipe == INT8 else 448
    (ours, x), (theirs, _) = linear(dtype, exact, largest), linear(dtype, exact, largest)
    whole = nn.Sequential(dlp.Linear(128, 96, recipe="bf16", dtype=dtype))
    whole.load_state_dict(ours.state_dict())
    dlp.freeze(whole, "**", recipe, mode)
    dlp.quantize_(ours, recipe, mode=mode)
    ao.quantize_(theirs, config(ao, recipe, mode))
    return ours, whole, theirs, x


def ulps(y: Tensor, expected: Tensor) -> Tensor:
    """Difference in units of the last place of bf16. For values below the mean magnitude, where sums cancel, the unit
    of the mean magnitude counts."""
    size = expected.float().abs().clamp(min=float(expected.float().abs().mean()))
    return (y.float() - expected.float()).abs() / torch.exp2(size.log2().floor() - 7)


@pytest.mark.parametrize(("recipe", "mode"), CASES)
@torch.no_grad()
def test_outputs_are_within_one_ulp_of_torchaos(ao, recipe, mode):
    ours, frozen, theirs, x = both(ao, recipe, mode, torch.bfloat16, True)
    codes, scale_inv = ours[0].weight.parts
    assert_bit_equal(codes, theirs[0].weight.qdata)
    assert_bit_equal(scale_inv.flatten(), theirs[0].weight.scale.flatten())
    assert ulps(ours(x), theirs(x)).max() <= 1
    assert ulps(frozen(x), theirs(x)).max() <= 1


@pytest.mark.parametrize(("recipe", "mode"), [CASES[0], *CASES[2:]])  # torchao casts rows in bf16 only
@torch.no_grad()
def test_in_fp32_they_are_so_for_any_values(ao, recipe, mode):
    ours, _, theirs, x = both(ao, recipe, mode, torch.float32, False)
    assert_bit_equal(ours[0].weight.parts[0], theirs[0].weight.qdata)
    scale_inv = theirs[0].weight.scale.flatten()  # torchao computes amax / 448; dlp computes 1 / (448 / amax)
    torch.testing.assert_close(ours[0].weight.parts[1].flatten(), scale_inv, rtol=2**-22, atol=0)
    assert ulps(ours(x), theirs(x)).max() <= 1


@pytest.mark.parametrize(("recipe", "mode"), CASES)
@torch.no_grad()
def test_scales_of_torchao_are_ours_rounded_to_bf16(ao, recipe, mode):
    """The scales of torchao equal the scales of dlp, rounded to bf16. The SQNR of dlp's outputs is at most 0.5 dB lower
    than that of torchao's outputs."""
    ours, _, theirs, x = both(ao, recipe, mode, torch.bfloat16, False)
    weight = ours[0].weight
    assert isinstance(weight, QuantizedParameter)
    assert_bit_equal(weight.parts[1].bfloat16().float().flatten(), theirs[0].weight.scale.flatten())
    exact = x.double() @ linear(torch.bfloat16, False)[0][0].weight.double().t()
    assert sqnr(ours(x), exact) > sqnr(theirs(x), exact) - 0.5


def gw_hp(role: str) -> Operand | None:
    """Factory of a custom recipe with the six casts of torchao's rowwise_with_gw_hp."""
    row, hp = RowwiseScaling(power_of_two=True), KeepHighPrecision()
    return {
        "linear_input": Operand(row, hp),
        "linear_weight": Operand(row, CurrentScaling(power_of_two=True)),
        "linear_grad_output": Operand(row, hp),
    }.get(role)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("theirs", "ours", "equal"),
    [
        ("tensorwise", "fp8_current", False),  # sums in another order
        ("rowwise", "fp8_rowwise", True),
        ("rowwise_with_gw_hp", dlp.CustomRecipe(gw_hp, name="gw_hp"), True),
    ],
)
def test_training_has_the_outputs_and_gradients_of_torchao(theirs, ours, equal, dtype):
    """Both libraries run emulated FP8 GEMMs. The rows of the weight differ in magnitude by up to 2^10, and so do its
    columns."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x, dy, plain = torch.randn(32, 128).to(dtype), torch.randn(32, 64).to(dtype), nn.Linear(128, 64, bias=False)
    plain.weight.data.mul_(torch.linspace(-8, 2, 64).exp2()[:, None]).mul_(torch.linspace(-8, 2, 128).exp2())
    layer = dlp.Linear(128, 64, recipe=ours, dtype=dtype)
    layer.load_state_dict(plain.to(dtype).state_dict())
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(theirs), emulate=True)
    model = convert_to_float8_training(nn.Sequential(plain), config=config)
    found = []
    for module, weight in ((layer, layer.weight), (model, model[0].weight)):
        given = x.clone().requires_grad_()
        y = module(given)
        y.backward(dy)
        found.append((y.detach(), given.grad, weight.grad))
    for name, mine, its in zip(("y", "dx", "dw"), *found, strict=True):
        if equal:
            assert_bit_equal(mine, its, name)
        assert ulps(mine, its).max() <= 1, name
