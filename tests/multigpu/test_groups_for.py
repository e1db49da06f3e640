"""groups_for: tiny random models of transformers, converted with their tensor-parallel plans, train like the
unconverted models.

The default run has a few architectures; `--all-cases` runs all of ARCHITECTURES.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.tp_plan import block_modules, blocks_of, tp_plan
from tests import hf_models
from tests import pool as worker
from tests.cases import nightly
from tests.refusals import refuses

transformers = pytest.importorskip("transformers")

FEW = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")
ARCHITECTURES = (
    *FEW, "ApertusForCausalLM", "ArceeForCausalLM", "AriaTextForCausalLM", "BeamForCausalLM", "BertLMHeadModel",
    "BertGenerationDecoder", "BioGptForCausalLM", "BitNetForCausalLM", "BloomForCausalLM", "CohereForCausalLM",
    "Cohere2ForCausalLM", "CwmForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM", "Ernie4_5ForCausalLM",
    "GemmaForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM",
    "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
ON_TP = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "CohereForCausalLM",
    "CwmForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM",
    "Qwen2ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
NEAR = 1e-6  # bound on the relative difference of losses


def some(names: tuple[str, ...], few: int) -> list[Any]:
    return [name if i < few else pytest.param(name, marks=pytest.mark.full) for i, name in enumerate(names)]


def trained(architecture: str, tp: int, dp_shard: int, recipe: Any = None) -> list[list[float]]:
    """Return the losses of an unconverted model, and of the model converted on a mesh."""
    logging.getLogger("dlp").setLevel(logging.ERROR)
    mesh = worker.mesh(dp_shard=dp_shard, tp=tp)
    before = hf_models.losses(hf_models.make(architecture).to(worker.device()))
    model = hf_models.make(architecture).to(worker.device())
    dlp.convert(model, dlp.groups_for(model, tp=tp, recipe=recipe), mesh)
    if dp_shard > 1:
        for block in block_modules(model):
            dlp.fully_shard(block, mesh=mesh)
        dlp.fully_shard(model, mesh=mesh)
    return [before, hf_models.losses(model)]


def assert_near(results: list[tuple[list[float], list[float]]]) -> None:
    for before, after in results:
        assert before[0] != before[-1]
        assert max(abs(a - b) / abs(a) for a, b in zip(before, after, strict=True)) <= NEAR, (before, after)


@pytest.mark.ranks(1)
@pytest.mark.full  # test_train_transformers.py compares runs on one rank
@pytest.mark.parametrize("architecture", some(ARCHITECTURES, 1))
def test_a_model_trains_as_it_did(ranks, architecture: str):
    assert_near(ranks(1).run(trained, architecture, 1, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", some(ON_TP, 1))
def test_a_model_trains_on_two_tp_ranks(ranks, architecture: str):
    assert_near(ranks(2).run(trained, architecture, 2, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", some(FEW, 1))
def test_a_model_trains_on_two_fsdp_ranks(ranks, architecture: str):
    """All ranks read the same tokens, so the mean of their gradients equals the gradient of one rank."""
    assert_near(ranks(2).run(trained, architecture, 1, 2))


@pytest.mark.ranks(2)
def test_a_recipe_reaches_the_linears_of_blocks(ranks):
    for before, after in ranks(2).run(trained, "LlamaForCausalLM", 2, 1, "fp8_current"):
        assert before != after
        assert max(abs(a - b) / abs(a) for a, b in zip(before, after, strict=True)) < 2e-2


def exported(folder: str) -> list[float]:
    """Train on tp ranks and call save_pretrained. Return the largest difference between the logits of the model and the
    logits of a model loaded from the written folder, and the largest absolute logit."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    model = hf_models.make("LlamaForCausalLM").to(worker.device())
    dlp.convert(model, dlp.groups_for(model, tp=2), mesh)
    hf_models.losses(model, steps=2)
    model.save_pretrained(folder, is_main_process=torch.distributed.get_rank() == 0)
    torch.distributed.barrier()
    back = transformers.LlamaForCausalLM.from_pretrained(folder).to(worker.device())
    ids = hf_models.tokens(0).to(worker.device())
    with torch.no_grad():
        return [float((back(ids).logits - model(ids).logits).abs().max()), float(back(ids).logits.abs().max())]


@pytest.mark.ranks(2)
def test_save_pretrained_writes_what_was_trained(ranks, tmp_path):
    for difference, largest in ranks(2).run(exported, str(tmp_path)):
        assert difference <= 1e-6 * largest


