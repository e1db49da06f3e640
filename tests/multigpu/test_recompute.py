"""Recomputed blocks (full or selective checkpointing) and weights that stay gathered: equal bits, and the planned bytes
on the wire."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dlp
from dlp.parallel.linear import autograd, opaque
from launch.config.run_config import Config, load
from launch.training.build import build
from launch.training.recomputation import describe, recompute
from launch.training.wire_bytes import WARM
from tests import pool as worker
from tests import training
from tests.cases import nightly
from tests.pool import Pool

WATCHED = ["--model.layers=2", "--train.global_batch=4"]
FSDP = ["--mesh.tp=1", "--train.micro_batch=1"]
SELECTIVE, FULL = "--train.checkpointing=selective", "--train.checkpointing=full"


CASES = [
    nightly([], [SELECTIVE], id="tp"),
    nightly(["--recipe=fp8_delayed"], [SELECTIVE], id="tp-delayed"),
    nightly(["--model.fused=true", "--recipe=nvfp4"], [SELECTIVE], id="tp-fused"),
    pytest.param(FSDP, [SELECTIVE, "--train.recompute_every=2"], id="fsdp-every-2nd"),
    nightly(FSDP, [FULL, "--train.recompute_every=2"], id="fsdp-full-every-2nd"),
    nightly(FSDP, ["--mesh.reshard_after_forward=false"], id="fsdp-gathered"),
    nightly(["--train.compile=true"], [FULL], id="tp-compiled-full"),
    nightly(
        [*FSDP, "--recipe=mxfp8", "--model.hidden=128", "--model.ffn=256"],
        ["--mesh.reshard_after_forward=false", FULL], id="fsdp-gathered-full",
    ),
]  # fmt: skip


def watched_steps(config: Config) -> list[float]:
    """Return the losses of three steps, the last of which the ledger counts."""
    made, _ = training.trainer(config)
    losses = [made.watched_step(step).numbers.read()[0] for step in range(WARM + 1)]
    assert made.wire.watches and made.wire.seen().sent
    return losses


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[..., list[list[float]]]:
    """Return a function that trains with given settings and returns the losses of each rank. Results are cached by
    settings."""

    @functools.cache
    def run(ranks_of_two: Pool, *settings: str) -> list[list[float]]:
        config = training.config(tmp_path_factory.mktemp("run"), data, *WATCHED, *settings)
        return ranks_of_two.run(watched_steps, config)

    return run


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("overrides", "changed"), CASES)
def test_what_runs_again_changes_no_bit_and_sends_what_was_planned(ranks, losses, overrides, changed):
    plain, found = losses(ranks(2), *overrides), losses(ranks(2), *overrides, *changed)
    assert plain == found and len(set(found[0])) == 3


def runs(config: Config) -> dict[str, int]:
    """Run one forward and backward; return how often linears and the first norms of blocks ran, including
    recomputation."""
    mesh = worker.mesh(tp=config.mesh.tp)
    built = build(config, mesh, torch.device(worker.device()))
    tokens = torch.zeros(1, config.train.sequence, dtype=torch.int64, device=built.device)
    counts: Counter[str] = Counter()
    real = opaque.linear_forward

    def counted(*args: Any) -> Any:
        counts["linears"] += 1
        return real(*args)

    def norm(module: Any, args: Any, y: Any) -> None:
        counts["norms"] += 1

    for block in built.model.model.layers:
        block.input_layernorm.register_forward_hook(norm)
    autograd.linear_forward = opaque.linear_forward = counted
    try:
        dlp.cross_entropy(built.model(tokens), tokens, mesh).backward()
    finally:
        autograd.linear_forward = opaque.linear_forward = real
    return dict(counts)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("changed", "linears", "norms"),
    [([], 9, 2), ([SELECTIVE], 9, 4), ([SELECTIVE, "--train.recompute_every=2"], 9, 3), ([FULL], 17, 4)],
    ids=["none", "selective", "every 2nd", "full"],
)
def test_linears_do_not_run_again_where_their_results_are_kept(ranks, tmp_path, data, changed, linears, norms):
    """The model has 2 blocks with 4 linears or sets of siblings each, and the head."""
    config = training.config(tmp_path, data, "--model.layers=2", "--mesh.tp=1", "--train.global_batch=1", *changed)
    assert ranks(1).run(runs, config) == [{"linears": linears, "norms": norms}]


@pytest.mark.parametrize(("checkpointing", "compiled"), [("full", 1), ("selective", 0)])
def test_recomputed_blocks_are_compiled_or_the_plan_says_why_not(monkeypatch, checkpointing: str, compiled: int):
    """With full checkpointing, blocks are compiled before `checkpoint` wraps them, because `checkpoint` disables the
    compiler for functions that are not compiled yet. With selective checkpointing they are not compiled, and the plan
    says so."""
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward: given.append(forward) or forward)
    train = load("tiny", ["--train.compile=true", f"--train.checkpointing={checkpointing}"]).train
    recompute([torch.nn.Linear(2, 2)], train)
    assert len(given) == compiled
    assert [line[:8] for line in describe(train)] == ["compile:"] * (1 - compiled)
