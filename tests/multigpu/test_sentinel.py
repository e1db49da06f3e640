"""`[train] sentinel`: a run without faults has the bits of a run without the sentinel, and a flipped bit ends the run
before the update."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import flips
from dlp.comm import observer
from dlp.comm.wire_checks import WireChecks, checksums, piece_sums
from launch.config.run_config import Config, load
from launch.settings.schema import ConfigError
from launch.training import sentinel
from launch.training.build import build
from launch.training.sentinel import Sentinel, SentinelError
from launch.training.trainer import Trainer
from tests import training
from tests.cases import few, nightly

LAYER = "model.layers.0.mlp.up_proj"


def flipped(tensor: Tensor) -> Tensor:
    """The tensor with the lowest bit of one element flipped."""
    bits = tensor.detach().clone().contiguous()
    bits.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])[3] ^= 1
    return bits


def losses(folder: Path, data: Path, *overrides: str) -> dict[int, Any]:
    """The losses of a complete run. Runs in a worker."""
    folder.mkdir(exist_ok=True)
    config = training.config(folder, data, *overrides)
    training.run(config)
    return training.metrics(config)


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return flipped(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def stopped(folder: Path, data: Path, where: str, *overrides: str) -> str:
    """The message of a run with a flipped bit (`flipping`). Runs in a worker."""
    trainer, done = flipping(training.config(folder, data, *overrides), where)
    with pytest.raises(SentinelError) as error:
        Trainer.train(trainer, done)
    return str(error.value)


def skipped(folder: Path, data: Path, *overrides: str) -> tuple[dict[int, Any], dict[int, Any], list[str]]:
    """Skipped steps, losses and log of a run in which a bit of y flips. Runs in a worker."""
    config = training.config(folder, data, *overrides)
    Trainer.train(*flipping(config, "y"))
    return training.metrics(config, "skipped"), training.metrics(config), training.said(config)


def flipping(config: Config, where: str) -> tuple[Trainer, int]:
    """A run in which rank 1 flips a bit of y, of a gradient, of a weight or of an optimizer state in the second pass of
    step 3."""
    trainer, done = training.trainer(config)
    module, calls = trainer.built.model.get_submodule(LAYER), [0]
    rank = trainer.built.dims.rank("tp")
    calls_of_step = 1 + trainer.built.batch.num_micro  # a rehearsal, and all microbatches

    def now() -> bool:
        return rank == 1 and calls[0] == 2 * calls_of_step + 2

    def after(module: Any, args: Any, y: Tensor) -> Tensor | None:
        calls[0] += torch.is_grad_enabled()
        return Flip.apply(y) if where == "y" and torch.is_grad_enabled() and now() else None

    @torch.no_grad()
    def flip(weight: Any) -> None:
        if now():
            state = trainer.built.optimizer.state[weight].get("exp_avg_sq")
            held = {"gradient": weight.grad, "weight": weight, "state": state}[where]._local_tensor
            held.copy_(flipped(held))

    module.register_forward_hook(after)
    if where != "y":
        module.weight.register_post_accumulate_grad_hook(flip)
    return trainer, done


class Damaging(WireChecks):
    """Flip one bit in a chunk of rank 0 that rank 1 receives, in the given direction."""

    direction = ""

    def arrived(self, tensor: Tensor) -> Tensor:
        if dist.get_rank() == 1 and observer._LABEL.get().direction == self.direction:
            type(self).direction = "none"
            tensor.view(-1).view(torch.uint8)[3] ^= 16
        return tensor


def damaged(folder: Path, data: Path, direction: str, *overrides: str) -> str:
    """The message of a run in which a transfer is damaged in the repeated pass of step 1. Runs in a worker."""
    trainer, done = training.trainer(training.config(folder, data, *overrides))
    Damaging.direction = direction
    with pytest.raises(SentinelError) as error, patch.object(sentinel, "WireChecks", Damaging):
        Trainer.train(trainer, done)
    return str(error.value)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.shards(tmp_path_factory.mktemp("sentinel"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    few([("fp8_delayed", "false"), ("nvfp4", "false"), ("fp8_current", "true")], ("nvfp4", "false")),
)
def test_a_clean_run_is_the_run_without_it(ranks, tmp_path, data, device_type, recipe, compiled):
    """The sentinel repeats two steps. On GPUs steps 4 and 6 to 9 are replayed beside these, with a validation after steps 4
    and 8."""
    every = 5 if device_type == "cuda" else 2
    small = ("--train.global_batch", "2", "--train.sequence", "32", "--checkpoint.every", "20")
    given = (
        "--recipe",
        recipe,
        "--train.compile",
        compiled,
        "--train.steps",
        str(2 * every),
        "--train.ledger",
        "off",
        *small,
    )
    plain = ranks(2).run(losses, tmp_path / "plain", data, *given, timeout=300.0)[0]
    watched = ranks(2).run(losses, tmp_path / "watched", data, *given, "--train.sentinel", str(every), timeout=300.0)[0]
    assert watched == plain and len(plain) == 2 * every


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("where", "said", "microbatches"),
    [
        nightly("y of fp8_delayed", f"y of {LAYER} in forward", 1),
        nightly("y", f"y of {LAYER} in forward", 1),
        ("gradient", f"the gradient of {LAYER}.weight in backward", 2),
        nightly("gradient", f"the gradient of {LAYER}.weight in backward", 1),
        nightly("weight", f"{LAYER}.weight itself in memory", 1),
        ("state", f"exp_avg_sq of {LAYER}.weight in memory", 1),
    ],
)
def test_a_flipped_bit_is_named_before_the_update(ranks, tmp_path, data, where, said, microbatches):
    given = ["--train.sentinel", "1", "--train.ledger", "off", "--train.sentinel_tensors", "true"]
    given += ["--train.micro_batch", str(8 // microbatches)]
    given += ["--recipe", where.partition(" of ")[2] or "fp8_current"]
    action = (
        "stop" if where in ("y", "gradient") else "skip"
    )  # a skipped update does not mend memory, nor delayed scales
    messages = ranks(2).run(
        stopped, tmp_path, data, where.partition(" of ")[0], *given, "--train.sentinel_action", action
    )
    assert messages[0] == messages[1]
    step = 2 if "delayed" in where else 3  # the passes that find first scales call the module as well
    assert messages[0].startswith(f"step {step}: the first microbatch ran twice and gave other bits, first on ")
    assert re.search(rf"rank 1 \([^)]*\): {re.escape(said)}", messages[0])
    file = f"sentinel-step-{step}-rank1.pt"
    assert f"{file} has both tensors; start again from the last checkpoint" in messages[0]
    kept = torch.load(tmp_path / "run" / file)
    assert kept["tensor"] == said.rpartition(" in ")[0]
    assert (kept["first"] != kept["second"]).sum() == 1


@pytest.mark.ranks(2)
def test_a_difference_skips_the_update_by_setting(ranks, tmp_path, data):
    given = ("--train.sentinel", "1", "--train.ledger", "off", "--train.steps", "4")
    steps, losses, said = ranks(2).run(skipped, tmp_path, data, *given, "--train.sentinel_action", "skip")[0]
    assert steps == {3: True} and len(losses) == 4
    (line,) = (line for line in said if line.startswith("step 3: the first microbatch ran twice"))
    assert f"y of {LAYER} in forward" in line and line.endswith("failed; the update was skipped")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("direction", "said", "mesh"),
    [
        ("fprop", "fprop of model.embed_tokens", ()),
        ("dgrad", "dgrad of lm_head", ()),
        ("", "weights or gradients of no single layer", ("--mesh.tp", "1")),
    ],
)
def test_a_damaged_transfer_is_named_with_its_sender(ranks, tmp_path, data, direction, said, mesh):
    given = ("--train.sentinel", "1", "--train.ledger", "off", *mesh)
    messages = ranks(2).run(damaged, tmp_path, data, direction, *given)
    assert messages[0] == messages[1]
    told = f"{said} from rank 0, which arrived with other bits than were sent"
    assert re.search(rf"first on rank 1 \([^)]*\): {re.escape(told)}", messages[0])


def with_flips(out: Path) -> None:
    """Inject a flip of each kind on each rank and mesh (`bench.flips`). Runs in a worker."""
    try:
        with warnings.catch_warnings():
            flips.flip_all(dist.get_rank(), 2, out, range(24), range(0))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.ranks(2)
@pytest.mark.full  # the flips above represent these
def test_random_flips_are_named_by_rank_and_layer(ranks, tmp_path):
    out = tmp_path / "flips.csv"
    out.write_text(",".join(flips.COLUMNS) + "\n")
    ranks(2).run(with_flips, out)
    checked = [row for row in flips.rows_of(out) if row["kind"] != "activation gradient" and row["bit"] != "-1"]
    assert len(checked) >= 16 and {row["kind"] for row in checked} == {*flips.KINDS} - {"activation gradient"}
    missed = [row for row in checked if (row["found"], row["names rank"], row["names layer"]) != ("True",) * 3]
    assert not missed


def test_gpus_must_repeat_their_bits():
    config = load("tiny", ["--train.sentinel", "64"])
    with pytest.raises(
        ConfigError, match="expected deterministic = true on GPUs, where attention's backward gives other bits"
    ):
        build(config, None, torch.device("cuda"))  # type: ignore[arg-type]


def test_a_tensor_that_cannot_be_written_does_not_hide_the_difference(tmp_path):
    watch = Sentinel(torch.nn.Identity(), 1, folder=tmp_path / "none")
    watch._copies["forward", "y"] = [torch.ones(2), torch.zeros(2)]
    with patch.object(sentinel.dist, "get_rank", lambda: 3):
        assert watch._keep(("forward", "y"), 8).startswith("sentinel-step-8-rank3.pt could not be written (")


def test_no_step_is_watched_with_0():
    watched = [[step for step in range(1, 9) if Sentinel(torch.nn.Identity(), every).due(step)] for every in (0, 4)]
    assert watched == [[], [4, 8]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_sees_each_bit(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for bit in range(8 * dtype.itemsize):
        other = x.clone()
        other.view(whole)[5] ^= -(2**bit) if bit == 8 * dtype.itemsize - 1 else 2**bit
        assert checksums(other) != checksums(x) and not torch.equal(piece_sums(other), piece_sums(x))
    assert checksums(x.clone()) == checksums(x)


def test_a_checksum_sees_another_order():
    x = torch.arange(4096, dtype=torch.int32)
    swapped, balanced = x.clone(), x.clone()
    swapped[8:12], swapped[12:16] = x[12:16], x[8:12]
    balanced[0], balanced[4095] = x[0] + 1, x[4095] - 1
    assert len({checksums(each).item() for each in (x, x.flip(0), x.roll(4), swapped, balanced)}) == 5
    assert checksums(x[:0]) == 0
    assert checksums(x[1:9]) == checksums(x[1:9].clone())  # wherever the tensor is stored
    assert torch.equal(checksums(x, 4), torch.cat([checksums(each) for each in x.chunk(4)]))
    assert torch.equal(checksums(x[:12], 4), torch.cat([checksums(each) for each in x[:12].chunk(4)]))
