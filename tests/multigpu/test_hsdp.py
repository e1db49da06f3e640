"""Replicas of FSDP shards, in every recipe: two replicas that read the same tokens train with the bits of one
replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dlp
from dlp.comm.mesh import DP_SHARD
from launch.config.run_config import load
from launch.training.build import build
from launch.training.gradient_norm import GradientNorm
from tests import pool as worker
from tests.cases import RECIPES, few

SMALL = [
    "--model.layers=1", "--model.hidden=256", "--model.ffn=256", "--model.heads=4", "--model.kv_heads=4",
    "--model.head_dim=64", "--model.vocab=256", "--train.sequence=32", "--train.compile=false",
]  # fmt: skip
# With stochastic rounding, replicas would round differently
OPTIONS: dict[str, dict[str, Any]] = {"nvfp4": {"disable_stochastic_rounding": True}}
CASES = few(RECIPES, ("nvfp4",))
STEPS = 2


def trained(recipe: str, replicas: int) -> tuple[int, list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train a few steps. Return the position of this rank on dp_shard, losses and gradient norms, and this rank's
    shards of the weights."""
    options = "".join(f", {key} = {str(value).lower()}" for key, value in OPTIONS.get(recipe, {}).items())
    config = load("tiny", [
        *SMALL, f"--recipe={{ name = '{recipe}'{options} }}", "--mesh.tp=1", "--mesh.dp_shard=2",
        f"--mesh.dp_replicate={replicas}", f"--train.global_batch={2 * replicas}",
    ])  # fmt: skip
    mesh = worker.mesh(dp_replicate=replicas, dp_shard=2)
    built = build(config, mesh, worker.device())
    place = built.dims.rank(DP_SHARD)
    text = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(place)).to(built.device)
    norm, said = GradientNorm(built.model.parameters()), []
    for _ in range(STEPS):
        loss = dlp.cross_entropy(built.model(text[:, :-1]), text[:, 1:], mesh) / 32
        loss.backward()
        said.append((loss.item(), norm().item()))
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
    return place, said, {name: p.to_local().detach().cpu() for name, p in built.model.named_parameters()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", CASES)
def test_replicas_that_read_the_same_train_as_one(ranks, recipe):
    """Weights have equal bits, because the average of equal gradients is exact. Gradient norms agree within rounding,
    because they are sums over more ranks."""
    one = {place: found for place, *found in ranks(2).run(trained, recipe, 1)}
    replicas = ranks(4).run(trained, recipe, 2)
    assert [place for place, *_ in replicas] == [0, 1, 0, 1]
    for place, said, weights in replicas:
        (losses, norms), (expected, about) = (zip(*numbers, strict=True) for numbers in (said, one[place][0]))
        assert losses == expected and norms == pytest.approx(about, rel=1e-6)
        for name, weight in weights.items():
            assert torch.equal(weight, one[place][1][name]), name
