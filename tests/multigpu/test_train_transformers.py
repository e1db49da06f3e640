"""launch.train --model FOLDER: tiny random models of transformers train like the unconverted modules.

The default run has a few architectures; `--all-cases` runs all of ARCHITECTURES.
"""

from __future__ import annotations

import json
import logging
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dlp
from dlp.tp_plan import named_blocks
from launch import convert_hf
from launch.checkpoint.manifest import complete
from launch.config.run_config import Config, command_line, load, make_parser
from launch.data.sources import open_sources
from launch.data.token_stream import TokenStream
from launch.models.pretrained import Pretrained
from launch.models.settings import PretrainedModel
from launch.settings.schema import ConfigError
from launch.train import plan_text
from launch.training.build import plan_for
from launch.training.learning_rate import learning_rate
from tests import hf_models, training
from tests.cases import nightly
from tests.multigpu.test_groups_for import ARCHITECTURES, ON_TP
from tests.refusals import must_raise, refuses

transformers = pytest.importorskip("transformers")

FEW = ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")
ON_ONE = FEW[1:2]  # tests on two ranks run a Llama and a Mixtral
CAPTURED = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM")  # steps can be captured in a CUDA graph
WITHOUT_LINEARS = ("gpt2",)  # its blocks use Conv1D
STEPS = 5
NEAR = 1e-6  # bound on the relative difference of losses
NEAR_BF16 = {"cpu": NEAR, "cuda": 1e-4}  # by the device of the run; `expected` runs on the CPU
# Bound for losses in bf16 under tp: partial sums of row-parallel linears are rounded to bf16 before the sum
NEAR_TP = 3e-4
TOML = """
[mesh]
tp = 1
sequence_parallel = false
[data]
path = "{data}"
[train]
steps = 5
global_batch = 4
sequence = 16
lr = 1e-3
eval_every = 5
eval_batches = 1
log_every = 1
dtype = "fp32"
[checkpoint]
every = 3
keep = 10
asynchronous = false
[run]
dir = "{run}"
[[groups]]
name = "default"
match = ["**.[0-9]*.**"]
recipe = "bf16"
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.shards(tmp_path_factory.mktemp("data"))


def saved(architecture: str, folder: Path, **more: Any) -> Path:
    """Write a model with the vocabulary of the data by save_pretrained, and return its folder."""
    model = hf_models.make(architecture, vocab_size=384, **more)
    model.save_pretrained(folder / "model")
    return folder / "model"


def config(folder: Path, data: Path, *overrides: str) -> Config:
    own = groups_of(folder)
    path = folder / "mine.toml"
    path.write_text(TOML.format(data=data, run=folder / "run"))
    return load(path, ["--model", str(folder / "model"), *own, *overrides])


def groups_of(folder: Path) -> list[str]:
    """Return a config override for an architecture whose blocks have no linears; [] for other architectures. The
    override makes the layer group match lm_head, because a layer group must match a linear."""
    kind = json.loads((folder / "model" / "config.json").read_text())["model_type"]
    return ["--groups.default.match", '["lm_head"]'] if kind in WITHOUT_LINEARS else []


def expected(config: Config, count: int = 1) -> list[float]:
    """Return the losses of the unconverted module in a plain loop, on the batches of the run.

    Parameters are fp32. In bf16 a copy of the module with rounded parameters computes the gradients, one data-parallel
    rank (of `count`) after the other. The loss function and the order of sums of the norm are those of the run, because
    another last bit of an fp32 weight can change the bf16 weight, and a loss by 1e-6 to 1e-5."""
    train, bf16 = config.train, config.train.dtype == "bf16"
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, config.model.folder)
    model, used = load(dtype=torch.float32).eval(), load(dtype=torch.bfloat16 if bf16 else torch.float32).eval()
    masters, computing = list(model.parameters()), list(used.parameters())
    optimizer = torch.optim.AdamW([
        {"params": [p for p in masters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
    ], betas=train.betas, eps=train.eps, fused=True)  # fmt: skip
    data = open_sources(config.data.path, config.architecture.vocab, config.data.validation)
    stream = TokenStream(
        data.train, split="train", seed=train.seed, sequence=train.sequence, global_batch=train.global_batch,
        micro_batch=train.global_batch // count, weights=data.weights,
    )  # fmt: skip
    found = []
    for step in range(train.steps):
        with torch.no_grad():
            for parameter, master in zip(computing, masters, strict=True):
                parameter.copy_(master)
        losses = []
        for rank in range(count):
            tokens, targets = stream.batch(step, 0, rank, count)
            logits = used(tokens, use_cache=False).logits.flatten(0, 1)
            if bf16:
                loss = dlp.cross_entropy(logits, targets) / targets.numel()
            else:
                loss = nn.functional.cross_entropy(logits, targets.flatten())
            loss.backward()
            losses.append(loss.item())
            for parameter, master in zip(computing, masters, strict=True):
                if parameter.grad is not None:
                    grad = parameter.grad.float() / count
                    master.grad = grad if master.grad is None else master.grad + grad
            used.zero_grad()
        norm = norm_of([master.grad for master in masters if master.grad is not None], count)
        optimizer.grad_scale = ((norm + 1e-6) / train.clip).clamp(min=1.0)
        optimizer.found_inf = torch.zeros(())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(losses) / count)
    return found


def norm_of(grads: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return the gradient norm as `count` FSDP ranks compute it: each rank sums the squares of its shards."""
    squares = []
    for rank in range(count):
        norms = torch.stack([part.norm() for grad in grads for part in grad.chunk(count)[rank : rank + 1]])
        squares.append(norms.square().dot(torch.ones_like(norms)))
    return torch.stack(squares).sum().sqrt()


