"""Weights in Hugging Face folders: streamed import and export keep all bits, wrong folders are refused, and runs use
the weights."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tqdm import tqdm

from launch import convert_hf
from launch.checkpoint import dcp_files, manifest
from launch.common import atomic_io
from launch.config.run_config import load
from launch.models import families
from launch.models.settings import Model
from launch.training.build import plan_for
from launch.weights import hf_config, safetensors_folder, weights_only
from tests import training
from tests.command import command
from tests.refusals import must_raise, refuses
from tests.shardnet import whole

save_file = pytest.importorskip("safetensors.torch").save_file

# The shape of the model of tests.training with TWO_BLOCKS
SHAPE = Model(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=384)
TWO_BLOCKS = "--model.layers=2"
INDEX = safetensors_folder.INDEX


def published(folder: Path, shape: Model = SHAPE, dtype: str = "fp32", **config: Any) -> dict[str, Tensor]:
    """Write a folder with several files, like those of published models; return its tensors."""
    generator = torch.Generator().manual_seed(3)
    kind = getattr(torch, convert_hf.NAMES[dtype])
    tensors = {
        name: (0.1 * torch.randn(each.shape, generator=generator)).to(kind)
        for name, each in convert_hf.parameters_of(shape).items()
    }
    folder.mkdir()
    limit = sum(tensor.nbytes for tensor in tensors.values()) // 3
    safetensors_folder.write(folder, tensors, lambda names: {name: tensors[name] for name in names}, limit)
    settings = {**hf_config.config_json(shape, convert_hf.NAMES[dtype], 512), **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_what_comes_back_is_what_was_published(tmp_path: Path, dtype: str, family: str) -> None:
    shape = replace(SHAPE, family=family, tie_embeddings=family == "qwen2")
    before = published(tmp_path / "published", shape, dtype)
    said = convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    assert said.startswith(f"{len(before)} tensors, ") and weights_only.Reader(tmp_path / "ours").model() == shape
    convert_hf.export(tmp_path / "ours", tmp_path / "back", dtype, None, limit=100_000)
    after = safetensors_folder.entries(tmp_path / "back")
    assert after.keys() == before.keys() and len({entry.file for entry in after.values()}) > 1
    for name, entry in after.items():
        assert torch.equal(safetensors_folder.read(entry, name), before[name])
    assert hf_config.read_config(tmp_path / "back")[0] == shape


def test_the_dtype_of_a_checkpoint_is_exported_unless_another_is_asked_for(tmp_path: Path) -> None:
    """By default, weights are exported in the dtype of the checkpoint, or in fp32 if its tensors have different dtypes, so
    that no weight is rounded."""
    for dtype in ("fp32", "bf16", "fp16"):
        before = published(tmp_path / dtype, dtype=dtype)
        convert_hf.import_folder(tmp_path / dtype, tmp_path / f"{dtype}-ours")
        out = tmp_path / f"{dtype}-back"
        printed = command("launch.convert_hf", "export", str(tmp_path / f"{dtype}-ours"), str(out)).out
        assert f" of {dtype}, of a llama in {out}" in printed
        assert json.loads((out / "config.json").read_text())["dtype"] == convert_hf.NAMES[dtype]
        for name, entry in safetensors_folder.entries(out).items():
            assert torch.equal(safetensors_folder.read(entry, name), before[name]) and entry.dtype == before[name].dtype
    changed(tmp_path / "bf16", "model.norm.weight", lambda tensor: tensor.float() + 2**-20)
    convert_hf.import_folder(tmp_path / "bf16", tmp_path / "mixed")
    assert " of fp32, " in convert_hf.export(tmp_path / "mixed", tmp_path / "mixed-back", None, None)


def test_a_head_of_its_own_is_not_lost_in_a_tied_configuration(tmp_path: Path) -> None:
    tensors = convert_hf.parameters_of(SHAPE)
    assert "lm_head.weight" in tensors
    tied = replace(SHAPE, tie_embeddings=True)
    weights_only.write(
        tmp_path / "ours", tied, tensors, lambda name: torch.ones(tensors[name].shape), config="", tokenizer=None
    )
    with refuses("the checkpoint has a tensor lm_head.weight, but the model of its manifest .tied head. has no such"):
        convert_hf.export(tmp_path / "ours", tmp_path / "back", "fp32", 512)
    assert not (tmp_path / "back").exists()


def test_weights_are_never_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path / "published")
    alive: list[Any] = []
    most = 0

    def read(entry: safetensors_folder.Entry, name: str) -> Tensor:
        nonlocal most
        found = original(entry, name)
        alive.append(weakref.ref(found.untyped_storage()))
        most = max(most, sum(each() is not None for each in alive))
        return found

    original = safetensors_folder.read
    monkeypatch.setattr(safetensors_folder, "read", read)
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    assert len(alive) == 21 and most <= 3


def without(folder: Path, name: str) -> None:
    """Remove a tensor from the index."""
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def renamed(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.7.norm.weight"] = index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / INDEX).rename(folder / "pytorch_model.bin")


def changed(folder: Path, name: str, values: Callable[[Tensor], Tensor]) -> None:
    """Change the values of a tensor in its file."""
    file = safetensors_folder.entries(folder)[name].file
    tensors = {
        each: safetensors_folder.read(entry, each)
        for each, entry in safetensors_folder.entries(folder).items()
        if entry.file == file
    }
    save_file(tensors | {name: values(tensors[name])}, file)


def nan_at_the_end(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:-1], torch.full_like(tensor[-1:], float("nan"))])


DAMAGES: dict[str, tuple[Callable[[Path], object] | None, dict[str, Any], str]] = {
    "tensor": (lambda f: without(f, "model.norm.weight"), {}, "published: no tensor model.norm.weight in the files, which"),
    "file": (lambda f: next(f.glob("*00002*")).unlink(), {}, "00002-of-00004.safetensors: no such file, but model.safet"),
    "cut": (cut, {}, "00002-of-00004.safetensors: damaged or no safetensors ("),
    "promised": (renamed, {}, "no tensor model.layers.7.norm.weight in this file, although model.safetensors.index.json"),
    "pickle": (pickled, {}, "found pytorch_model.bin: save the weights as safetensors, with transformers"),
    "config": (lambda f: (f / "config.json").unlink(), {}, "config.json: No such file or directory; expected a folder of"),
    "shape": (None, {"intermediate_size": 256}, "mlp.gate_proj.weight is [128, 64], and config.json makes it [256, 64]"),
    "left over": (None, {"num_hidden_layers": 1}, ": model.layers.1.input_layernorm.weight is not a tensor of llama"),
    "family": (None, {"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
    "bias": (None, {"attention_bias": True}, "config.json: attention_bias is True, but models here have False"),
    "positions": (None, {"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope', expected one of linear"),
    "turned by default": (None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but models here rotate"),
    "turned": (None, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
               "partial_rotary_factor is 0.5, but models here rotate"),
    "quantized": (None, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, but models here have"),
    "not finite": (lambda f: changed(f, "model.layers.1.mlp.up_proj.weight", nan_at_the_end), {},
                   "safetensors: 64 of 8192 elements of model.layers.1.mlp.up_proj.weight are NaN or Inf; get the file again"),
    "another head": (None, {"tie_word_embeddings": True},
                     "lm_head.weight is not model.embed_tokens.weight, but config.json says tie_word_embeddings; set that"),
    "table": (None, {"rope_parameters": [1]}, "rope_scaling and rope_parameters: expected tables, got [{}, [1]]"),
    "lacking": (None, {"num_hidden_layers": None, "hidden_size": None},
                "num_hidden_layers, hidden_size missing; fetch the file again"),
    "text": (None, {"hidden_size": "64", "head_dim": None}, "config.json: [model] hidden: expected an integer >= 1, got '64'"),
    "number": (None, {"vocab_size": 0}, "config.json: [model] vocab: expected an integer >= 1, got 0"),
}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONFLICTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "theta twice": ("llama", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
                    "rope_theta has different values: rope_parameters.rope_theta = 10000.0, rope_theta = 500000.0; leave the"),
    "null theta": ("llama", {"rope_theta": None}, "rope_theta is null, which transformers does not accept either; give"),
    "null theta in a table": ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is null, which transformers"),
    "type twice": ("llama", {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
                   "rope_type has different values: rope_scaling.rope_type = 'linear', rope_scaling.type = 'dynamic'; leave"),
    "tables differ": ("qwen2", {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
                      "factor has different values: rope_scaling.factor = 4.0, rope_parameters.factor = 2.0; leave the wrong"),
    "no type": ("llama", {"rope_scaling": {"factor": 2.0}},
                "rope_type is None, which does not scale positions, but the table has factor"),
    "no scaling": ("llama", {"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_type is 'default', which does not"),
    "context twice": ("qwen2", {"rope_scaling": YARN, "original_max_position_embeddings": 64},
                      "original_max_position_embeddings has different values: rope_scaling.original_max_position_embeddings"),
    "turned twice": ("llama", {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
                     "partial_rotary_factor has different values: rope_parameters.partial_rotary_factor = 0.5, partial_rotary"),
    "unrounded": ("qwen2", {"rope_scaling": {**YARN, "truncate": False}},
                  "rope_type 'yarn' has truncate = False, which models here do not support; choose another model"),
    "mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0}}, "rope_type 'yarn' has mscale = 1.0, which models"),
    "no factor": ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' has no factor in its table; fetch"),
    "positions by kind": ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
                          "separate RoPE parameters for full_attention, but models here have one set of RoPE parameters"),
    "heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads = 4"),
    "another class": ("llama", {"architectures": ["MistralForCausalLM"]},
                      "model_type llama is read as LlamaForCausalLM, but architectures is ['MistralForCausalLM']; correct the"),
    "a window that is off": ("mistral", {"use_sliding_window": False, "sliding_window": 16},
                             "use_sliding_window is False, but transformers reads sliding_window alone for this model_type"),
    "a window in some layers": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]},
                                "layer_types is ['full_attention', 'sliding_attention'], but models here have 'full"),
    "kinds of layers": ("mistral", {"sliding_window": 512, "layer_types": ["full_attention"] * 2},
                        "but models here have 'sliding_attention' in every layer"),
    "too few kinds": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention'], but models here have"),
    "dropout": ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1, but models here have 0.0"),
    "null eps": ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null, which transformers does not accept either; give a"),
    "null tie": ("qwen3", {"tie_word_embeddings": None}, "tie_word_embeddings is null, which transformers does not accept"),
    "null head": ("qwen3", {"head_dim": None}, "head_dim is null, which transformers does not accept either; give a value"),
    "layers of their own": ("llama", {"per_layer_config": {"0": {}}},
                            "per_layer_config is {'0': {}}, but models here have None"),
}  # fmt: skip


def config_of(folder: Path, family: str, **config: Any) -> Model:
    """The `[model]` read from a config.json. A setting with the value `...` is left out of the file."""
    settings = {**hf_config.config_json(replace(SHAPE, family=family), "float32", 512), **config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))
    return hf_config.read_config(folder)[0]


@pytest.mark.parametrize("case", CONFLICTS)
def test_two_values_for_one_setting_are_refused(tmp_path: Path, case: str) -> None:
    family, config, sentence = CONFLICTS[case]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config_of(tmp_path, family, **config)


def test_a_setting_that_is_left_out_has_the_value_of_transformers(tmp_path: Path) -> None:
    """The test leaves out each optional key alone and all of them together, in every family."""
    for family, kv_heads, head_dim, window in (
        ("llama", 4, 16, None), ("mistral", 8, 16, 4096), ("qwen2", 32, 16, None), ("qwen3", 32, 128, None)
    ):  # fmt: skip
        written = config_of(tmp_path, family)
        defaults = {"rms_norm_eps": ("norm_eps", 1e-6), "tie_word_embeddings": ("tie_embeddings", False),
                    "num_key_value_heads": ("kv_heads", kv_heads), "head_dim": ("head_dim", head_dim),
                    "sliding_window": ("sliding_window", window), "rope_theta": ("rope_theta", 10000.0)}  # fmt: skip
        for key, (ours, value) in defaults.items():
            assert config_of(tmp_path, family, **{key: ...}) == replace(written, **{ours: value}), (family, key)
        absent = dict.fromkeys(
            [*defaults, *dict(families.FAMILIES[family].fixed), "architectures", "rope_scaling"], ...
        )
        assert config_of(tmp_path, family, **absent) == replace(written, **dict(defaults.values()))
    yarn = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    for longest, found in ((64, 64), (..., 32768)):
        read = config_of(tmp_path, "qwen2", rope_scaling=yarn, max_position_embeddings=longest).rope_scaling
        assert read is not None and read["original_max_position_embeddings"] == found
    nulls = config_of(tmp_path, "mistral", num_key_value_heads=None, head_dim=None, sliding_window=None)
    assert (nulls.kv_heads, nulls.head_dim, nulls.sliding_window) == (4, 16, None)


@pytest.mark.parametrize("what", DAMAGES)
def test_what_cannot_be_read_is_one_sentence_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    damage, config, sentence = DAMAGES[what]
    published(tmp_path / "published", **config)
    if damage is not None:
        damage(tmp_path / "published")
    there = {path.name for path in tmp_path.iterdir()}
    code, out, error = command("launch.convert_hf", "import", str(tmp_path / "published"), str(tmp_path / "ours"))
    assert (code, out) == (1, "") and sentence in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == there


@pytest.mark.parametrize("file", ["__0_9.distcp", "manifest.json", "config.toml", "config.json"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """An import or export fails when it writes `file`, because the disk is full."""
    published(tmp_path / "published")
    if file == "config.json":
        convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    there, opened = {path.name for path in tmp_path.iterdir()}, io.open

    def full(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        if file in str(path) and mode != "r" and mode != "rb":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, *given, **options)

    def full_stream(self: Any, path: Any, mode: str) -> Any:
        if file in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return create(self, path, mode)

    create = dcp_files._Files.create_stream
    monkeypatch.setattr(io, "open", full)  # pathlib opens files by io.open
    monkeypatch.setattr(dcp_files._Files, "create_stream", full_stream)  # the writer of tensors calls this
    action = ["export", "ours", "back"] if file == "config.json" else ["import", "published", "ours"]
    code, out, error = command("launch.convert_hf", action[0], *(str(tmp_path / name) for name in action[1:]))
    assert (code, out) == (1, "") and "No space left on device" in error and error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == there


def test_what_is_exported_can_be_read_by_others(tmp_path: Path) -> None:
    """The export sets the mode of files as the umask states, because safetensors writes files with mode 0600."""
    published(tmp_path / "published")
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    convert_hf.export(tmp_path / "ours", tmp_path / "back", "fp32", None, limit=100_000)
    (tmp_path / "any").write_text("")
    expected = stat.S_IMODE((tmp_path / "any").stat().st_mode)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "back").iterdir()}
    assert set(modes.values()) == {expected} and len(modes) > 3, modes


def test_two_imports_at_once_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second import starts while the first reads, and finishes earlier. The first import then reports that the target
    exists, removes its own files, and leaves the folder of the second intact."""
    published(tmp_path / "published")
    read, begun = safetensors_folder.read, list[bool]()

    def second_begins(entry: safetensors_folder.Entry, name: str) -> Tensor:
        if not begun:
            begun.append(True)
            convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
        return read(entry, name)

    monkeypatch.setattr(safetensors_folder, "read", second_begins)
    with refuses("ours: another process has created this folder in the meantime; choose another fol"):
        convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "published"]
    weights_only.Reader(tmp_path / "ours")  # must not raise: the folder is complete


