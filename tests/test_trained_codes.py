"""launch.convert_hf export --codes: a model with the exported codes has the forward of the trained model, bit for
bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from dlp.flows.compressed_models import Folder
from launch import convert_hf
from launch.config.run_config import Config, load
from launch.models.modules import Llama
from launch.weights import weights_only
from tests import training
from tests.cases import nightly, of_these
from tests.refusals import must_raise

pytest.importorskip("safetensors")

RECIPES = {
    "fp8_current": "tensor", "fp8_rowwise": "channel", "fp8_block": "block", "mxfp8": "group", "nvfp4": "tensor_group",
    "int8": "channel",
}  # fmt: skip
FAMILIES = {"llama": [], "qwen3": [], "mistral": ["--model.sliding_window=64"]}
TOKENS = torch.randint(0, 384, (8, 64), generator=torch.Generator().manual_seed(0))


def logits(config: Config) -> Tensor:
    """Train a few steps; return the forward of the trained model. Runs in a worker."""
    made, done = training.trainer(config)
    made.train(done)
    with torch.no_grad():
        found: Tensor = made.built.model(TOKENS)
    return found.clone()


def mixed(folder: Path, data: Path, family: str) -> Config:
    """Return the config of a run in which each transformer block has another recipe."""
    settings = [f"--model.family={family}", f"--model.layers={len(RECIPES)}", *FAMILIES[family]]
    training.config(folder, data)
    path = folder / "small.toml"
    groups = [
        f'[[groups]]\nname = "{name}"\nmatch = ["layers.{i}.**"]\nrecipe = "{name}"' for i, name in enumerate(RECIPES)
    ]
    path.write_text("\n".join([path.read_text().partition("[[groups]]")[0], *groups]))
    return load(path, ["--mesh.tp=1", "--train.steps=2", "--checkpoint.every=2", *settings])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("family", of_these(["qwen3"], FAMILIES))
def test_exported_codes_have_the_forward_of_the_training(ranks: Any, tmp_path: Path, family: str) -> None:
    before = ranks(1).run(logits, mixed(tmp_path, training.shards(tmp_path), family))[0]
    checkpoint, out, recipes = tmp_path / "run/checkpoints/step-2", tmp_path / "out", list(RECIPES)
    said = convert_hf.export(checkpoint, out, None, None, limit=100_000, codes=True)
    print(said)
    assert said.startswith(f"{7 * len(RECIPES)} linears as codes of ") and "; without --codes " in said
    tables = json.loads((out / "config.json").read_text())["quantization_config"]
    assert [group["weights"]["strategy"] for group in tables["config_groups"].values()] == list(RECIPES.values())
    assert tables["ignore"] == ["lm_head"] and tables["format"] == "mixed-precision"
    model = Llama(weights_only.Reader(checkpoint).model(), torch.bfloat16)
    model.lm_head.bfloat16()  # the bf16 recipe of the training rounds the weight in this way
    dlp.load_compressed(model, out, lambda name: recipes[int(name.split(".")[2])])
    with torch.no_grad():
        assert torch.equal(model(TOKENS), before)


@pytest.mark.ranks(1)
def test_exported_integers_have_the_forward_of_the_training_in_fp32(ranks: Any, tmp_path: Path) -> None:
    """In fp32 the forward with exported codes equals the forward of the trained model. In bf16 they differ, because
    the training rounds decoded values to bf16, but the exported codes are decoded to fp32 (docs/qat.md states the
    difference)."""
    found = {}
    for dtype in ("fp32", "bf16"):
        (folder := tmp_path / dtype).mkdir()
        settings = ["--mesh.tp=1", "--train.steps=2", "--checkpoint.every=2", f"--train.dtype={dtype}"]
        config = training.config(folder, training.shards(folder), "--groups.default.recipe=qat", *settings)
        before = ranks(1).run(logits, config)[0]
        checkpoint, out = folder / "run/checkpoints/step-2", folder / "out"
        convert_hf.export(checkpoint, out, None, None, codes=True)
        model = Llama(weights_only.Reader(checkpoint).model(), before.dtype)
        model.lm_head.to(before.dtype)
        dlp.load_compressed(model, out, "qat")
        with torch.no_grad():
            found[dtype] = model(TOKENS) - before
        found[dtype] = found[dtype].norm() / before.norm()
    assert found["fp32"] == 0 < found["bf16"] < 0.02, found


def operands(config: Config) -> dict[str, Tensor]:
    """Train, and return the decoded rowwise weights that the next forward would multiply on this rank. Runs in a
    worker."""
    made, done = training.trainer(config)
    made.train(done)
    found = {}
    for name, module in made.built.model.named_modules():
        for weight in module.core.weights if hasattr(module, "core") else ():
            if weight.member.module is module and weight.parts:
                if (fmt := weight.bound.spec.recipe.w.rowwise.format).keeps_source:
                    continue  # lm_head
                rows, columns = weight.value.shape  # the operand may be padded
                found[name] = fmt.wrap(weight.parts).dequantize(torch.bfloat16)[:rows, :columns].clone()
    return found


def shard(whole: Tensor, local: Tensor, rank: int) -> Tensor:
    """Return the shard of a weight on tp rank `rank`, along the dimension in which `local` is smaller; the full weight if
    none is."""
    cut = next((dim for dim in (0, 1) if whole.shape[dim] != local.shape[dim]), None)
    return whole if cut is None else whole.chunk(2, cut)[rank]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "recipe, tp, swap",
    [
        nightly("{name='fp8_current',amax_scope='all'}", 2, []),
        ("fp8_delayed", 2, []),
        nightly("qat", 2, []),
        ("nvfp4", 2, ["--groups.default.swap=[{at_step=2,recipe='mxfp8'}]"]),
    ],
    ids=["fp8_current", "fp8_delayed", "qat", "swap"],
)
def test_exported_codes_are_the_operands_of_every_rank(
    ranks: Any, tmp_path: Path, recipe: str, tp: int, swap: list[str]
) -> None:
    """The exported codes equal the operands of both tp ranks, for column- and row-parallel shards, with delayed
    scales, and after a recipe change."""
    settings = [
        f"--mesh.tp={tp}",
        f"--groups.default.recipe={recipe}",
        "--train.steps=2",
        "--checkpoint.every=2",
        *swap,
    ]
    config = training.config(tmp_path, training.shards(tmp_path), *settings)
    on_ranks = ranks(2).run(operands, config)
    convert_hf.export(tmp_path / "run/checkpoints/step-2", tmp_path / "out", "bf16", 128, codes=True)
    read = Folder(tmp_path / "out")
    values = {name: read.layer(name)[0].dequantize(torch.bfloat16) for name in read.layers()}
    for rank, found in enumerate(on_ranks):
        assert len(found) == 7
        for name, local in found.items():
            assert torch.equal(local, shard(values[name], local, rank)), name


@pytest.mark.ranks(2)
def test_codes_that_no_file_can_hold_are_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    data = training.shards(tmp_path)

    def refused(name: str, *settings: str) -> str:
        (folder := tmp_path / name).mkdir()
        config = training.config(folder, data, "--train.steps=2", "--checkpoint.every=2", *settings)
        ranks(2).run(training.run, config)
        checkpoint = folder / "run/checkpoints/step-2"
        said = must_raise(ValueError, convert_hf.export, checkpoint, tmp_path / "out", None, None, codes=True)
        assert not (tmp_path / "out").exists()
        return said

    scales = refused("a", "--mesh.tp=2")
    assert (
        "model.layers.0.self_attn.q_proj: each of 2 tp ranks had a separate scale of w in fp8_current, which the"
        in scales
    )
    assert "amax_scope = 'all' }" in scales
    blocks = refused("b", "--mesh.tp=2", "--groups.default.recipe=fp8_block")
    assert (
        "tp = 2 split blocks of fp8_block[e4m3, 128x128] between ranks, so that scales depended on the rank" in blocks
    )
    assert "no recipe of this checkpoint quantizes weights" in refused("c", "--groups.default.recipe=bf16")
