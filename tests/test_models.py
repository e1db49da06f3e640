"""Models of all families: rotary positions, causality, names of parameters, and the shipped configs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dlp
from dlp import ops
from launch.config.rules import validate_world
from launch.config.run_config import load
from launch.models.families import FAMILIES
from launch.models.initial_weights import init_weights
from launch.models.kv_cache import KeyValues
from launch.models.modules import Llama
from launch.models.rope import rotary_table
from launch.models.settings import Model
from launch.settings.schema import ConfigError
from launch.train import plan_text
from launch.training.build import parallel_model, plan_for
from tests import pool as worker
from tests.metrics import assert_bit_equal, assert_close
from tests.net import full

SHAPE = Model(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=64)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def angles(scaling: dict[str, object] | None) -> torch.Tensor:
    """Return the rotation angle of each pair of dimensions at position 1, as arcsin of the sines in the
    table, which requires angles below pi / 2."""
    _, sin = rotary_table(torch.arange(2), 16, 10000.0, scaling)
    return sin[1, :8].asin()


def test_scaling_divides_waves_longer_than_the_context_and_keeps_short_ones() -> None:
    plain, scaled = angles(None), angles(LLAMA3)
    turns = plain * 64 / (2 * math.pi)  # number of rotations within the original context
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
    with pytest.raises(ValueError, match="a cache for 12 tokens got 13; create a larger cache"):
        model(tokens[:, :1], past=past)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_differ_in_biases_and_norms(family: str) -> None:
    with torch.device("meta"):
        names = dict(Llama(replace(SHAPE, family=family)).named_parameters())
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
            r'"linear" or "llama3" or "yarn", and the numbers',
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load("tiny", [setting])


TINY = [
    "--model.layers=1", "--model.hidden=64", "--model.ffn=128", "--model.heads=4", "--model.kv_heads=2", "--model.head_dim=16",
    "--mesh.dp_shard=1", "--train.sequence=16", "--train.global_batch=2", "--train.dtype=fp32",
]  # fmt: skip


def a_step(tp: int, *settings: str) -> dict[str, torch.Tensor]:
    """Run one step, and check the plan of the fused ops. Return the loss and the unsharded gradients."""
    config = load("tiny", [*TINY, f"--mesh.tp={tp}", *settings])
    mesh = worker.mesh(dp_shard=1, tp=tp)
    model, plan, _ = parallel_model(config, mesh)
    model.to_empty(device=worker.device())
    init_weights(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    tokens = torch.randint(384, (2, 17), generator=torch.Generator().manual_seed(1)).to(worker.device())
    loss = dlp.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].reshape(-1), mesh)
    loss.backward()
    optimizer.step()
    if config.model.fused:
        behind = str(model.model.layers[0].sequences.behind.plan())
        assert behind.count("ReducedLinear[Converted, ReduceScatter]") == (4 if tp > 1 else 0), behind
        assert "backward Converted | AddExtraInput | BackwardNormResidual[MakeExtraOutput, " in behind or tp > 1, behind
    return {"loss": loss.detach()} | {name: full(p.grad) for name, p in model.named_parameters()}


# Error bound by recipe. Fusions change the order of sums; in fp8_current this also changes codes
FUSED_BOUND = {"bf16": 1e-5, "fp8_current": 0.08}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("settings", [["--recipe=bf16"], ["--recipe=fp8_current", "--model.family=qwen2"]], ids=str)
def test_a_fused_model_steps_as_the_plain_one(ranks: Any, tp: int, settings: list[str]) -> None:
    plain, fused = (ranks(tp).run(a_step, tp, *settings, f"--model.fused={on}") for on in ("false", "true"))
    bound = FUSED_BOUND[settings[0].removeprefix("--recipe=")]
    for rank in range(tp):
        assert list(fused[rank]) == list(plain[rank])
        for name, expected in plain[rank].items():
            assert_close(fused[rank][name], expected, bound, name)
            assert_bit_equal(fused[rank][name], fused[0][name], name)


def test_a_plan_shows_fused_blocks_and_refuses_what_they_cannot_be() -> None:
    assert "o_proj | + x | post_attention_layernorm" in plan_text(load("tiny", ["--model.fused=true"]), 2, "cpu")
    config = load("tiny", ["--model.fused=true"])
    apart = replace(config.groups[0], name="own", match=["layers.*.self_attn.{q,k,v}_proj"], siblings=False)
    with pytest.raises(ValueError, match="a Linear is not a converted linear"):
        ops.Converted(torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match="q_proj: its groups set siblings = false, and a fused block quantizes x once"):
        plan_for(replace(config, groups=[*config.groups, apart]), 2, "cpu")


def test_a_qwen3_runs_under_sequence_parallelism():
    """The norms of q and k read features that are sharded over tp, for all tokens."""
    config = load("qwen3_8b", ["--mesh.tp", "2", "--mesh.sequence_parallel", "true", "--mesh.dp_shard", "1"])
    others = {other.name: other for other in plan_for(config, 2, "cpu").others}
    norm = others["model.layers.0.self_attn.q_norm"]
    assert norm.reads_cut and not norm.sequence_parallel
