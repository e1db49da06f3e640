"""Outputs of metrics besides metrics.jsonl, the memory snapshot after an out-of-memory error, and the ranges in a
profile of a step. No ranks."""

from __future__ import annotations

import csv
import json
import pickle
import resource
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import nn

from dlp import ops
from launch.config.run_config import load, to_toml
from launch.report import metric_sinks, out_of_memory
from launch.report.metrics import read_metrics
from launch.report.nvtx_ranges import layer_ranges
from launch.report.recorder import Recorder
from launch.report.run_dir import RunDir
from launch.settings.schema import ConfigError

CPU = torch.device("cpu")


def record(folder: Path, names: list[str], begin: int, steps: int) -> None:
    """Write the metrics of a run for steps `begin` + 1 to `steps`, and then a validation loss."""
    config = load("tiny", ["--run.metrics", json.dumps(names)])
    run = Namespace(path=folder, leader=True, say=print)
    recorder = Recorder(config, cast(RunDir, run), CPU, 1)
    recorder.begin(begin)
    for step in range(begin + 1, steps + 1):
        split = {"forward": 0.25, "backward": 0.5}
        recorder.step(step, loss=4 / step, norm=1.0, lr=0.1, seconds=1.0, split=split, wire_bytes={"tp": 10})
    recorder._write(step=steps, validation_loss=1.5)
    for sink in recorder._sinks.values():
        sink.close()


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Context that limits the size of every file to `nbytes`. A write beyond the limit is truncated, as on a full
    disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_no_run_and_records_wait_for_room(tmp_path: Path) -> None:
    said: list[str] = []
    config = load("tiny", ["--run.metrics", '["csv"]'])
    recorder = Recorder(config, cast(RunDir, Namespace(path=tmp_path, leader=True, say=said.append)), CPU, 1)
    recorder.begin(0)
    metrics = tmp_path / "metrics.jsonl"
    recorder._write(step=1, loss=1.0)
    before = metrics.read_bytes()
    with room(len(before) + 5):
        recorder._write(step=2, loss=2.0)
        recorder._write(step=3, loss=3.0)
        assert metrics.read_bytes() == before
    later = (
        "metrics.jsonl could not be written (No space left on device); the run goes on, and writes its records later"
    )
    assert len(said) == 2 and said[0].endswith(later)
    assert said[1].startswith("WARNING: csv could not be written (") and not recorder._sinks
    recorder._write(step=4, loss=4.0)
    assert [each["loss"] for each in read_metrics(metrics)] == [1.0, 2.0, 3.0, 4.0] and len(said) == 2
    with room(5):
        recorder._write(step=5, loss=5.0)
    recorder._progress = None  # without a plot
    recorder.close()
    assert said[-1] == f"WARNING: {metrics} lacks the last 1 records, because the disk is full"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    record(tmp_path, ["csv"], 0, 5)
    record(tmp_path, ["csv"], 3, 6)
    found = rows(tmp_path)
    assert [row["step"] for row in found if row["loss"]] == ["1", "2", "3", "4", "5", "6"]
    assert [(row["step"], row["validation_loss"]) for row in found if row["validation_loss"]] == [("6", "1.5")]
    assert float(found[1]["loss"]) == 2.0 and found[0].keys() == set(metric_sinks.COLUMNS)


def test_a_sink_that_cannot_be_begun_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "metrics.csv").mkdir()
    config = load("tiny", ["--run.metrics", '["csv"]'])
    recorder = Recorder(config, cast(RunDir, Namespace(path=tmp_path, leader=True, say=said.append)), CPU, 1)
    recorder.begin(0)
    recorder.validation(1, 2.0)
    assert said[0].startswith("WARNING: csv could not be written (Is a directory) and gets no further records until ")
    assert said[1].startswith(f"{tmp_path}/loss.png could not be written ({tmp_path}/metrics.jsonl: no metrics found, ")
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_tensorboard_has_each_number_once_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, ["tensorboard"], 0, 5)
    record(tmp_path, ["tensorboard"], 3, 6)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "validation_loss", "split/forward", "wire_bytes/tp", "lr"} <= set(events.Tags()["scalars"])
    assert [(each.step, each.value) for each in events.Scalars("loss")][:2] == [(1, 4.0), (2, 2.0)]
    assert [each.step for each in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_wandb_is_asked_for_what_it_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    run = Namespace(log=lambda found, step: told.append((step, found)), finish=lambda: told.append("finished"))
    module = ModuleType("wandb")
    module.init = lambda **settings: told.append(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    record(tmp_path, ["wandb"], 0, 1)
    settings, (step, found), (_, validation), end = told
    assert settings["name"] == tmp_path.name and settings["dir"] == str(tmp_path)
    assert step == 1 and found["loss"] == 4.0 and found["split/backward"] == 0.5 and "mfu" not in found
    assert validation == {"validation_loss": 1.5} and end == "finished"


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_sink_without_its_package_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, metric_sinks.PACKAGES[name], None)
    sentence = f"metrics: {name} needs the package {name}, which is not installed: pip install {name}$"
    with pytest.raises(ValueError, match=sentence):
        record(tmp_path, [name], 0, 1)
    assert not list(tmp_path.iterdir())


def test_sinks_are_a_list_of_known_names() -> None:
    config = load("tiny", ["--run.metrics", '["csv", "wandb"]'])
    assert config.run.metrics == ("csv", "wandb") and 'metrics = ["csv", "wandb"]' in to_toml(config)
    for value in ('["excel"]', '["csv", "csv"]', "[1]"):
        with pytest.raises(ConfigError, match="metrics: expected a list of "):
            load("tiny", ["--run.metrics", value])


def test_a_gpu_without_memory_leaves_a_snapshot_and_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory.dist, "get_rank", lambda: 3)
    path = out_of_memory.snapshot_path(tmp_path)
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\nx"
    )
    without = out_of_memory.sentence(error, "step 7, last layer a", tmp_path, 70_000_000_000)
    assert "opens at" not in without
    out_of_memory.observer(path, lambda: {"segments": []})(0, 1, 2, 3)
    with path.open("rb") as file:
        assert pickle.load(file) == {"segments": []}
    assert out_of_memory.sentence(error, "step 7, last layer a", tmp_path, 70_000_000_000) == (
        f"rank 3: out of memory in step 7, last layer a, at most 70.0 GB was allocated (Tried to allocate 2.00 GiB); {path} "
        f"lists the live allocations and opens at https://pytorch.org/memory_viz; smaller: --train.micro_batch, "
        f"--train.checkpointing full, or more ranks as --mesh.dp_shard; launch.train --plan predicts each"
    )
    # This file cannot be written, but the call does not raise
    out_of_memory.observer(tmp_path / "none" / "x", dict)(0, 1, 2, 3)


def test_ranges_are_those_of_the_layers_and_end_with_the_step() -> None:
    model, told = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), list[str]()
    with layer_ranges(model, told.append, lambda: told.append("end")):
        model(torch.ones(1, 2))
    assert told == ["model", "0", "end", "1", "1.0", "end", "end", "end"]
    model(torch.ones(1, 2))
    assert len(told) == 8
    fused, told = ops.Sequential(ops.RMSNorm(2), ops.Linear(2, 2)), []
    with layer_ranges(fused, told.append, lambda: told.append("end")):
        fused(torch.ones(1, 2))
        assert "hooks" not in str(fused.plan()), "a profiled step runs what other steps run"
    assert told == ["model", "end"]
