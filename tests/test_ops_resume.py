"""Models built from `dlp.ops` that are killed and resumed, on the same mesh and on other meshes, have the bits of an
uninterrupted run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import dlp
from tests import ops_programs
from tests import pool as worker
from tests.metrics import assert_bit_equal, assert_close
from tests.net import full
from tests.ops_models import values
from tests.ops_programs import PROGRAMS, WIDTH
from tests.pool import RankError
from tests.test_ops_ranks import FFN, H, block

SAVED, STEPS = 2, 4
RECIPES = {name: "fp8_delayed" for name in PROGRAMS if name != "Quantized"} | {"Split": "fp8_current"}


class Run:
    """A model with an optimizer that has states."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        dlp.attach(self.model, self.optimizer)

    def step(self, step: int, *, dies: bool = False) -> Tensor:
        self.optimizer.zero_grad()
        y = self.model(values(step, 2 * WIDTH, WIDTH).requires_grad_())
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        y.backward(values(100 + step, *y.shape))
        self.optimizer.step()
        return y.detach()

    def state(self) -> dict[str, Any]:
        momenta = {name: self.optimizer.state[p].get("momentum_buffer") for name, p in self.model.named_parameters()}
        return {"model": self.model.state_dict(), "momenta": momenta, "dlp": dlp.state_dict(self.model)}

    def load(self, folder: Path) -> None:
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        assert not dlp.load_state_dict(self.model, state["dlp"])


def program(name: str, mesh: Mapping[str, int], seed: int) -> nn.Module:
    """Return a program whose parts are sharded separately. On one rank the program is unsharded."""
    torch.manual_seed(seed)
    with patch.object(ops_programs, "RECIPE", RECIPES[name]):
        model = PROGRAMS[name]()
    for part in (*model.children(), model) if dist.get_world_size() > 1 else ():
        dlp.fully_shard(part, mesh=worker.mesh(**mesh))
    return model


def flat(run: Run) -> dict[str, Tensor]:
    """Return an unsharded copy of the state of a program."""
    return {f"{kind} {key}": full(tensor).clone() for kind, its in run.state().items() for key, tensor in its.items()}


def trained(folder: Path, mesh: Mapping[str, int], first: int, dies: bool = False) -> dict[str, Tensor]:
    """Run the programs from step `first`, which is 0 or the step of the checkpoint, to the last step; return the last y and
    the states. `dies`: save a checkpoint after SAVED steps, and kill rank 1 after the next forward."""
    found: dict[str, Tensor] = {}
    runs = {name: Run(program(name, mesh, seed=first)) for name in RECIPES}
    for name, run in runs.items():
        if first:
            run.load(folder / name)
        for step in range(first, SAVED if dies else STEPS):
            found[f"{name} y"] = run.step(step)
        if dies:
            dcp.save(run.state(), checkpoint_id=folder / name)
    for name, run in runs.items() if not dies else ():
        found |= {f"{name} {key}": tensor for key, tensor in flat(run).items()}
    if dies:
        next(iter(runs.values())).step(SAVED, dies=dist.get_rank() == 1)
    return found


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_programs_that_are_killed_go_on_with_the_same_bits(ranks: Any, tmp_path: Path, request: pytest.FixtureRequest):
    """Each program resumes with its weights, momenta and delayed scales: on its mesh, on one rank and, with
    `--all-cases`, on replicas."""
    meshes: list[tuple[int, dict[str, int]]] = [(2, {"dp_shard": 2}), (1, {})]
    if request.config.getoption("--all-cases"):
        meshes.append((2, {"dp_replicate": 2, "dp_shard": 1}))
    expected = ranks(2).run(trained, tmp_path, {"dp_shard": 2}, 0)[0]
    with pytest.raises(RankError, match="SIGKILL|died"):
        ranks(2).run(trained, tmp_path, {"dp_shard": 2}, 0, True)
    assert any("slots." in name and ".scale" in name for name in expected)
    for world, mesh in meshes:
        for found in ranks(world).run(trained, tmp_path, mesh, SAVED):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert_bit_equal(found[name], tensor, f"{mesh} {name}")


class OnTokens(nn.Module):
    """The modules norm, gate and up, SwiGLU, down; they run on token shards if there is tp."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh, self.inner = mesh, block(mesh["tp"] if mesh["tp"].size() > 1 else None, sp=True)

    def forward(self, x: Tensor) -> Tensor:
        return dlp.gather_tokens(self.inner(dlp.scatter_tokens(x, self.mesh)), self.mesh)


def moved(folder: Path, tp: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Run one optimizer step of OnTokens on `tp` ranks, from the saved state unless `step` is 0, and save the state
    after the step. Return the loaded state (if any) and the state after the step in one dict, and y."""
    mesh = worker.mesh(dp_shard=1, tp=tp)
    model = OnTokens(mesh)
    dlp.convert(model, [dlp.LayerGroup("all", "inner.*", recipe="fp8_delayed", sequence_parallel=tp > 1)], mesh)
    run = Run(model)
    if step:
        run.load(folder / str(step))
    before = flat(run) if step else {}
    x = values(step, 2 * FFN, H).requires_grad_()
    y = run.model(x)
    y.backward(values(100 + step, *y.shape))
    run.optimizer.step()
    after = flat(run)
    dcp.save(run.state(), checkpoint_id=folder / str(step + 1))
    return before | {f"after {name}": tensor for name, tensor in after.items()}, y.detach()


@pytest.mark.ranks(2)
def test_a_block_goes_from_tp_ranks_to_one_and_back(ranks: Any, tmp_path: Path):
    """Loaded tensors and delayed scales equal the saved ones; y is close to y of a run that stays on one rank."""
    before, stayed = {}, tmp_path / "stayed"
    for step, tp in enumerate((2, 1, 2)):
        (alone, expected), *_ = ranks(1).run(moved, stayed, 1, step)
        for found, y in ranks(tp).run(moved, tmp_path, tp, step):
            for name, tensor in before.items():
                assert_bit_equal(found[name.removeprefix("after ")], tensor, name)
            assert_close(y, expected, 0.02)
        before = {name: tensor for name, tensor in found.items() if name.startswith("after ")}