def run(config: Config) -> None:
    logging.getLogger("dlp").setLevel(logging.ERROR)
    training.run(config)


def some(names: tuple[str, ...], few: tuple[str, ...]) -> list[Any]:
    return [name if name in few else pytest.param(name, marks=pytest.mark.full) for name in names]


def trains(ranks: Any, count: int, folder: Path, data: Path, *overrides: str, near: float = NEAR) -> Config:
    """Run on `count` ranks, and assert that losses differ from the unconverted module by at most `near`, relatively; return the
    config."""
    asked = config(folder, data, *overrides)
    ranks(count).run(run, asked)
    losses = list(training.metrics(asked).values())
    before = expected(asked, count // asked.mesh.tp)
    assert len(losses) == STEPS and before[0] != before[-1]
    assert max(abs(a - b) / a for a, b in zip(before, losses, strict=True)) <= near, (before, losses)
    return asked


IN_BF16 = "--train.dtype", "bf16"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("architecture", some(ARCHITECTURES, ON_ONE))
def test_on_one_rank(ranks, architecture: str, tmp_path: Path, shards: Path):
    saved(architecture, tmp_path)
    trains(ranks, 1, tmp_path, shards)


@pytest.mark.ranks(1)
@pytest.mark.full  # test_in_bf16_with_recomputed_blocks runs in bf16, too
@pytest.mark.parametrize("architecture", some(ARCHITECTURES, FEW[:1]))
def test_on_one_rank_in_bf16(ranks, device_type: str, architecture: str, tmp_path: Path, shards: Path):
    saved(architecture, tmp_path)
    trains(ranks, 1, tmp_path, shards, *IN_BF16, near=NEAR_BF16[device_type])


@pytest.mark.ranks(2)
# full: test_groups_for.py compares FSDP steps with torch, and another test of this file resumes a run on FSDP ranks
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", some(ARCHITECTURES, FEW[:1]))
def test_on_two_fsdp_ranks(ranks, device_type: str, architecture: str, dtype: str, tmp_path: Path, shards: Path):
    saved(architecture, tmp_path)
    near = NEAR if dtype == "fp32" else NEAR_BF16[device_type]
    trains(ranks, 2, tmp_path, shards, "--train.dtype", dtype, near=near)


def test_a_module_that_shares_a_parameter_is_no_block():
    """transformers lists BertEmbeddings in _no_split_modules, but this module cannot be an FSDP block if the head shares
    the weight of the embedding."""
    assert list(named_blocks(hf_models.make("BertLMHeadModel"))) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert "bert.embeddings" in named_blocks(hf_models.make("BertLMHeadModel", tie_word_embeddings=False))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", nightly("bf16")])
@pytest.mark.parametrize("architecture", some(ON_TP, FEW[:1]))
def test_on_two_tp_ranks(ranks, architecture: str, dtype: str, tmp_path: Path, shards: Path):
    saved(architecture, tmp_path)
    near = NEAR if dtype == "fp32" else NEAR_TP
    trains(ranks, 2, tmp_path, shards, "--mesh.tp", "2", "--train.dtype", dtype, near=near)


@pytest.mark.ranks(1)
def test_in_bf16_with_recomputed_blocks(ranks, device_type: str, tmp_path: Path, shards: Path):
    """With dtype bf16, parameters of the run are fp32 and modules compute in bf16, also on one rank."""
    saved("Qwen3ForCausalLM", tmp_path)
    recomputed = "--train.checkpointing", "full"
    asked = trains(ranks, 1, tmp_path, shards, *IN_BF16, *recomputed, near=NEAR_BF16[device_type])
    weights = ranks(1).run(dtypes, asked)[0]
    assert weights == {"torch.float32"}


def compiled_run(config: Config) -> tuple[int, dict[str, int]]:
    """Run with the backend aot_eager, because inductor would compile for a minute on a CPU; return the number of graphs,
    and the number of graph breaks by reason. Runs in a worker."""
    counters = torch._dynamo.utils.counters
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        torch._dynamo.reset()
        counters.clear()
        try:
            run(config)
            return counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        finally:
            torch._dynamo.reset()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("architecture", some(ARCHITECTURES, FEW[:1]))
def test_blocks_are_compiled_without_graph_breaks(
    ranks, device_type: str, architecture: str, tmp_path: Path, shards: Path
):
    saved(architecture, tmp_path, num_hidden_layers=1)
    asked = config(tmp_path, shards, *IN_BF16, "--train.compile", "true", "--train.steps", "3")
    made, breaks = ranks(1).run(compiled_run, asked)[0]
    assert made > 0 and not breaks, (made, breaks)
    assert len(training.metrics(asked)) == 3
    for before, after in zip(expected(asked), training.metrics(asked).values(), strict=True):
        assert abs(before - after) <= NEAR_BF16[device_type] * before


class Reads(TorchDispatchMode):
    """Count the tensors that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_the_host_reads_nothing_in_a_forward(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A read would make the host wait for the GPU in each microbatch."""
    pretrained = Pretrained(PretrainedModel(folder=str(saved(architecture, tmp_path))))
    model, tokens = transformers.AutoModelForCausalLM.from_pretrained(pretrained.folder), hf_models.tokens(0)
    with Reads() as plain:
        expected = model(tokens, use_cache=False).logits.flatten(0, 1)
    with Reads() as ours:
        assert torch.equal(pretrained.logits(model, tokens), expected)
    assert plain.count > 0 == ours.count


def dtypes(config: Config) -> set[str]:
    made, _ = training.trainer(config)
    return {str(parameter.dtype) for parameter in made.built.model.parameters()}


@pytest.mark.ranks(2)
def test_a_resumed_run_goes_on_bit_for_bit_and_its_export_has_equal_logits(ranks, tmp_path: Path, shards: Path):
    """The run uses two FSDP ranks, a quantized recipe and experts. The weights files have one tensor per expert."""
    saved("MixtralForCausalLM", tmp_path)
    asked = config(tmp_path, shards, "--recipe", "fp8_current", "--train.dtype", "bf16")
    ranks(2).run(run, asked)
    whole = training.metrics(asked)
    assert any("the bytes sent match the plan" in line for line in training.said(asked)), training.said(asked)
    again = config(
        tmp_path, shards, "--recipe", "fp8_current", "--train.dtype", "bf16", "--run.dir", str(tmp_path / "again"),
        "--checkpoint.resume", str(tmp_path / "run" / "checkpoints" / "step-3"),
    )  # fmt: skip
    ranks(2).run(run, again)
    assert training.metrics(again) == {step: loss for step, loss in whole.items() if step > 3}
    convert_hf.export(complete(tmp_path / "run" / "checkpoints")[-1], tmp_path / "out", None, None)
    for difference, largest in ranks(2).run(exported, asked, str(tmp_path / "out")):
        assert difference <= 1e-6 * largest


def exported(config: Config, folder: str) -> list[float]:
    """Return the largest difference between the logits of the parameters of a run and of the exported folder, both
    computed in fp32 by transformers, and the largest absolute logit."""
    made, _ = training.trainer(config)
    trained = {name: parameter.full_tensor() for name, parameter in made.built.model.named_parameters()}
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.folder).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained[name])
        back = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert back.dtype == torch.float32
        ids = hf_models.tokens(0)
        ours, theirs = model(ids).logits, back.eval()(ids).logits
    return [float((ours - theirs).abs().max()), float(theirs.abs().max())]


