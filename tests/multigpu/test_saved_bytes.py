"""Bytes that linears save for backward: at most 0.55 of bf16 in 8-bit recipes, and 0.30 in nvfp4; also counted in a
complete block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dlp
from bench.saved_bytes import main, of_block, saved
from dlp.parallel.linear.modules import ParallelLinear
from launch.config.run_config import load
from launch.models.modules import Llama
from launch.models.parallel import parallel_groups
from launch.models.settings import Model
from tests import pool as worker
from tests.cases import RECIPES

BLOCK = Model(layers=1, hidden=256, ffn=1024, heads=4, kv_heads=2, head_dim=64, vocab=256)
TOKENS = 256
MOST = {"bf16": 1.0, "nvfp4": 0.30}
ROOT = Path(__file__).parents[2]
SMALL = 64  # bytes of all small saved tensors whose size does not depend on the tokens


@pytest.mark.parametrize("model", [load("bench_8b").model, BLOCK], ids=["8b", "small"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_saves_its_share_of_bf16(recipe: str, model: Model):
    found, plain = (sum(of_block(model, name, 4096, torch.bfloat16).values()) for name in (recipe, "bf16"))
    x_of_each = 4096 * 2 * (2 * model.hidden + model.heads * model.head_dim + model.ffn)
    assert 0 <= plain - x_of_each <= SMALL, "siblings once"
    assert found <= MOST.get(recipe, 0.55) * plain


def in_a_real_block(recipe: Any) -> int:
    """Bytes that the linears in a block of a converted Llama save in a forward."""
    model = Llama(BLOCK).to(worker.device(), torch.bfloat16)
    group = {"name": "recipe", "match": ["layers.**.*_proj"], "recipe": recipe}
    dlp.convert(model, [*parallel_groups(BLOCK, False), group], worker.mesh(dp_shard=1), batch=(1, TOKENS))
    weights = [parameter.to_local() for parameter in model.parameters()]
    kept: list[Any] = []
    total = 0
    for module in model.model.layers.modules():
        if isinstance(module, ParallelLinear):

            def run(x: torch.Tensor, forward: Any = module.forward) -> torch.Tensor:
                nonlocal total
                with saved(weights) as found:
                    kept.append(forward(x))
                    total += sum(found.values())
                return kept[-1]

            module.forward = run
    model(torch.zeros(1, TOKENS, dtype=torch.int64, device=worker.device()))
    return total


@pytest.mark.ranks(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_real_block_saves_what_is_counted(ranks, recipe):
    (real,) = ranks(1).run(in_a_real_block, recipe)
    assert real == pytest.approx(sum(of_block(BLOCK, recipe, TOKENS, torch.bfloat16).values()), abs=SMALL)


def test_the_table_is_that_of_the_page(capsys):
    main(["bench_8b"])
    row = "| nvfp4 | 18.00 | 18.00 | 18.00 | 63.00 | 117.00 | 0.281 |"
    assert row in capsys.readouterr().out and row in (ROOT / "bench" / "results" / "saved_bytes.md").read_text()
