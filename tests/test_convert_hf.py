"""Weights of published folders: streamed in and out bit by bit, refused by name, and what a run makes of them."""

from __future__ import annotations

import errno
import io
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from launch import convert_hf, hf_config, hf_folder, manifest, weights
from launch.build import plan_for
from launch.config import load
from launch.models.tables import their_names
from launch.sections import Model
from tests import training
from tests.command import command

save_file = pytest.importorskip("safetensors.torch").save_file

SHAPE = Model(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=384)  # of tests.training, with
TWO_BLOCKS = "--model.layers=2"
INDEX = hf_folder.INDEX


def published(folder: Path, shape: Model = SHAPE, dtype: str = "fp32", **config: Any) -> dict[str, Tensor]:
    """A folder as they are published, of several files; its tensors."""
    generator, theirs = torch.Generator().manual_seed(3), dict(their_names(shape.layers))
    kind = convert_hf.DTYPES[dtype]
    tensors = {
        theirs[name]: (0.1 * torch.randn(each.shape, generator=generator)).to(kind)
        for name, each in convert_hf.parameters_of(shape).items()
    }
    folder.mkdir()
    limit = sum(tensor.nbytes for tensor in tensors.values()) // 3
    hf_folder.write(folder, tensors, lambda names: {name: tensors[name] for name in names}, limit)
    settings = {**hf_config.config_json(shape, convert_hf.NAMES[dtype], 512), **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_what_comes_back_is_what_was_published(tmp_path: Path, dtype: str, family: str) -> None:
    shape = replace(SHAPE, family=family, tie_embeddings=family == "qwen2")
    before = published(tmp_path / "published", shape, dtype)
    said = convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    assert said.startswith(f"{len(before)} tensors, ") and weights.Reader(tmp_path / "ours").model() == shape
    convert_hf.export(tmp_path / "ours", tmp_path / "back", dtype, None, limit=100_000)
    after = hf_folder.entries(tmp_path / "back")
    assert after.keys() == before.keys() and len({entry.file for entry in after.values()}) > 1
    for name, entry in after.items():
        assert torch.equal(hf_folder.read(entry, name), before[name])
    assert hf_config.read_config(tmp_path / "back")[0] == shape


def test_weights_are_never_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path / "published")
    alive: list[Any] = []
    most = 0

    def read(entry: hf_folder.Entry, name: str) -> Tensor:
        nonlocal most
        found = original(entry, name)
        alive.append(weakref.ref(found.untyped_storage()))
        most = max(most, sum(each() is not None for each in alive))
        return found

    original = hf_folder.read
    monkeypatch.setattr(hf_folder, "read", read)
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    assert len(alive) == 21 and most <= 3


def without(folder: Path, name: str) -> None:
    """Take a tensor out of the index, as of a folder that lacks it."""
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
    """A tensor holds other values, in its file."""
    file = hf_folder.entries(folder)[name].file
    tensors = {
        each: hf_folder.read(entry, each) for each, entry in hf_folder.entries(folder).items() if entry.file == file
    }
    save_file(tensors | {name: values(tensors[name])}, file)


def nan_at_the_end(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:-1], torch.full_like(tensor[-1:], float("nan"))])


