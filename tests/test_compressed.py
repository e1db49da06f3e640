"""Quantized models in the compressed-tensors layout: the layout, which the package compressed-tensors also reads, and
saved and loaded models."""

from __future__ import annotations

import importlib.util
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.flows import compressed
from dlp.flows.compressed_models import exact_of, header
from dlp.quant import recipe as recipes
from dlp.quant.affine import code_range
from dlp.quant.fake import deployed
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.integers import IntScaling
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.tensor import QuantizedTensor, as_bytes

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from tests.refusals import refuses

FORMATS: dict[str, Any] = {
    "fp8_current": "fp8_current", "fp8_rowwise": "fp8_rowwise", "fp8_block": "fp8_block", "nvfp4": "nvfp4",
    "mxfp8": "mxfp8", "int8": "int8", "int4": "qat",
    "fp8_block-1x128": {"name": "fp8_block", "w_block_dim": 1, "x_block_dim": 2},
    "mxfp8-2d": {"name": "mxfp8", "enable_2d_quantization": True},
    "fp8_block-any": {"name": "fp8_block", "power_of_two": False}, "int3": {"name": "qat", "weight": "int3 group 32"},
    "int6": {"name": "qat", "weight": "int6 channel", "activation": "none"},
}  # fmt: skip
FEW = ("fp8_current", "fp8_rowwise", "fp8_block", "nvfp4", "mxfp8", "int8", "int4")


def quantized(recipe: Any, shape: tuple[int, int] = (144, 256)) -> tuple[QuantizedTensor, Any]:
    made = deployed(recipes.as_recipe(recipe))
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 16
    padded = made.w.rowwise.format.padded(w)
    return made.w.rowwise.cast(padded, made.w.rowwise.observe(padded)), made


@pytest.mark.parametrize("case", FORMATS)
def test_the_layout_holds_the_codes_and_the_package_reads_the_same_values(case: str) -> None:
    q, made = quantized(FORMATS[case])
    values = q.dequantize(torch.float32)
    scheme = compressed.scheme(q.format, None if made.x.rowwise.format.keeps_source else made.x.rowwise)
    encoded = compressed.encode(q, (144, 256), None if scheme["input_activations"] is None else made.x.rowwise)
    exact = {name: exact_of(text) for name, text in header(encoded.exact).items()}
    back = compressed.decode(encoded.tensors, scheme["weights"], exact)
    assert torch.equal(back.dequantize(torch.float32), values[:144])
    if not (case == "mxfp8-2d" or case == "nvfp4"):  # files of these store the scale of a tile once per row
        assert back.format == q.format
        for part, before in zip(back.parts, q.parts, strict=True):
            assert torch.equal(as_bytes(part), as_bytes(before))
    theirs = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(**compressed.quantization_config({"0": scheme}, ["0"]))
    assert theirs and config.format == scheme["format"] and config.quantization_status == "compressed"
    group = config.config_groups["group_0"]
    read = BaseCompressor.get_value_from_registry(str(group.format)).decompress(encoded.tensors, group)["weight"]
    if case == "nvfp4":  # the package decodes in bf16, with a division, so bits differ
        assert (read.float() - values[:144]).abs().max() <= 2**-7 * values.abs().max()
    else:
        assert torch.equal(read.float(), values[:144])


def test_zero_points_and_exact_numbers_come_back() -> None:
    w = torch.randn(48, 64) + 1
    for quantizer in (IntScaling(4, 32, symmetric=False), IntScaling(5, symmetric=False)):
        q = quantizer.cast(w, quantizer.observe(w))
        encoded = compressed.encode(q, (48, 64), None)
        back = compressed.decode(encoded.tensors, compressed.scheme(q.format, None)["weights"], {})
        assert all(map(torch.equal, back.parts, q.parts))
    q, _ = quantized("nvfp4")
    zero = QuantizedTensor(q.format, (torch.zeros_like(q.parts[0]), q.parts[1], torch.tensor(0.0)))
    assert compressed.encode(zero, (144, 256), CurrentScaling()).tensors["weight_global_scale"].isfinite().all()


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128), nn.LayerNorm(128)).to(dtype)


@pytest.mark.parametrize("mode", ["weight_only", "dynamic", "static"])
def test_a_model_comes_back_with_the_same_forward(tmp_path, mode: Any) -> None:
    x = torch.randn(8, 128).bfloat16()
    for case in FEW:
        if mode == "static" and case != "fp8_current":
            continue
        plain = model()
        with torch.no_grad(), dlp.calibrate(plain):
            plain(x)
        chosen = ("0",) if case == "int8" else ("0", "2")
        dlp.quantize_(plain, FORMATS[case], lambda module, name, chosen=chosen: name in chosen, mode=mode)
        said = dlp.save_compressed(plain, tmp_path / case)
        other = model().apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
        given = None if mode == "static" or case == "fp8_current" else FORMATS[case]
        layers = dlp.load_compressed(other, tmp_path / case, given, mode=mode)
        assert said.startswith(f"{len(layers)} layers as codes (")
        assert torch.equal(other(x), plain(x)), case
        config = json.loads((tmp_path / case / "config.json").read_text())["quantization_config"]
        assert config["ignore"] == (["2"] if case == "int8" else [])


