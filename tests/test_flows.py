"""Quantization for inference on one rank: freeze, calibrate, saved codes, and quantize_."""

from __future__ import annotations

import copy
import importlib.util
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dlp
from dlp.flows.codes import load_quantized_state_dict
from dlp.parallel.linear.capture import describe
from dlp.parallel.linear.state import weights_in
from dlp.quant.parameter import QuantizedParameter
from dlp.runtime import capture as kernels_captured
from tests.emulated import emulation
from tests.metrics import assert_bit_equal
from tests.ops_models import Watched
from tests.refusals import refuses

FROZEN = ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8"]
STATIC = ["fp8_current", "fp8_rowwise", "int8"]
FLOWS = [
    *((recipe, mode) for recipe in FROZEN for mode in ("weight_only", "dynamic")),
    *((recipe, "static") for recipe in STATIC),
    *((dlp.recipe("qat", weight="int8 channel"), mode) for mode in ("dynamic", "static")),  # x has zero points
]
LARGEST = {"nvfp4": 0.25}  # bound of the relative error; 0.06 for recipes of 8 bits


def net(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width, bias=False)).bfloat16()


def batch(seed: int = 1, width: int = 64) -> torch.Tensor:
    return torch.randn(32, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def converted() -> nn.Module:
    """Return the model of `net`, with the same weights, in layers of dlp."""
    made, options = net(), {"recipe": "bf16", "dtype": torch.bfloat16}
    model = nn.Sequential(dlp.Linear(64, 128, True, **options), nn.SiLU(), dlp.Linear(128, 64, **options))
    model.load_state_dict(made.state_dict())
    return model


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
@pytest.mark.parametrize("recipe", FROZEN)
@torch.no_grad()
def test_freeze_holds_rowwise_codes(recipe, mode):
    model, plain = converted(), net()
    expected = model(batch())
    assert dlp.freeze(model, "**", recipe, mode) == ["0", "2"]
    y = model(batch())
    assert 0 < error(y, expected) < LARGEST.get(recipe, 0.06)
    dlp.quantize_(plain, recipe, mode=mode)
    assert_bit_equal(plain(batch()), y, "the same codes, in a plain model")
    parts = model[0].core.weights.parts
    assert len(parts.parts) == len(parts.rowwise), "no columnwise operand"
    assert model[0].weight.isnan().all() and not model[0].weight.requires_grad


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@torch.no_grad()
def test_frozen_layers_are_captured_and_equal_blocks_share_a_graph(mode, monkeypatch):
    """The test uses an emulated device. A layer compiles whether or not it ran before it was frozen."""
    with emulation():
        model = nn.Sequential(*[converted() for _ in range(3)])
        if mode == "static":
            with dlp.calibrate(model):
                model(batch())
        dlp.freeze(model, "**", "fp8_current", mode)
        with monkeypatch.context() as patch:
            patch.setattr(kernels_captured, "runs_kernels", lambda x: False)
            expected = [model(batch(seed)) for seed in range(4)]
        for weights in weights_in(model):
            weights.dtype = None  # the state before the first forward
        torch.compiler.reset()
        counters.clear()
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        for seed in range(4):
            assert_bit_equal(model(batch(seed)), expected[seed])
        # Each compiled module has two linears. Each linear has a second graph, because the first forward sets `dtype`.
        assert counters["stats"]["unique_graphs"] <= 4
        assert "forward: captured in 6 layers" in describe(model), describe(model)


@pytest.mark.parametrize("observer", ["max", "average", "mse", lambda window: window.amax(0) * 1.5])
@torch.no_grad()
def test_static_scales_are_what_was_observed(observer):
    model, plain, seen = converted(), net(), [batch(seed) for seed in range(1, 4)]
    expected = model(batch())
    for each in (model, plain):
        with dlp.calibrate(each, "**", observer):
            for x in seen:
                each(x)
    amaxes = torch.stack([x.abs().amax().float() for x in seen])
    found = 448 / model[0].x_scale
    if observer == "mse":
        assert 0.5 * amaxes.amax() <= found <= amaxes.amax()
    else:
        wanted = {"max": amaxes.amax(), "average": amaxes.mean()}.get(observer, amaxes.amax() * 1.5)
        torch.testing.assert_close(found, wanted)
    dlp.freeze(model, "**", "fp8_current", mode="static")
    dlp.quantize_(plain, "fp8_current", mode="static")
    y = model(batch())
    assert_bit_equal(plain(batch()), y)
    assert error(y, expected) < 0.06
    model[0].core.session.end_step()
    with torch.enable_grad():
        model(100 * batch())
    model[0].core.session.end_step()
    assert_bit_equal(model(batch()), y, "scales stand still")


@pytest.mark.parametrize(
    ("observer", "x", "said"),
    [
        (
            "max",
            torch.zeros(4, 64),
            "0 received only zeros or no tokens, from which no scale can be computed: calibrate with other batches",
        ),
        ("max", torch.full((4, 64), torch.inf), "x of 0 was not finite in a batch: leave this batch out"),
        ("max", torch.full((4, 64), torch.nan), "x of 0 was not finite in a batch: leave this batch out"),
        (
            "average",
            torch.full((4, 64), 1.0).index_fill(1, torch.tensor(3), torch.nan),
            "x of 0 was not finite in a batch",
        ),
        ("mse", torch.full((4, 64), 1.0).index_fill(1, torch.tensor(3), torch.nan), "x of 0 was not finite in a batch"),
        (lambda window: window.amax(), None, r"the observer returned \[\], and must return one amax per layer, \[2\]"),
        (
            lambda window: window.amax(1),
            None,
            r"the observer returned \[1\], and must return one amax per layer, \[2\]",
        ),
        (lambda window: -window.amax(0), None, "the observer found an amax of -.* for 0: .* finite number above 0"),
        (lambda window: window.amax(0) * torch.nan, None, "the observer found an amax of nan for 0"),
    ],
)
@torch.no_grad()
def test_what_is_no_scale_is_refused(observer, x, said):
    """`calibrate` refuses an observed value that is no valid scale, and leaves the layers without scales."""
    model = net()
    with pytest.raises(ValueError, match=f"^calibrate: {said}"), dlp.calibrate(model, "**", observer):
        model(batch() if x is None else x.bfloat16())
    assert not hasattr(model[0], "x_scale") and not model[0]._forward_pre_hooks


@torch.no_grad()
def test_parts_of_a_model_may_run_alone():
    model, other = net(), net()
    with dlp.calibrate(model), dlp.calibrate(other):
        model(batch())
        other[2](other[1](other[0](batch())))
    assert all(model[i].x_scale == other[i].x_scale for i in (0, 2))


@pytest.mark.parametrize("plain", [True, False])
@torch.no_grad()
def test_a_scale_that_was_rounded_is_refused(plain):
    model = net() if plain else converted()
    with dlp.calibrate(model):
        model(batch())
    model.bfloat16()
    with refuses("0: x_scale was converted to torch.bfloat16 .* calibrate again after a change of dtype"):
        dlp.quantize_(model, "fp8_current", mode="static") if plain else dlp.freeze(
            model, "**", "fp8_current", "static"
        )


@torch.no_grad()
def test_x_may_come_by_name():
    model, other = net(), net()
    with dlp.calibrate(model), dlp.calibrate(other):
        model(batch())
        other[2](input=other[1](other[0](input=batch())))
        other(torch.zeros_like(batch()))
    assert model[2].x_scale == other[2].x_scale


@torch.no_grad()
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("recipe", "mode"), [("fp8_current", "static"), ("nvfp4", "dynamic"), ("mxfp8", "weight_only")]
)
def test_codes_are_saved_without_values(recipe, mode, plain, tmp_path):
    def quantized(model: nn.Module) -> nn.Module:
        if mode == "static":
            with dlp.calibrate(model):
                model(batch())
        return dlp.quantize_(model, recipe, mode=mode) if plain else (dlp.freeze(model, "**", recipe, mode), model)[1]

    model = quantized(net() if plain else converted())
    torch.save(dlp.quantized_state_dict(model), tmp_path / "codes.pt")
    state = torch.load(tmp_path / "codes.pt", weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert {"0.weight.codes", "0.bias"} <= state.keys() and "0.weight" not in state
    other = net() if plain else converted()
    for parameter in other.parameters():
        parameter.zero_()
    other = quantized(other) if mode != "static" else quantized_alike(other, model, plain, recipe)
    dlp.load_quantized_state_dict(other, state)
    assert_bit_equal(other(batch()), model(batch()))
    state.pop("0.bias")
    with pytest.raises(ValueError, match=r"the saved codes lack '0\.bias'"):
        load_quantized_state_dict(other, state)


def quantized_alike(other: nn.Module, model: nn.Module, plain: bool, recipe: str) -> nn.Module:
    """A quantized model with scales that differ from the scales that will be loaded."""
    with dlp.calibrate(other):
        other(3 * batch())
        # Run each layer alone: weights are zero, so x of the second layer would be zero
        for layer in (other[0], other[2]):
            layer(torch.ones(4, layer.in_features).bfloat16())
        other(3 * batch())
    if plain:
        return dlp.quantize_(other, recipe, mode="static")
    dlp.freeze(other, "**", recipe, "static")
    return other


@torch.no_grad()
@pytest.mark.parametrize("plain", [True, False])
def test_buffers_that_are_not_persistent_are_not_saved_with_codes(plain):
    def quantized(seed: int) -> nn.Module:
        model = net() if plain else converted()
        model[1].register_buffer("kept", torch.full((2,), float(seed)))
        model[1].register_buffer("derived", torch.full((2,), float(seed)), persistent=False)
        return dlp.quantize_(model, "fp8_current") if plain else (dlp.freeze(model, "**", "fp8_current"), model)[1]

    state, other = dlp.quantized_state_dict(quantized(1)), quantized(2)
    assert "1.kept" in state and "1.derived" not in state
    dlp.load_quantized_state_dict(other, state)
    assert other[1].kept[0] == 1 and other[1].derived[0] == 2


@torch.no_grad()
def test_codes_of_another_width_are_refused():
    """The message names the format, before shapes are compared."""
    state = dlp.quantized_state_dict(dlp.quantize_(net(), {"name": "qat", "weight": "int4 group 32"}))
    model = dlp.quantize_(net(), {"name": "qat", "weight": "int3 group 32"})
    with refuses(r"0.weight was saved as codes of int4\[32\], and the model has codes of int3\[32"):
        dlp.load_quantized_state_dict(model, state)


@torch.no_grad()
@pytest.mark.parametrize("recipe", FROZEN)
def test_a_model_on_the_meta_device_gets_memory_before_codes(recipe):
    expected = dlp.quantize_(net(), recipe)
    with torch.device("meta"):
        model = dlp.quantize_(net(), recipe)
    with refuses(r"x is on cpu, and the codes of the weight .* are on meta: move x or the weight"):
        model(batch())
    with pytest.raises(ValueError, match=r"is on the meta device .*: call model.to_empty\(device=...\) first"):
        dlp.load_quantized_state_dict(model, dlp.quantized_state_dict(expected))
    dlp.load_quantized_state_dict(model.to_empty(device="cpu"), dlp.quantized_state_dict(expected))
    assert_bit_equal(model(batch()), expected(batch()))


def test_what_cannot_be_done_is_refused():
    model = converted()
    with pytest.raises(ValueError, match="static mode has no scale of x"):
        dlp.freeze(model, "**", "fp8_current", mode="static")
    with pytest.raises(ValueError, match="keeps weights in high precision"):
        dlp.freeze(model, "**", "bf16")
    for mode in ("weight_only", "dynamic", "static"):
        by_history = "^0: fp8_delayed uses delayed scaling for weights, .*: choose fp8_current"
        with pytest.raises(ValueError, match=by_history):
            dlp.freeze(model, "**", "fp8_delayed", mode)
        with pytest.raises(ValueError, match=by_history):
            dlp.quantize_(net(), "fp8_delayed", mode=mode)
    with pytest.raises(ValueError, match="mode must be one of"):
        dlp.freeze(model, "**", "fp8_current", mode="fast")
    with pytest.raises(ValueError, match="a static scale is one per tensor"):
        dlp.quantize_(net(), "nvfp4", mode="static")
    with (
        pytest.raises(ValueError, match=r"did not run: call the model inside dlp.calibrate, not compiled"),
        dlp.calibrate(model),
    ):
        pass
    assert model[0].weight.isfinite().all(), "nothing was changed"
    core = model[2].core
    core.session.graphed = {core.spec.members}
    with pytest.raises(ValueError, match="the recipe bf16 of this layer is captured in a CUDA graph"):
        dlp.freeze(model, "**", "fp8_current")
    core.session.graphed = set()
    dlp.freeze(model, "2", "fp8_current")
    with pytest.raises(ValueError, match=r"2: the weight is quantized-only already \(fp8_tensor.* codes\)"):
        dlp.freeze(model, "**", "mxfp8")
    assert model[0].weight.isfinite().all(), "nothing was changed"
    dlp.freeze(model, "0", "fp8_current")
    x = batch().requires_grad_()
    for mode in (nullcontext(), Watched()):  # eager; as opaque ops
        with mode, pytest.raises(RuntimeError, match="backward reached a frozen layer"):
            model(x).sum().backward()


def test_a_filter_chooses():
    model = dlp.quantize_(net(), "fp8_current", lambda module, name: module.in_features == 64)
    assert [isinstance(model[i].weight, QuantizedParameter) for i in (0, 2)] == [True, False]
    copied = copy.deepcopy(model)
    assert_bit_equal(copied(batch()), model(batch()))


def test_configs_of_torchao_are_handed_on(monkeypatch):
    ao = pytest.importorskip("torchao.quantization")
    config, model = ao.Int8WeightOnlyConfig(), net()
    assert dlp.quantize_(model, config, lambda module, name: name == "2") is model
    assert [type(model[i].weight).__module__.split(".")[0] for i in (0, 2)] == ["torch", "torchao"]
    named = dlp.quantize_(net(), ao.FqnToConfig({"0": ao.Float8WeightOnlyConfig(), "2": config}))
    assert [type(named[i].weight).__name__ for i in (0, 2)] == ["Float8Tensor", "Int8Tensor"]
    with pytest.raises(ValueError, match=r"FqnToConfig defines the quantization of x; leave mode='dynamic' out"):
        dlp.quantize_(net(), ao.FqnToConfig({"0": config}), mode="dynamic")
    with pytest.raises(ValueError, match=r"0 is a layer of dlp\.convert, .* call dlp\.freeze"):
        dlp.quantize_(converted(), config)
    if importlib.util.find_spec("mslk") is None:  # the extra 'ao' does not install this package
        with refuses("torchao's Int4WeightOnlyConfig needs a package that the extra 'ao' does not"):
            dlp.quantize_(nn.Sequential(nn.Linear(256, 256)).bfloat16(), ao.Int4WeightOnlyConfig(group_size=32))
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"torchao, which is not installed: pip install 'dlp\[ao\]'"):
        dlp.quantize_(net(), config)


def test_nothing_to_quantize_is_refused():
    with pytest.raises(ValueError, match="no nn.Linear that filter_fn lets through"):
        dlp.quantize_(net(), "fp8_current", lambda module, name: False)
    with refuses(r"filter_fn must be a function of \(module, name\) that returns a bool; got '0'", TypeError):
        dlp.quantize_(net(), "fp8_current", "0")
    with pytest.raises(ValueError, match=r"0 is a layer of dlp\.convert"):
        dlp.quantize_(converted(), "fp8_current")
