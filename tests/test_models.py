"""Models of all families: positions, what was read before, names, and the configs that are shipped."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from launch.config import ConfigError, load, validate_world
from launch.models.cache import KeyValues
from launch.models.initial import init_weights
from launch.models.modules import Llama
from launch.models.rope import rotary_table
from launch.models.tables import FAMILIES, their_names
from launch.sections import Model

SHAPE = Model(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=64)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def angles(scaling: dict[str, object] | None) -> torch.Tensor:
    """Of each pair of dimensions, per position; small enough that the sine tells them."""
    _, sin = rotary_table(torch.arange(2), 16, 10000.0, scaling)
    return sin[1, :8].asin()


def test_scaling_divides_waves_longer_than_the_context_and_keeps_short_ones() -> None:
    plain, scaled = angles(None), angles(LLAMA3)
    turns = plain * 64 / (2 * math.pi)  # in the original context
    assert (turns > 4).any() and (turns < 1).any() and ((turns > 1) & (turns < 4)).any()
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
    torch.testing.assert_close(angles({"rope_type": "linear", "factor": 4.0}), plain / 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_on_gives_what_reading_at_once_gives(family: str) -> None:
    model = Llama(replace(SHAPE, family=family, rope_scaling=LLAMA3), torch.float32)
    init_weights(model, 0)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    past = [KeyValues(12) for _ in range(2)]
    read = [model(part, past=past).unflatten(0, (2, -1)) for part in tokens.split([5, 4, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(read, 1), model(tokens).unflatten(0, (2, -1)), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="a cache for 12 tokens was given 13"):
        model(tokens[:, :1], past=past)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_has_a_name_in_its_folder(family: str) -> None:
    with torch.device("meta"):
        names = dict(Llama(replace(SHAPE, family=family)).named_parameters())
    assert names.keys() <= dict(their_names(SHAPE.layers)).keys()
    assert any(name.endswith("q_proj.bias") for name in names) == (family == "qwen2")
    assert any(name.endswith("k_norm.weight") for name in names) == (family == "qwen3")


@pytest.mark.parametrize("name", ["llama3_1b", "llama3_8b", "llama3_70b", "qwen3_8b"])
def test_shipped_models_run_on_8_and_on_64_ranks(name: str) -> None:
    config = load(name)
    for world in (8, 64):
        batch = validate_world(config, world)
        assert batch.micro * batch.num_micro * batch.dp_size == config.train.global_batch


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("--model.sliding_window=255", r"\[train\] sequence: expected at most \[model\] sliding_window = 255, got 256"),
        ('--model.rope_scaling={ rope_type = "llama3", factor = 8.0 }', r"rope_scaling: expected a table"),
        ('--model.rope_scaling={ rope_type = "linear", factor = 0 }', r"rope_scaling: expected a table"),
        (
            '--model.rope_scaling={ rope_type = "ntk", factor = 2.0 }',
            r'"linear" or "llama3" or "yarn", and its numbers',
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load("tiny", [setting])
