"""bench.lora: planned bytes of LoRA over a quantized base equal the bytes of the tensors, a 70B base in nvfp4 fits two
GPUs, and training steps run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import lora
from launch.config.run_config import load
from launch.training.build import meta_model


def test_planned_bytes_are_those_of_the_tensors() -> None:
    config = load("tiny", [*lora.OPTIONS, "--model.layers=5"])
    for base, size in (("bf16", 2.0), ("nvfp4", 1 / 2 + 1 / 256)):
        rows = lora.planned(config, base, 8, 2, (1, 64))
        model = meta_model(config)
        inside = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "layers." in name]
        weights = sum(m.weight.numel() for m in inside)
        others = sum(p.numel() for p in model.parameters()) - weights
        assert rows["base"] == pytest.approx((weights * size + others * 2) / 2, abs=4 * len(inside))
        adapters = sum(8 * (m.in_features + m.out_features) for m in inside)
        assert rows["adapters, gradients, AdamW"] == adapters * 2 * 4 / 2
        assert rows["inputs of blocks"] == 5 * 64 * config.family.hidden * 2


def test_a_base_of_70b_in_nvfp4_is_planned_for_two_gpus_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--plan", "--config", "llama3_70b", "--world", "2", "--device", "h100", "--bases"]
    assert lora.main([*plan, "nvfp4"]) == 0
    assert lora.main([*plan, "bf16"]) == 1
    nvfp4, bf16 = capsys.readouterr().out.splitlines()
    assert nvfp4.startswith("nvfp4: planned ") and bf16.startswith("bf16: planned ")


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_steps_run_and_are_compared_with_the_first_base(ranks, tmp_path: Path) -> None:
    file = tmp_path / "lora.json"
    sizes = ["--config", "tiny", "--tokens", "32", "--steps", "1", "--rank", "4", "--json", str(file)]
    ranks(1).run(stepped, [*sizes, "--bases", "bf16", "nvfp4"])
    found = json.loads(file.read_text())
    assert [each["base"] for each in found] == ["bf16", "nvfp4"] and all(
        each["tokens_per_second"] > 0 for each in found
    )


def stepped(arguments: list[str]) -> None:
    torch.manual_seed(0)
    lora.shutdown = lambda: None  # the process group of the pool must survive
    lora.init_process_group = lambda device_type: None
    lora.main(arguments)
