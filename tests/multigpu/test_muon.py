"""Muon in complete runs: equality with torch's Muon on one rank, the same updates on shards, a resumed run, and refused
optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.optim import muon
from launch.config.run_config import Config
from launch.training.optimizer import make_optimizer
from tests import pool as worker
from tests import training
from tests.metrics import assert_all_bit_equal, assert_all_close, assert_bit_equal, assert_close
from tests.shardnet import whole

MESSAGE = r"has no exp_avg(_sq)? of model.layers.0\S+; it is of another kind of optimizer"
STEPS = ("--train.steps=4", "--train.eval_every=4", "--train.sequence=32", "--groups.default.recipe=bf16")
Q_PROJ, HEAD = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


def config(folder: Path, data: Path, *overrides: str, optimizer: str = "muon") -> Config:
    return training.config(folder, data, *STEPS, f"--train.optimizer={optimizer}", *overrides)


def trained(config: Config, until: int) -> dict[str, Tensor]:
    trainer, done = training.trainer(config)
    trainer.recorder.begin(done)
    for step in range(done, until):
        trainer.train_step(step)
    trainer.save(until)
    optimizer = trainer.built.optimizer
    named = dict(trainer.built.model.named_parameters())
    momenta = {
        f"momentum of {name}": whole(optimizer.state[p][muon.BUFFER]) for name, p in named.items() if "proj" in name
    }
    return {name: whole(p) for name, p in named.items()} | momenta


def shards_and_back(config: Config) -> list[bool]:
    trainer, _ = training.trainer(config)
    found = []
    optimizer = trainer.built.optimizer
    with torch.no_grad():
        for parameter in [p for group in optimizer.param_groups if group.get("matrices") for p in group["params"]]:
            matrix = muon.whole(parameter.to_local(), parameter)
            found.append(torch.equal(muon.shard_of(matrix, parameter), parameter.to_local()))
            found.append(torch.equal(matrix, whole(parameter)))
    return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mesh", [(), ("--mesh.dp_replicate=2", "--mesh.dp_shard=2", "--mesh.tp=1")], ids=["tp", "hsdp"]
)
def test_a_matrix_is_gathered_whole_and_cut_again(ranks, tmp_path, data, mesh):
    for found in ranks(4).run(shards_and_back, config(tmp_path, data, *mesh)):
        assert len(found) == 14 and all(found)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_resumed_run_repeats_the_bits_and_other_meshes_take_it(ranks, tmp_path, data):
    expected = ranks(2).run(trained, config(tmp_path, data, f"--run.dir={tmp_path}/whole"), 4)[0]
    parts = config(tmp_path, data)
    ranks(2).run(trained, parts, 2)
    again = ranks(2).run(trained, parts, 4)[0]
    assert_all_bit_equal(again, expected)
    alone = ranks(1).run(trained, config(tmp_path, data, "--mesh.tp=1", f"--run.dir={tmp_path}/alone"), 2)[0]
    cut = ranks(2).run(trained, config(tmp_path, data, "--mesh.tp=1", f"--run.dir={tmp_path}/cut"), 2)[0]
    assert_all_close(cut, alone, 0.02)
    with pytest.raises(worker.RankError, match=MESSAGE):
        ranks(2).run(trained, config(tmp_path, data, optimizer="adamw"), 4)


def test_steps_are_those_of_torch():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    own: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(48, 96), torch.nn.Linear(96, 32)])})
    start = {name: p.detach().clone() for name, p in own.named_parameters()}
    theirs = [torch.nn.Parameter(start[f"layers.{i}.weight"].clone()) for i in (0, 1)]
    settings = training.load("tiny", ["--train.optimizer=muon", "--train.lr=1e-2", "--train.weight_decay=0.1"])
    made = make_optimizer(own, settings, torch.device("cpu"))
    torchs = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for i, parameter in enumerate(theirs):
            parameter.grad = torch.randn(parameter.shape)
            own["layers"][i].weight.grad = parameter.grad.clone()
        made.step()
        torchs.step()
    for i, parameter in enumerate(theirs):
        assert_bit_equal(made.state[own["layers"][i].weight][muon.BUFFER], torchs.state[parameter]["momentum_buffer"])
        assert_close(own["layers"][i].weight, parameter, 1e-6)
        assert not torch.equal(parameter, start[f"layers.{i}.weight"])