@pytest.mark.parametrize("limits", [(4 << 30, 40_000), (40_000, 4 << 30), (20_000, 40_000)])
def test_a_folder_holds_only_the_last_model(tmp_path, limits: tuple[int, int], monkeypatch) -> None:
    """A save that writes other files than an earlier save into the same folder deletes the earlier files."""
    x = torch.randn(8, 128).bfloat16()
    for factor, limit in enumerate(limits, start=1):
        monkeypatch.setattr("dlp.flows.compressed_models.FILE_BYTES", limit)
        plain = model()
        with torch.no_grad():
            plain[0].weight *= factor
        dlp.save_compressed(dlp.quantize_(plain, "int8"), tmp_path)
    other = model()
    dlp.load_compressed(other, tmp_path)
    assert torch.equal(other(x), plain(x))
    index = tmp_path / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {file.name for file in tmp_path.glob("*.safetensors")} == names


def test_other_users_can_read_the_files(tmp_path) -> None:
    plain = model()
    dlp.save_compressed(dlp.quantize_(plain, "int8"), tmp_path)
    dlp.lora(plain, rank=4)
    dlp.save_lora(plain, tmp_path)
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert {file.name: oct(file.stat().st_mode) for file in tmp_path.iterdir() if file.stat().st_mode != mode} == {}


STATIC: dict[str, Any] = {
    "fp8_current": "fp8_current", "fp8_rowwise": "fp8_rowwise", "int8": "int8",
    "fp8_rowwise-any": {"name": "fp8_rowwise", "power_of_two": False}, "int8-wide": {"name": "int8", "narrow": False},
    "zero-points": {"name": "qat", "weight": "int8 channel"}, "int4-groups": "qat",
    "int6-zero-points": {"name": "qat", "weight": "int8 channel", "activation": "int6 token"},
}  # fmt: skip