def test_what_a_killed_conversion_left_is_removed_unless_it_is_at_work(tmp_path: Path) -> None:
    left, young = (tmp_path / f".ours-{digit * 32}.tmp" for digit in "ab")
    for folder in (left, young, tmp_path / ".ours-mine.tmp"):
        folder.mkdir()
    os.utime(left, (0, 0))
    with atomic_io.new_folder(tmp_path / "ours") as work:
        os.utime(work, (0, 0))
        with pytest.raises(KeyError), atomic_io.new_folder(tmp_path / "ours") as other:
            assert work.is_dir() and other != work and young.exists() and not left.exists()
            raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, ".ours-mine.tmp", "ours"]


def test_a_bar_says_how_far_a_conversion_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    progress = convert_hf.progress
    monkeypatch.setattr(convert_hf, "progress", lambda *given: shown.append(progress(*given)) or shown[-1])
    monkeypatch.setattr(
        convert_hf, "tqdm", lambda **options: tqdm(**options | {"disable": False, "file": io.StringIO()})
    )
    nbytes = sum(tensor.nbytes for tensor in published(tmp_path / "published").values())
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    convert_hf.export(tmp_path / "ours", tmp_path / "back", "fp32", None)
    assert [(bar.desc, bar.n, bar.total) for bar in shown] == [(what, nbytes, nbytes) for what in ("import", "export")]