DAMAGES: dict[str, tuple[Callable[[Path], object] | None, dict[str, Any], str]] = {
    "tensor": (lambda f: without(f, "model.norm.weight"), {}, "published: no tensor model.norm.weight in its files, which"),
    "file": (lambda f: next(f.glob("*00002*")).unlink(), {}, "00002-of-00004.safetensors: no such file, but model.safet"),
    "cut": (cut, {}, "00002-of-00004.safetensors: damaged or no safetensors ("),
    "promised": (renamed, {}, "no tensor model.layers.7.norm.weight in it, which model.safetensors.index.json promises"),
    "pickle": (pickled, {}, "in it (pytorch_model.bin); weights are read from safetensors alone"),
    "config": (lambda f: (f / "config.json").unlink(), {}, "config.json: No such file or directory; expected a folder of"),
    "shape": (None, {"intermediate_size": 256}, "mlp.gate_proj.weight is [128, 64], and config.json makes it [256, 64]"),
    "left over": (None, {"num_hidden_layers": 1}, ": model.layers.1.input_layernorm.weight is no tensor that a llama has"),
    "family": (None, {"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
    "bias": (None, {"attention_bias": True}, "config.json: attention_bias is True, but models here have False"),
    "positions": (None, {"rope_scaling": {"type": "longrope"}}, "scaled by rope_type 'longrope', expected one of linear"),
    "turned by default": (None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but here heads turn whole"),
    "turned": (None, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
               "partial_rotary_factor is 0.5, but here heads turn whole"),
    "quantized": (None, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, but models here have"),
    "not finite": (lambda f: changed(f, "model.layers.1.mlp.up_proj.weight", nan_at_the_end), {},
                   "safetensors: 64 of 8192 elements of model.layers.1.mlp.up_proj.weight are NaN or Inf; get the file again"),
    "another head": (None, {"tie_word_embeddings": True},
                     "lm_head.weight is not model.embed_tokens.weight, but config.json says tie_word_embeddings; set that"),
    "table": (None, {"rope_parameters": [1]}, "rope_scaling and rope_parameters: expected tables, got [{}, [1]]"),
    "lacking": (None, {"num_hidden_layers": None, "hidden_size": None},
                "no num_hidden_layers, hidden_size in it; fetch it again"),
    "text": (None, {"hidden_size": "64", "head_dim": None}, "config.json: [model] hidden: expected an integer >= 1, got '64'"),
    "number": (None, {"vocab_size": 0}, "config.json: [model] vocab: expected an integer >= 1, got 0"),
}  # fmt: skip


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
    """Of each file that is written, there and back."""
    published(tmp_path / "published")
    if file == "config.json":
        convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    there, opened = {path.name for path in tmp_path.iterdir()}, io.open

    def full(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        if file in str(path) and mode != "r" and mode != "rb":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, *given, **options)

    monkeypatch.setattr(io, "open", full)  # as pathlib calls it
    action = ["export", "ours", "back"] if file == "config.json" else ["import", "published", "ours"]
    code, out, error = command("launch.convert_hf", action[0], *(str(tmp_path / name) for name in action[1:]))
    assert (code, out) == (1, "") and "No space left on device" in error and error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == there


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
    """Inside a worker: the whole parameters that a run begins with."""
    made, done = training.trainer(config)
    assert done == 0
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in made.built.model.named_parameters()
    }


def refused(config: Any) -> str:
    """Inside a worker: why a run does not start."""
    with pytest.raises(ValueError) as error:
        training.trainer(config)
    return str(error.value)


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
        found: str = ranks(1).run(refused, config)[0]
        return found

    sentence = why(f"--train.init_from={ours}")
    assert sentence.startswith(f"{data} is of another tokenizer than the model of {ours} has learned: bytes in place")
    assert "[model] ffn is 128, this run's is 256; name another checkpoint, or make it again" in why(
        f"--train.init_from={ours}", "--model.ffn=256"
    )
    assert "holds weights alone: name it as [train] init_from" in why(f"--checkpoint.resume={ours}")
    (ours / "__0_0.distcp").unlink()
    torn = why(f"--train.init_from={ours}")
    assert "is torn: __0_0.distcp is missing" in torn and torn.rstrip().endswith(
        "; name another checkpoint, or make it again"
    )
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    published(tmp_path / "published")
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    reader = weights.Reader(tmp_path / "ours")
    with pytest.raises(
        manifest.CheckpointError, match=r"its tensor lm_head.weight is \[384, 64\], and this model's is \[3\]$"
    ):
        reader.read({"lm_head.weight": torch.empty(3)})
    with pytest.raises(manifest.CheckpointError, match="it has no tensor lm_head.bias, which this model has"):
        reader.read({"lm_head.bias": torch.empty(3)})


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_its_config_starts_from_it(tmp_path: Path, layers: int) -> None:
    shape = replace(SHAPE, layers=layers)
    published(tmp_path / "published", shape)
    convert_hf.import_folder(tmp_path / "published", tmp_path / "ours")
    config = load(tmp_path / "ours" / "config.toml")
    assert plan_for(config, 1, "cpu").layers[-1].recipe.name == "bf16"
    assert config.model == shape and config.train.init_from == str(tmp_path / "ours") and config.train.sequence == 512