def test_the_plan_of_a_folder(tmp_path: Path, shards: Path):
    saved("MixtralForCausalLM", tmp_path, attention_dropout=0.1)
    said = plan_text(config(tmp_path, shards, "--mesh.tp", "2", "--train.dtype", "bf16"), 4, "sm_90")
    assert "model: MixtralForCausalLM" in said and "FSDP units: 2 MixtralDecoderLayer" in said
    assert "model.layers.*.mlp.experts" in said and "has no counterpart" in said
    assert "dropout is not applied (attention_dropout = 0.1 in config.json)" in said
    assert "\nmemory: each rank needs" in said and "cuda graph: steps are launched one by one" in said
    # Blocks of GPT-2 have Conv1D instead of linears; OPT computes positions from the mask
    for architecture in ("GPT2LMHeadModel", "OPTForCausalLM"):
        saved(architecture, tmp_path)
        assert "\nmemory: each rank needs" in plan_text(config(tmp_path, shards), 4, "sm_90"), architecture
    saved("LlamaForCausalLM", tmp_path)
    said = plan_text(config(tmp_path, shards, "--mesh.tp", "2"), 4, "h200")
    assert "memory: each rank needs" in said and "time: not predicted: mine.toml: --model" in said, said
    assert "one by one (modules of transformers may read device memory on the host; [train] cuda_graph = true" in said
    asked = config(tmp_path, shards, "--mesh.tp", "2", "--train.cuda_graph", "true")
    assert "cuda graph: steps are captured after 3 eager steps" in plan_text(asked, 4, "h200")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("architecture", CAPTURED)