def streamed(folder: str, tp: int, dp_shard: int) -> list[float]:
    """Stream the weights of a folder into the shards of a converted model. Return the largest difference between the logits
    of this model and of the plain model of the folder, and the largest absolute logit."""
    mesh = worker.mesh(dp_shard=dp_shard, tp=tp)
    model = dlp.meta_model(folder)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    dlp.convert(model, dlp.groups_for(model, tp=tp), mesh)
    if dp_shard > 1:
        for block in block_modules(model):
            dlp.fully_shard(block, mesh=mesh)
        dlp.fully_shard(model, mesh=mesh)
    dlp.load_pretrained(model, folder, mesh.device_type)
    ids = hf_models.tokens(0).to(worker.device())
    with torch.no_grad():
        alone = transformers.AutoModelForCausalLM.from_pretrained(folder).to(worker.device())
        expected = alone(ids).logits
        return [float((model(ids).logits - expected).abs().max()), float(expected.abs().max())]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("tp", "dp_shard"), [nightly(2, 1), (1, 2)])
def test_weights_of_a_folder_are_streamed_into_shards(ranks, tmp_path, tp: int, dp_shard: int):
    """The folder has several files and tied embeddings."""
    hf_models.make("Qwen2ForCausalLM", tie_word_embeddings=True).save_pretrained(tmp_path, max_shard_size="20KB")
    for difference, largest in ranks(2).run(streamed, str(tmp_path), tp, dp_shard):
        assert difference <= 1e-6 * largest


def test_a_folder_of_another_model_is_refused_by_name(tmp_path):
    model = hf_models.make("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    with refuses(r"model.layers.1.input_layernorm.weight is in the files, and LlamaForCausalLM has"):
        dlp.load_pretrained(hf_models.make("LlamaForCausalLM", num_hidden_layers=1), tmp_path)
    with pytest.raises(ValueError, match=r"no file has model.layers.2.*and 5 more of LlamaForCausalLM"):
        dlp.load_pretrained(hf_models.make("LlamaForCausalLM", num_hidden_layers=3), tmp_path)
    with pytest.raises(ValueError, match=r"down_proj.weight is \[32, 48\] in the files and \[32, 40\] in the model"):
        dlp.load_pretrained(hf_models.make("LlamaForCausalLM", intermediate_size=40), tmp_path)
    with pytest.raises(ValueError, match="no config.json in the folder"):
        dlp.meta_model(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*.safetensors in the folder"):
        dlp.load_pretrained(model, tmp_path)


def groups(architecture: str, tp: int = 2, **more: Any) -> dict[str, str]:
    """Return the style of each pattern in the layer groups of an architecture."""
    with torch.device("meta"):
        model = hf_models.make(architecture, **more)
    return {pattern: str(group.style) for group in dlp.groups_for(model, tp=tp) for pattern in group.match}


def test_groups_are_those_of_the_plan_of_the_model():
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    expected = {f"{attention}{each}": "column" for each in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")}
    expected |= {f"{mlp}gate_proj": "column", f"{mlp}up_proj": "column"}
    assert groups("Qwen3ForCausalLM") == expected | {f"{attention}o_proj": "row", f"{mlp}down_proj": "row"}
    with torch.device("meta"):
        gpt2, mixtral = hf_models.make("GPT2LMHeadModel"), hf_models.make("MixtralForCausalLM")
    assert dlp.groups_for(gpt2) == [] and tp_plan(gpt2).describe() == [
        "**: local on every tp rank: the model has no base_model_tp_plan"
    ]
    assert any("experts" in line and "has no counterpart" in line for line in tp_plan(mixtral).describe())
    assert blocks_of(gpt2) == ("GPT2Block",) and len(block_modules(gpt2)) == 2


def test_a_parent_with_an_entry_without_style_stays_local():
    """All heads contribute to the gradient of DeepSeek's kv_a_proj_with_mqa, so this attention is not sharded, and the
    reason is listed."""
    with torch.device("meta"):
        plan = tp_plan(hf_models.make("DeepseekV2ForCausalLM"), tp=2)
    cut = {pattern for group in plan.groups for pattern in group.match}
    assert not any("self_attn" in pattern for pattern in cut) and any("mlp" in pattern for pattern in cut)
    assert plan.local["model.layers.*.self_attn.o_proj"] == "kv_a_proj_with_mqa of the same parent is mla_kv_a_proj"


@pytest.mark.parametrize(("make", "says"), [
    (lambda: groups("GPT2LMHeadModel"), "GPT2LMHeadModel: the model has no base_model_tp_plan, so tp 2 would shard nothing"),
    (lambda: groups("LlamaForCausalLM", 3), "tp 3 does not divide num_attention_heads 4"),
    (lambda: groups("LlamaForCausalLM", 4), "tp 4 does not divide num_key_value_heads 2"),
    (lambda: groups("Phi3ForCausalLM"), "tp 2 can shard no module of the plan: .*qkv_proj: colwise_gather_output has no"),
    (lambda: dlp.groups_for(nn.Linear(2, 2)), "model of transformers, and Linear has none: write layer groups"),
])  # fmt: skip
def test_what_cannot_be_mapped_is_refused_by_name(make: Any, says: str):
    with pytest.raises(ValueError, match=says):
        make()
