"""launch.convert_hf export --codes: what a run trained comes back with the forward of the training, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from launch import convert_hf
from launch.config.run_config import Config, load
from launch.models.modules import Llama
from launch.weights import weights_only
from tests import training

pytest.importorskip("safetensors")

FORMATS = {
    "fp8_current": "tensor", "fp8_rowwise": "channel", "fp8_block": "block", "mxfp8": "group", "nvfp4": "tensor_group",
    "int8": "channel", "qat": "group",
}  # fmt: skip
FAMILIES = {"llama": [], "qwen3": [], "mistral": ["--model.sliding_window=64"]}
TOKENS = torch.randint(0, 384, (8, 64), generator=torch.Generator().manual_seed(0))


def logits(config: Config) -> Tensor:
    """Inside a worker: a run of a few steps, and the forward of the model that it trained."""
    made, done = training.trainer(config)
    made.train(done)
    with torch.no_grad():
        found: Tensor = made.built.model(TOKENS)
    return found.clone()


def trained(ranks: Any, folder: Path, data: Path, *settings: str, world: int = 1) -> tuple[Tensor, Path]:
    """Logits after two steps, and the checkpoint."""
    folder.mkdir()
    config = training.config(folder, data, "--mesh.tp=1", "--train.steps=2", "--checkpoint.every=2", *settings)
    return ranks(world).run(logits, config)[0], folder / "run" / "checkpoints" / "step-2"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_codes_have_the_forward_of_the_training(ranks: Any, tmp_path: Path, family: str) -> None:
    data = training.shards(tmp_path)
    for name, strategy in FORMATS.items():
        settings = [f"--model.family={family}", *FAMILIES[family], f"--groups.default.recipe={name}"]
        before, checkpoint = trained(ranks, tmp_path / name, data, *settings)
        out = tmp_path / f"{name}-out"
        said = convert_hf.export(checkpoint, out, None, None, limit=100_000, codes=True)
        print(family, said)
        tables = json.loads((out / "config.json").read_text())["quantization_config"]
        assert tables["config_groups"]["group_0"]["weights"]["strategy"] == strategy and tables["ignore"] == ["lm_head"]
        model = Llama(weights_only.Reader(checkpoint).model(), torch.bfloat16)
        assert len(dlp.load_compressed(model, out, name)) == 7
        model.lm_head.bfloat16()  # as the bf16 recipe of the training rounds the weight
        with torch.no_grad():
            assert torch.equal(model(TOKENS), before), name
        assert said.startswith("7 linears as codes of ")