def start(config: Any) -> dict[str, Tensor]:
    """The unsharded parameters with which a run starts. Runs in a worker."""
    made, done = training.trainer(config)
    assert done == 0
    return {name: whole(each) for name, each in made.built.model.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [["--mesh.tp=2"], ["--mesh.tp=1"]], ids=["tp", "fsdp"])
def test_a_run_starts_from_them_on_any_mesh(ranks: Any, tmp_path: Path, mesh: list[str]) -> None:
    before = published(tmp_path / "published", dtype="bf16")
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    config = training.config(
        tmp_path, training.shards(tmp_path), TWO_BLOCKS, f"--train.init_from={tmp_path / 'ours'}", *mesh
    )
    for found in ranks(2).run(start, config):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in before.items())


@pytest.mark.ranks(1)
def test_what_a_run_cannot_start_from_is_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    published(tmp_path / "published")
    (tmp_path / "published" / "tokenizer.json").write_text("{}")
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    ours, data = tmp_path / "ours", training.shards(tmp_path)

    def why(*settings: str) -> str:
        config = training.config(tmp_path, data, TWO_BLOCKS, "--mesh.tp=1", *settings)
        found: str = ranks(1).run(must_raise, ValueError, training.trainer, config)[0]
        return found

    sentence = why(f"--train.init_from={ours}")
    assert sentence.startswith(
        f"{data} was prepared with another tokenizer than the training data of {ours}: bytes instead"
    )
    assert "[model] ffn is 128, this run's is 256; name another checkpoint, or make it again" in why(
        f"--train.init_from={ours}", "--model.ffn=256"
    )
    assert "has only weights: set [train] init_from" in why(f"--checkpoint.resume={ours}")
    (ours / "__0_0.distcp").unlink()
    torn = why(f"--train.init_from={ours}")
    assert "is torn: __0_0.distcp is missing" in torn and torn.rstrip().endswith(
        "; name another checkpoint, or make it again"
    )
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    published(tmp_path / "published")
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    reader = weights_only.Reader(tmp_path / "ours")
    with pytest.raises(
        manifest.CheckpointError, match=r"its tensor lm_head.weight is \[384, 64\], and this model's is \[3\]; choose a"
    ):
        reader.read({"lm_head.weight": torch.empty(3)})
    with pytest.raises(manifest.CheckpointError, match="no tensor lm_head.bias, which this model has"):
        reader.read({"lm_head.bias": torch.empty(3)})


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_its_config_starts_from_it(tmp_path: Path, layers: int) -> None:
    shape = replace(SHAPE, layers=layers)
    published(tmp_path / "published", shape)
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    config = load(tmp_path / "ours" / "config.toml")
    assert plan_for(config, 1, "cpu").layers[-1].recipe.name == "bf16"
    assert config.model == shape and config.train.init_from == str(tmp_path / "ours") and config.train.sequence == 512
