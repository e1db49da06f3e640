"""dlp refuses loads and calls whose shapes are right but whose tensors have another meaning, such as codes loaded as
values. torch alone would compute with these tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from tests.refusals import refuses

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def quantized(recipe: str = "fp8_current") -> nn.Module:
    torch.manual_seed(0)
    return dlp.quantize_(nn.Sequential(nn.Linear(64, 64)), recipe, mode="dynamic")


def layer(recipe: str) -> nn.Module:
    return nn.Sequential(dlp.Linear(64, 64, True, recipe=recipe))


def load_codes(recipe: str, part: str, wrong: Callable[[Tensor], Any]) -> None:
    model = quantized(recipe)
    state: dict[str, Any] = dlp.quantized_state_dict(model)
    dlp.load_quantized_state_dict(model, state | {f"0.weight.{part}": wrong(state[f"0.weight.{part}"])})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_x_that_holds_no_floats_is_refused_by_codes_and_by_layers(dtype: torch.dtype):
    for model in (quantized(), quantized("int8"), layer("fp8_current"), layer("bf16")):
        with pytest.raises(ValueError, match=rf"must be bf16, fp16.*; got {dtype}: convert (it|x) before the layer"):
            model(X.to(dtype))
    assert quantized()(X.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_codes_are_not_loaded_as_values(dtype: torch.dtype):
    model = layer("fp8_current")
    with refuses(rf"0.weight: the tensor to load has dtype {dtype}, and codes .*: dequantize to bf16"):
        model.load_state_dict({"0.weight": X.repeat(8, 1).to(dtype)}, strict=False)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_a_file_of_codes_holds_tensors_with_memory(recipe: str):
    for part, wrong, got in (
        ("codes", lambda each: each.tolist() if recipe == "nvfp4" else [1], "list"),
        ("codes", lambda each: each.to("meta"), "meta"),
        ("format", lambda each: "fp8", "str"),
    ):
        with pytest.raises(ValueError, match=rf"0.weight.{part} must be a tensor with memory, .*; got {got}"):
            load_codes(recipe, part, wrong)
    with pytest.raises(ValueError, match=r"was saved as codes of .*, and the model has codes of"):
        load_codes(recipe, "format", lambda each: torch.tensor([1.5]))


def to_nan(part: torch.Tensor) -> torch.Tensor:
    dtype = torch.float8_e8m0fnu if part.dtype == torch.uint8 else part.dtype
    return torch.full(part.shape, torch.nan).to(dtype).view(part.dtype)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "int8"])
def test_a_file_of_codes_has_no_nan(recipe: str):
    state = dlp.quantized_state_dict(quantized(recipe))
    names = {name.removeprefix("0.weight."): part for name, part in state.items() if name != "0.bias"}
    floats = [name for name, part in names.items() if part.is_floating_point() or name == "scale_e8m0"]
    for part in floats:
        with refuses(f"0.weight.{part} has NaN or Inf, which would spread to every y: save the codes"):
            load_codes(recipe, part, to_nan)
    assert [each for each in floats if each != "codes"], "a scale"


@torch.no_grad()
def test_a_file_of_codes_has_no_static_scale_that_no_calibration_makes():
    model = nn.Sequential(nn.Linear(64, 64))
    with dlp.calibrate(model):
        model(X)
    dlp.quantize_(model, "fp8_current", mode="static")
    state = dlp.quantized_state_dict(model)
    for wrong in (torch.nan, 0.0, -1.0):
        with pytest.raises(ValueError, match=r"0.x_scale must be finite and positive, got .*: calibrate again"):
            dlp.load_quantized_state_dict(model, state | {"0.x_scale": torch.full_like(state["0.x_scale"], wrong)})


def test_a_state_of_parameters_is_no_state_of_dlp():
    model = layer("fp8_delayed")
    with refuses(r"load_state_dict: the state lacks 'steps': pass what dlp.state_dict returned"):
        dlp.load_state_dict(model, model.state_dict())


@pytest.mark.parametrize(
    ("part", "wrong", "rule"),
    [
        ("scale", lambda each: each * torch.nan, "finite floats above 0"),
        ("scale", lambda each: -each, "finite floats above 0"),
        ("scale", lambda each: each.to(torch.int32), "finite floats above 0"),
        ("history", lambda each: each * torch.nan, "floats of at least 0"),
        ("history", lambda each: each - 1, "floats of at least 0"),
        ("target", lambda each: each * 0, "finite floats above 0"),
    ],
)
def test_scales_that_no_run_makes_are_not_loaded(part: str, wrong: Callable[[Tensor], Tensor], rule: str):
    model = layer("fp8_delayed")
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    model(X).sum().backward()
    dlp.end_step(model)
    state = dlp.state_dict(model)
    key = next(name for name in state if name.endswith(f".{part}"))
    with pytest.raises(ValueError, match=f"load_state_dict: {key} must be {rule}: load an earlier checkpoint, or"):
        dlp.load_state_dict(model, {**state, key: wrong(state[key])})
    dlp.load_state_dict(model, {name: each + torch.inf if "history" in name else each for name, each in state.items()})


def test_values_with_nan_become_no_codes_of_a_held_weight():
    with dlp.quantized_model_init():
        model = layer("fp8_current")
    dlp.attach(model, dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, 0.1)))
    y, state = model(X), dlp.state_dict(model)
    with pytest.raises(ValueError, match="0.weight: the weight has NaN or Inf, which codes would hide: restore"):
        model.load_state_dict({"0.weight": torch.full((64, 64), torch.nan)}, strict=False)
    for wrong, said in (
        (state["masters.0"] * torch.nan, "masters.0 must be finite floats: load an"),
        (state["masters.0"].to(torch.int8), "masters.0 must be finite floats: load an"),
        (state["masters.0"][:32], r"masters.0 has shape \(32, 64\), and the weight \(64, 64\): load the state of this"),
    ):
        with pytest.raises(ValueError, match=said):
            dlp.load_state_dict(model, {**state, "masters.0": wrong})
    assert torch.equal(model(X), y), "a refusal changes nothing"


def test_logits_are_floats():
    with pytest.raises(TypeError, match=r"cross_entropy: logits must be floating-point; got torch.int64"):
        dlp.cross_entropy(torch.ones(2, 5, dtype=torch.int64), torch.tensor([0, 1]))
