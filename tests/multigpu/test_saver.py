"""Checkpoints that are written at once or while the next steps run: content, failed saves, weights with NaN, and the log
line about steps that were not saved."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlp.parallel.weight.local import local_values
from launch.checkpoint import save_load
from launch.checkpoint.manifest import complete
from launch.checkpoint.save_load import SaveError
from launch.config.run_config import Config
from tests import training
from tests.cases import nightly
from tests.multigpu.test_checkpoint import equal_tensors, folder
from tests.refusals import may_raise

ASYNC = "--checkpoint.asynchronous=true"
FSDP = ["--mesh.tp=1", "--recipe=fp8_delayed"]


def run_with_slow_disk(config: Config, seconds: float) -> None:
    """Train a complete run in which each save starts writing after `seconds`, so that the next steps run before."""
    write = save_load.write

    def slow(*given: Any) -> Any:
        time.sleep(seconds)
        return write(*given)

    save_load.write = slow
    try:
        training.run(config)
    finally:
        save_load.write = write


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [nightly([]), FSDP], ids=["tp", "fsdp"])
def test_what_is_written_later_is_the_step_that_was_saved(ranks, tmp_path, data, mesh):
    settings = ["--train.steps=2", "--checkpoint.every=1", "--train.ledger=always", *mesh]
    waited = training.config(tmp_path, data, *settings, f"--run.dir={tmp_path}/waited")
    ranks(2).run(training.run, waited)
    later = training.config(tmp_path, data, *settings, ASYNC, f"--run.dir={tmp_path}/later")
    ranks(2).run(run_with_slow_disk, later, 0.1)
    assert training.metrics(waited) == training.metrics(later)
    assert [path.name for path in complete(folder(later))] == ["step-1", "step-2"]
    one, other = (
        training.config(tmp_path, data, *settings, f"--run.dir={tmp_path}/a", f"--checkpoint.resume={folder(c)}/step-1")
        for c in (waited, later)
    )
    assert ranks(2).run(equal_tensors, one, other) == [True, True]
    said = training.said(later)
    assert sum(line.startswith("saved ") for line in said) == 2
    assert any(line.startswith("2 saves: ") and line.endswith("% of the time of the steps") for line in said)
    assert any(
        re.fullmatch(r"2 saves: training waited .* s, .*% of the training time", line) for line in training.said(waited)
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "left", "said"),
    [
        nightly(["--checkpoint.every=0"], ["step-3"], ""),
        nightly(["--checkpoint.every=0", ASYNC], ["step-3"], ""),
        (["--checkpoint.every=2", "--checkpoint.at_end=false", ASYNC], ["step-2"], ", nothing was saved after step 2"),
        nightly(["--checkpoint.every=0", "--checkpoint.at_end=false"], [], ", nothing was saved"),
    ],
    ids=["at the end", "at the end, without copies", "every second step", "never"],
)
def test_a_run_saves_only_when_it_is_told_to_and_its_last_line_says_what_is_lost(
    ranks, tmp_path, data, settings, left, said
):
    config = training.config(tmp_path, data, "--train.steps=3", *settings)
    ranks(2).run(training.run, config)
    assert [path.name for path in complete(folder(config))] == left
    lines = training.said(config)
    assert lines[-1].startswith("done: steps 3, ") and lines[-1].endswith(f"run {tmp_path}/run{said}")
    assert sum(line.startswith("saved ") for line in lines) == len(left)


def run_on_full_disk(config: Config, steps: list[int]) -> str:
    """Train a run in which the saves after `steps` fail; return the error that ends the run ("" if there is none)."""
    write = save_load.write

    def fails(folder: Path, taken: Any, *given: Any) -> Any:
        if taken.step in steps:
            raise SaveError(
                f"step-{taken.step} could not be written: rank 1: no space; earlier checkpoints are not affected"
            )
        return write(folder, taken, *given)

    save_load.write = fails
    try:
        return may_raise(SaveError, training.run, config)
    finally:
        save_load.write = write


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "failing", "ends", "left"),
    [
        nightly([ASYNC], [2], "", ["step-1", "step-3", "step-4"]),
        ([ASYNC], [2, 3], "step-3 could not be written", ["step-1"]),
        nightly([ASYNC], [4], "step-4 could not be written", ["step-1", "step-2", "step-3"]),
        nightly([], [2], "", ["step-1", "step-3", "step-4"]),
        nightly([], [2, 3], "step-3 could not be written", ["step-1"]),
    ],
    ids=["once", "twice", "last", "waited once", "waited twice"],
)
def test_a_save_that_fails_is_said_and_the_second_ends_the_run(ranks, tmp_path, data, settings, failing, ends, left):
    config = training.config(tmp_path, data, "--train.steps=4", "--checkpoint.every=1", *settings)
    for error in ranks(2).run(run_on_full_disk, config, failing):
        assert error.startswith(ends) and bool(error) == bool(ends)
    assert [path.name for path in complete(folder(config))] == left
    warned = [line for line in training.said(config) if line.startswith("WARNING: step-")]
    assert len(warned) == (len(failing) > 0 and failing != [4])
    assert all("the run goes on, and ends if the next save fails, too" in line for line in warned)


def run_with_a_nan(config: Config, where: str) -> str:
    """Train a run in which a row of the embedding that no token reads, or the optimizer state of this row (`where`),
    contains a NaN on rank 1 after step 2; return the error that ends the run ("" if there is none)."""
    trainer, done = training.trainer(config)
    step = trainer.train_step

    def spoiling(number: int) -> Any:
        current = step(number)
        if number == 1 and dist.get_rank() == 1:
            weight = trainer.built.model.model.embed_tokens.weight
            spoiled = weight if where == "weight" else trainer.built.optimizer.state[weight]["exp_avg"]
            local_values(spoiled)[-1, 3] = torch.nan  # the row of a token that is not a byte
        return current

    trainer.train_step = spoiling
    return may_raise(SaveError, trainer.train, done)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("where", "later"), [nightly("weight", True), ("state", False)], ids=["weight", "state"])
def test_a_nan_that_no_token_reads_is_not_saved(ranks, tmp_path, data, where, later):
    config = training.config(
        tmp_path, data, "--train.steps=3", "--checkpoint.every=1", f"--checkpoint.asynchronous={str(later).lower()}"
    )
    name = "model.model.embed_tokens.weight" if where == "weight" else "optimizer.model.embed_tokens.weight.exp_avg"
    ended = ranks(2).run(run_with_a_nan, config, where)
    reason = (
        r"could not be written: rank 1: [0-9]+ elements of {} are NaN or Inf, although every loss was finite; resume"
    )
    assert ended[0] == ended[1] and re.search("step-3 " + reason.format("model.model.embed_tokens.weight"), ended[0])
    warned = [line for line in training.said(config) if re.search("WARNING: .*step-2 " + reason.format(name), line)]
    assert len(warned) == (not later)  # otherwise the run ended before the warning
    assert [path.name for path in complete(folder(config))] == ["step-1"]