def test_captured_steps_have_the_losses_of_launched_steps(
    ranks, device_type: str, architecture: str, tmp_path: Path, shards: Path
):
    if device_type != "cuda":
        pytest.skip("needs a GPU")
    found = []
    saved(architecture, tmp_path)
    for graph in ("false", "true"):
        options = ["--train.steps", "8", "--train.cuda_graph", graph, "--run.dir", str(tmp_path / f"run-{graph}")]
        asked = config(tmp_path, shards, *IN_BF16, "--recipe", "fp8_current", "--train.deterministic", "true", *options)
        ranks(1).run(run, asked)
        found.append(training.metrics(asked))
    assert found[0] == found[1] and len(found[0]) == 8


@pytest.mark.ranks(1)
def test_a_step_that_cannot_be_captured_is_named(ranks, tmp_path: Path, shards: Path):
    saved("LlamaForCausalLM", tmp_path)
    refused, others = ranks(1).run(refused_captures, config(tmp_path, shards))[0]
    assert refused.startswith("the step cannot be captured as a CUDA")
    assert others == ["no memory", "a peer is lost"], "launch.train has sentences of its own for these errors"


def refused_captures(config: Config) -> tuple[str, list[str]]:
    """Return the message of a capture that CUDA refuses, and the messages of captures that end with other errors."""
    made, _ = training.trainer(config)

    def capture(error: RuntimeError) -> str:
        made.replays.capture = Mock(side_effect=error)
        return must_raise(type(error) if type(error) is not torch.AcceleratorError else RuntimeError, made.replay, [])

    others = [torch.OutOfMemoryError("no memory"), RuntimeError("a peer is lost")]
    return capture(torch.AcceleratorError("operation not permitted when stream is capturing")), [*map(capture, others)]


