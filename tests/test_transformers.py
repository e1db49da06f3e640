"""Weights of every family, imported and exported: `transformers` computes the same as dlp's models, and reads the
exported files."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import convert_hf
from launch.models import families
from launch.models.decoder import settings_of
from launch.models.modules import Llama
from launch.weights import weights_only

pytest.importorskip("safetensors")
pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", {"head_dim": 8, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied, linear": ("Llama", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_scaling": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1e6}),
}  # fmt: skip


def random_model(kind: str, settings: dict[str, Any]) -> Any:
    """Return an fp32 model with random weights, also in norms and biases."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL, **settings))
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = parameter.data + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise
    return model.eval()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_key_that_transformers_reads_is_known(family: str) -> None:
    """dlp knows all keys of config.json that transformers reads, their defaults, and which keys may be null."""
    transformers = pytest.importorskip("transformers")
    known, name = families.FAMILIES[family], families.FAMILIES[family].architecture
    model = getattr(transformers, name)
    read = set(re.findall(r"config\.([a-z]\w*)", inspect.getsource(inspect.getmodule(model))))
    ours = {*families.KEYS.values(), *dict(known.optional), *dict(known.fixed)}
    beside = {"rope_parameters", "layer_types", "pad_token_id"}  # read or checked elsewhere, or without effect
    assert read - ours - beside == set()
    fields = {each.name: each for each in dataclasses.fields(model.config_class)}
    for key, default in (*known.optional, *known.fixed):
        assert key not in fields or fields[key].default == default, key
        if key in dict(known.optional) and key in fields and "None" in str(fields[key].type):
            assert key in known.nullable


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal_there_and_back(case: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[case])
    theirs.save_pretrained(tmp_path / "published", max_shard_size="20KB")  # several files and an index
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(0))
    expected: Tensor = theirs(tokens).logits

    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    shape = weights_only.Reader(tmp_path / "ours").model()
    ours = Llama(shape, torch.float32)
    weights_only.load(tmp_path / "ours", ours, settings_of(shape))
    torch.testing.assert_close(ours(tokens).unflatten(0, (2, -1)), expected, atol=2e-5, rtol=2e-5)

    convert_hf.export(tmp_path / "ours", tmp_path / "back", "fp32", None, limit=20_000)
    back = type(theirs).from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert torch.equal(back(tokens).logits, expected)
    assert back.config.eos_token_id is None  # the default of the library is token 2, which would end a text
