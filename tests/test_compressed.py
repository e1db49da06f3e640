"""Codes as compressed-tensors: the layout, also read by the package compressed-tensors, and models with codes that are
saved and loaded."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.flows import compressed
from dlp.quant import recipe as recipes
from dlp.quant.fake import deployed
from dlp.quant.integers import IntScaling
from dlp.quant.tensor import QuantizedTensor, as_bytes

pytest.importorskip("safetensors")

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
    encoded = compressed.encode(q, (144, 256), x_in_codes=scheme["input_activations"] is not None)
    exact = {name: float.fromhex(float(value).hex()) for name, value in encoded.exact.items()}
    back = compressed.decode(encoded.tensors, scheme["weights"], exact)
    assert torch.equal(back.dequantize(torch.float32), values[:144])
    if not (case == "mxfp8-2d" or case == "nvfp4"):  # scales of tiles, repeated for each row
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
    if case == "nvfp4":  # the package divides the scales by dlp's stored reciprocal, in bf16
        assert (read.float() - values[:144]).abs().max() <= 2**-7 * values.abs().max()
    else:
        assert torch.equal(read.float(), values[:144])


def test_zero_points_and_exact_numbers_come_back() -> None:
    w = torch.randn(48, 64) + 1
    for quantizer in (IntScaling(4, 32, symmetric=False), IntScaling(5, symmetric=False)):
        q = quantizer.cast(w, quantizer.observe(w))
        encoded = compressed.encode(q, (48, 64), x_in_codes=False)
        back = compressed.decode(encoded.tensors, compressed.scheme(q.format, None)["weights"], {})
        assert all(map(torch.equal, back.parts, q.parts))
    q, _ = quantized("nvfp4")
    zero = QuantizedTensor(q.format, (torch.zeros_like(q.parts[0]), q.parts[1], torch.tensor(0.0)))
    assert compressed.encode(zero, (144, 256), x_in_codes=True).tensors["weight_global_scale"].isfinite().all()


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


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no layer of the model holds codes"):
        dlp.save_compressed(model(), tmp_path / "a")
    odd = dlp.quantize_(nn.Sequential(nn.Linear(40, 32)), "mxfp8")
    with pytest.raises(
        ValueError, match=r"0: compressed-tensors has no padding: a contraction of 40 is not a multiple of 32"
    ):
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