def asked_for(folder: Path, *arguments: str) -> str:
    return must_raise(ConfigError, command_line, make_parser("launch.train", ""), [*arguments])


@pytest.mark.parametrize(("change", "says"), [
    ({"model_type": "llamma"}, "model_type 'llamma' is unknown to the installed transformers"),
    ({"model_type": "vit"}, "model_type 'vit' is not a causal language model"),
    ({"model_type": None}, "config.json has no model_type"),
])  # fmt: skip
def test_a_folder_of_another_kind_is_refused(change: dict[str, Any], says: str, tmp_path: Path):
    saved("LlamaForCausalLM", tmp_path)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert says in asked_for(tmp_path, "--model", str(tmp_path / "model"))


def test_what_does_not_fit_a_folder_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = str(saved("LlamaForCausalLM", tmp_path))
    given = ["--model", folder, "--train.sequence", "16"]
    for arguments, says in (
        (["--model", str(tmp_path)], "No such file or directory; name a folder of transformers with config.json"),
        (["tiny", *given], "layers, hidden, ffn, heads, kv_heads, head_dim, vocab: given together with --model"),
        ([*given, "--model.layers", "3"], "[model] layers: given together with --model"),
        (["--model", folder], "[train] sequence: expected at most max_position_embeddings = 64"),
        ([*given, "--mesh.tp", "2", "--mesh.sequence_parallel", "true"], "[mesh] sequence_parallel: expected false"),
        ([*given, "--mesh.cp", "2"], "[mesh] cp: expected 1 with --model"),
        ([*given, "--data.reset_attention", "true"], "[data] reset_attention: expected false"),
        ([*given, "--train.attention", "flash"], "[train] attention: expected auto"),
        ([*given, "--train.init_from", "x"], "[train] init_from: expected none"),
    ):
        assert says in asked_for(tmp_path, *arguments), arguments
    cut = command_line(make_parser("launch.train", ""), [*given, "--mesh.tp", "4"])[1]
    with pytest.raises(ValueError, match="tp 4 does not divide num_key_value_heads 2"):
        plan_for(cut, 4, "cpu")
    head = [*given, "--mesh.tp", "2", "--groups.default.match", '["lm_head"]', "--groups.default.style", "column"]
    with refuses("lm_head: style = 'column', but outside of the blocks modules of transformers"):
        plan_for(command_line(make_parser("launch.train", ""), head)[1], 2, "cpu")
    with pytest.raises(ConfigError, match="is a model of transformers, and this program expects the sizes of a family"):
        _ = command_line(make_parser("launch.prove", ""), given)[1].family
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no *.safetensors in the folder" in asked_for(tmp_path, *given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs transformers and safetensors, not installed: pip install 'dlp[hf]' transformers" in asked_for(
        tmp_path, *given
    )


@pytest.mark.parametrize(("architecture", "refused"), [("GPT2LMHeadModel", True), ("LlamaForCausalLM", False)])
def test_muon_is_refused_for_a_model_without_matrices_for_muon(architecture, refused, tmp_path):
    """The blocks of GPT-2 are "transformer.h.0" and so on. AdamW would update all their parameters."""
    hf_models.make(architecture).save_pretrained(tmp_path)
    settings = ["--model", str(tmp_path), "--train.sequence=16", "--train.optimizer=muon"]
    if refused:
        assert "Muon updates matrices of modules named 'layers'" in must_raise(
            ConfigError, load, "transformers", settings
        )
    else:
        assert load("transformers", settings).train.optimizer == "muon"