@pytest.mark.parametrize("case", STATIC)
@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_static_scales_of_x_come_back_with_the_same_forward(tmp_path, case: str, frozen: bool) -> None:
    """Load with and without the recipe: y has equal bits. Without the exact range in the header, as in files of other
    programs, the scale of x agrees within 2^-22 (relative), and y within 1e-2 (relative) plus 5e-2 (absolute)."""
    x, saved = 3 * torch.randn(8, 128).bfloat16(), model()
    if frozen:
        for i in (0, 2):
            sizes = saved[i].in_features, saved[i].out_features
            layer = dlp.Linear(*sizes, bias=True, recipe="bf16", dtype=torch.bfloat16)
            layer.load_state_dict(saved[i].state_dict())
            saved[i] = layer
    with dlp.calibrate(saved, observer="minmax"):
        saved(x / 2)  # so that larger x saturate
    if frozen:
        dlp.freeze(saved, "**", STATIC[case], "static")
    else:
        dlp.quantize_(saved, STATIC[case], mode="static")
    y = saved(x)
    dlp.save_compressed(saved, tmp_path)
    for recipe in (None, STATIC[case]):
        other = model()
        dlp.load_compressed(other, tmp_path, recipe)
        assert torch.equal(other(x), y), recipe
    (file,), config = tmp_path.glob("*.safetensors"), json.loads((tmp_path / "config.json").read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    stated = scheme["input_activations"]
    assert stated["strategy"] == "tensor" and stated["dynamic"] is False
    tensors = load_file(file)
    assert ("0.input_zero_point" in tensors) is not stated["symmetric"]
    used: Any = other[0].weight
    slot = ScaleSlot(used.x_scale, torch.zeros(()))
    decoded = used.use.activation.cast(x.float(), None, slot=slot).dequantize()
    scale, zero = tensors["0.input_scale"], tensors.get("0.input_zero_point", torch.tensor([0])).int()
    ends = (-448, 448) if stated["type"] == "float" else code_range(stated["num_bits"])
    narrow = case == "int8"  # code -128 is unused; the layout cannot state this
    assert decoded.min() == ((ends[0] + narrow) - zero) * scale and decoded.max() == (ends[1] - zero) * scale
    save_file(tensors, file, metadata={"format": "pt"})
    for recipe in (None, STATIC[case]):
        foreign = model()
        dlp.load_compressed(foreign, tmp_path, recipe)
        theirs: Any = foreign[0].weight
        activation = theirs.use.activation
        parts = compressed.x_parts(activation, theirs.x_scale)
        torch.testing.assert_close(parts[0], scale, rtol=2**-22, atol=0)
        assert len(parts) == 1 or (parts[1] == zero).all()
        torch.testing.assert_close(foreign(x), y, rtol=1e-2, atol=5e-2)
    if importlib.util.find_spec("compressed_tensors") is None:
        return
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    read = fake_quantize(x.float(), scale, tensors.get("0.input_zero_point"), QuantizationArgs(**stated))
    torch.testing.assert_close(read.clamp(min=float(decoded.min())), decoded, rtol=1e-6, atol=0)


@torch.no_grad()
def test_a_static_scale_of_another_cast_is_refused(tmp_path) -> None:
    x, saved = torch.randn(8, 128).bfloat16(), model_with_buffer()
    with dlp.calibrate(saved, observer="minmax"):
        saved(x)
    dlp.quantize_(saved, {"name": "qat", "weight": "int8 channel"}, mode="static")
    saved[1].max_scale.fill_(1)  # a user's buffer, which is saved like other buffers
    dlp.save_compressed(saved, tmp_path)
    other = model_with_buffer()
    with refuses(r"0: the file states a static cast of x with .*, and int8 casts x to int8\[row\]"):
        dlp.load_compressed(other, tmp_path, "int8")
    dlp.load_compressed(other, tmp_path, mode="weight_only")
    assert other[1].max_scale.all() and other[0].weight.x_scale is None
    other = model_with_buffer()
    dlp.load_compressed(other, tmp_path, mode="dynamic")
    assert other[0].weight.x_scale is None and other[0].weight.use.activation == IntScaling(symmetric=False)
    e5m2 = dlp.CustomRecipe({"linear_input": CurrentScaling("e5m2"), "linear_weight": CurrentScaling()}.get)
    saved = model()
    with dlp.calibrate(saved):
        saved(x)
    dlp.quantize_(saved, e5m2, mode="static")
    with refuses(r"0: compressed-tensors has no static scale of this x for weights of fp8_tensor"):
        dlp.save_compressed(saved, tmp_path)


def model_with_buffer() -> nn.Module:
    made = model()
    made[1].register_buffer("max_scale", torch.zeros(2))
    return made


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no layer of the model holds codes"):
        dlp.save_compressed(model(), tmp_path / "a")
    odd = dlp.quantize_(nn.Sequential(nn.Linear(40, 32)), "mxfp8")
    with refuses(r"0: compressed-tensors has no padding: a contraction of 40 is not a multiple of 32"):
        dlp.save_compressed(odd, tmp_path / "a")
    hybrid = {"name": "fp8_current", "fp8_format": "E4M3"}
    dlp.save_compressed(dlp.quantize_(model(), hybrid), tmp_path / "b")
    with pytest.raises(ValueError, match=r"0 holds fp8_tensor\[e4m3\], and nvfp4 has weights of nvfp4"):
        dlp.load_compressed(model(), tmp_path / "b", "nvfp4")
    with pytest.raises(ValueError, match="0 has codes, and the model has no nn.Linear 0"):
        dlp.load_compressed(nn.Sequential(nn.Embedding(4, 4)), tmp_path / "b")
    with pytest.raises(ValueError, match="no config.json with a quantization_config"):
        dlp.load_compressed(model(), tmp_path)


@pytest.mark.parametrize("case", FEW)
def test_save_pretrained_after_quantize_(tmp_path, case: str) -> None:
    """The test uses transformers' classes, which read the folder with the package compressed-tensors if installed."""
    transformers = pytest.importorskip("transformers")
    from tests import hf_models

    family = ("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")[FEW.index(case) % 3]
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    made = hf_models.make(family, **sizes).eval()
    dlp.quantize_(made, FORMATS[case], lambda module, name: "layers" in name)
    made.save_pretrained(tmp_path)
    ids, other = hf_models.tokens(0), hf_models.make(family, **sizes).eval()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    layers = dlp.load_compressed(other, tmp_path)
    assert len(layers) == 14
    other_only = hf_models.make(family, **sizes).eval()
    dlp.load_compressed(other_only, tmp_path, mode="weight_only")
    assert torch.equal(other_only(input_ids=ids).logits, made(input_ids=ids).logits)
    with pytest.raises(ValueError, match="'push_to_hub' has no meaning"):
        made.save_pretrained(tmp_path, push_to_hub=True)
    pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        found = theirs(input_ids=ids).logits.float()
    expected = other_only(input_ids=ids).logits
    assert (found - expected).norm() <= 0.02 * expected.norm(), (found - expected).norm() / expected.norm()
