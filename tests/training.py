"""Configs, data and runs of a model whose steps take milliseconds. Runs start in workers of the pool, or from a command
line.

`config(folder, data)` is the config, `shards(folder)` the data, and `run(config)` trains in a worker.
"""

from __future__ import annotations

import ast
import colorsys
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.config.run_config import Config, load
from launch.data.prepare import prepare
from launch.ranks.process_exit import StopFlag
from launch.report import plots as plot
from launch.report.metrics import read_metrics
from launch.train import start
from launch.training import deterministic
from launch.training.trainer import NotFinite, Trainer
from tests import pool as worker
from tests.refusals import must_raise

TOML = """
[mesh]
tp = 2
[model]
layers = 1
hidden = 64
ffn = 128
heads = 4
kv_heads = 2
head_dim = 16
vocab = 384
[data]
path = "{data}"
[train]
steps = 6
global_batch = 8
sequence = 64
lr = 1e-2
warmup = 2
eval_every = 4
deterministic = true
log_every = 1
eval_batches = 1
[checkpoint]
every = 2
keep = 10
asynchronous = false
[run]
dir = "{run}"
[[groups]]
name = "default"
match = ["layers.**"]
recipe = "fp8_current"
"""


WRITE_PLOT = plot.write_plot


def shards(folder: Path) -> Path:
    """Prepare data from the source code of three modules of the standard library, one of which is for validation;
    return the folder."""
    files = {Path(module.__file__).name: Path(module.__file__) for module in (ast, colorsys, json)}
    prepare(files, folder / "data", validation=0.2)
    return folder / "data"


def config(folder: Path, data: Path, *overrides: str) -> Config:
    """Write the config of a run in `folder`/run to `folder`/small.toml; return the config with `overrides`. All ranks may
    write the file at once."""
    path, own = folder / "small.toml", folder / f"small-{os.getpid()}.toml"
    own.write_text(TOML.format(data=data, run=folder / "run"))
    own.replace(path)
    return load(path, overrides)


def trainer(config: Config, cls: type[Trainer] = Trainer, *, plots: bool = False) -> tuple[Trainer, int]:
    """Build the trainer of `launch.train` for a config, on a cached mesh; return the trainer and the number of
    completed steps. Runs in a worker. Plots are off by default, because a plot takes as long as ten steps."""
    deterministic.prepare()
    plot.write_plot = WRITE_PLOT if plots else _no_plot
    sizes = config.mesh
    mesh = worker.mesh(dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    made, done = start(config, mesh, StopFlag())
    made.__class__ = cls
    return made, done


def _no_plot(runs: Sequence[Path], out: Path) -> None:
    """Replacement for `write_plot` that does nothing."""


def end_determinism() -> None:
    """Turn deterministic algorithms off after tests whose configs request them, because on a GPU the setting holds for
    the complete process. Runs in a worker."""
    torch.use_deterministic_algorithms(False)


def stopped_by(config: Config, cls: type[Trainer]) -> str:
    """Return the message of the NotFinite error that ends the training by `cls`. Runs in a worker."""
    made, done = trainer(config, cls)
    return must_raise(NotFinite, made.train, done)


def run(config: Config, *, plots: bool = False) -> None:
    """Train until the last step of the config. Runs in a worker."""
    made, done = trainer(config, plots=plots)
    made.train(done)


def metrics(config: Config, key: str = "loss") -> dict[int, Any]:
    """Return the value `key` of the records in metrics.jsonl, by step."""
    records = read_metrics(Path(config.run.dir) / "metrics.jsonl")  # without an incomplete last line
    return {record["step"]: record[key] for record in records if key in record}


def said(config: Config, rank: int = 0) -> list[str]:
    """Return the lines of a rank's log, without their times."""
    lines: Sequence[str] = (Path(config.run.dir) / "log" / f"rank{rank}.txt").read_text().splitlines()
    return [line.partition(" ")[2] for line in lines]
