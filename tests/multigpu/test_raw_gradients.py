"""Raw gradients of a training step, before clipping and before the optimizer, against one rank with the full batch.

With AdamW or clipping, a constant factor in the gradients does not change the updates, so losses would not show it.
These tests compare gradients: on every mesh, with every number of microbatches and both kinds of FSDP reduction, with a
z-loss, and with unevenly ignored targets (some sequences count completely, some in part, and some not at all). The
expected values are computed in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launch.config.run_config import Config
from launch.training.gradient_norm import GradientNorm
from launch.training.trainer import Batch, Trainer
from tests import training
from tests.cases import nightly
from tests.metrics import relative_error
from tests.net import full
from tests.pool import Pool

SEQUENCES, LENGTH, Z_LOSS = 16, 16, 0.05
IGNORED = -100


class UnevenTrainer(Trainer):
    """Trainer on sequences of which the first 0, 8 or 16 targets count, depending on the sequence."""

    def batches(self, data: Any, step: int) -> Iterator[Batch]:
        for tokens, targets in super().batches(data, step):
            yield tokens, uneven(tokens, targets)


def uneven(tokens: Tensor, targets: Tensor) -> Tensor:
    counted = tokens.sum(1, keepdim=True) % 3 * (LENGTH // 2)
    return torch.where(torch.arange(LENGTH, device=tokens.device) < counted, targets, IGNORED)


class Found(NamedTuple):
    """Results of a step: full gradients by name, the norm that clipping computes, the loss summed over ranks."""

    gradients: dict[str, Tensor]
    norm: float
    loss: float


def distributed(config: Config) -> Found:
    """Return the results of the first step of a run on its mesh."""
    trainer, _ = training.trainer(config, UnevenTrainer)
    model = trainer.built.model
    batches = list(trainer.batches(trainer.train_data, 0))
    loss = trainer.forward_backward(batches) / trainer.built.dims.tp
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    norm = GradientNorm(model.parameters())().item()
    training.end_determinism()
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(loss)
    return Found(gradients, norm, loss.item())


def plain(config: Config) -> Found:
    """Return the expected results in plain torch: on one rank, with one batch, without the loss and norm under test."""
    trainer, _ = training.trainer(config, UnevenTrainer)
    model = trainer.built.model
    ((tokens, targets),) = trainer.batches(trainer.train_data, 0)
    counts = (targets != IGNORED).sum(1).unique().tolist()
    assert counts == [0, LENGTH // 2, LENGTH], counts
    logits, targets = model(tokens).float(), targets.flatten()
    valid = targets != IGNORED
    penalty = Z_LOSS * logits.logsumexp(1).square()[valid].sum()
    loss = (F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED) + penalty) / valid.sum()
    loss.backward()
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    training.end_determinism()
    return Found(gradients, torch.cat([g.flatten() for g in gradients.values()]).norm().item(), loss.item())


def config(folder: Path, data: Path, *options: str) -> Config:
    fixed = [
        f"--train.sequence={LENGTH}", f"--train.global_batch={SEQUENCES}", f"--train.z_loss={Z_LOSS}", "--model.kv_heads=4",
        "--train.dtype=fp32", "--recipe=bf16", "--checkpoint.resume=none",
    ]  # fmt: skip
    return training.config(folder, data, *fixed, *options, f"--run.dir={folder}/{len(list(folder.iterdir()))}")


# sizes of dp_replicate, dp_shard and tp; whether sequence parallelism is on
MESHES = [
    (1, 1, 1, True),
    (1, 1, 2, True), (1, 1, 2, False), (1, 2, 1, True), (2, 1, 1, True),
    (1, 1, 4, True), (1, 2, 2, True), (1, 4, 1, True), (2, 1, 2, True), (2, 2, 1, True),
]  # fmt: skip
CHOSEN = [(1, 2, 2, True), (2, 2, 1, True)]  # meshes that run without `--all-cases`: combinations of axes


def world(mesh: tuple[int, int, int, bool]) -> int:
    return mesh[0] * mesh[1] * mesh[2]


def ways(dp: int) -> list[tuple[int, str]]:
    """Return the tested pairs of sequences per microbatch and `reduce_gradients`. dp: number of data-parallel ranks."""
    most = SEQUENCES // dp
    return [(most, "auto"), (most // 4, "step"), *([(most // 2, "microbatch")] if dp > 1 else [])]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[Pool], Found]:
    asked = config(tmp_path_factory.mktemp("plain"), data, "--mesh.tp=1", f"--train.micro_batch={SEQUENCES}")
    return functools.cache(lambda pool: pool.run(plain, asked)[0])


@pytest.mark.parametrize(
    ("mesh", "world"),
    [(mesh, world(mesh)) if mesh in CHOSEN else nightly(mesh, world(mesh)) for mesh in MESHES],
    ids=["-".join(f"{n}{s}" for n, s in zip("rst", mesh[:3], strict=True)) + "-sp" * mesh[3] for mesh in MESHES],
)
def test_raw_gradients_are_those_of_one_rank_with_the_full_batch(ranks, one_rank, tmp_path, data, mesh, world):
    expected = one_rank(ranks(1))
    replicate, shard, tp, sequence_parallel = mesh
    sizes = [f"--mesh.dp_replicate={replicate}", f"--mesh.dp_shard={shard}", f"--mesh.tp={tp}"]
    for micro, wait in ways(replicate * shard):
        options = [f"--train.micro_batch={micro}", f"--train.reduce_gradients={wait}"]
        asked = config(tmp_path, data, *sizes, *options, f"--mesh.sequence_parallel={str(sequence_parallel).lower()}")
        for found in ranks(world).run(distributed, asked):
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                assert relative_error(found.gradients[name], gradient) <= 1e-5, (options, name)
            assert found.norm == pytest.approx(expected.norm, rel=1e-5), options
            assert found.loss == pytest.approx(expected.loss, rel=1e-5), options


OPTIONS = [
    ["--train.checkpointing=full"],
    ["--train.main_grads=grad", "--train.weight_cache=forward"],
    ["--model.fused=true"],
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[0])
def test_options_that_change_who_computes_gradients_keep_them(ranks, one_rank, tmp_path, data, options):
    """`main_grads = "grad"` adds to existing gradients, so the second microbatch takes another code path."""
    expected = one_rank(ranks(1))
    asked = config(tmp_path, data, f"--train.micro_batch={SEQUENCES // 4}", *options)
    for found in ranks(2).run(distributed, asked):
        for name, gradient in expected.gradients.items():
            assert relative_error(found.gradients[name], gradient) <= 1e-5, name
