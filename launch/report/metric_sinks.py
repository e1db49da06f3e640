"""Outputs of the metrics in addition to metrics.jsonl, `[run] metrics`: a CSV file, TensorBoard, Weights & Biases.

    record   {"step": 7, "loss": 2.1, "split": {"forward": 0.2}}     line of metrics.jsonl
    scalars  {"loss": 2.1, "split/forward": 0.2}                     values for TensorBoard and wandb

A sink is constructed when a run starts or resumes after `step`. CSV and TensorBoard then drop the values of later steps, from
an earlier continuation of the run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from launch.common.optional_packages import need
from launch.report.metrics import read_metrics

COLUMNS = (
    "step", "loss", "validation_loss", "gradient_norm", "lr", "skipped", "tokens_per_second", "model_flops_per_second",
    "mfu", "seconds", "peak_memory_bytes",
)  # fmt: skip
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # name of a sink -> module that it imports
Record = Mapping[str, Any]


class Sink(Protocol):
    """Output of metrics; `write` is called for each record."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def scalars(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, value) for each number in a record except the step; names in nested tables are joined by "/"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and prefix + name != "step":
            yield prefix + name, float(value)


class CsvSink:
    """Sink that writes metrics.csv, with one row for each record that has a value for a column other than step. Missing values
    are empty."""

    def __init__(self, folder: Path, step: int) -> None:
        self._file = (folder / "metrics.csv").open("w", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._writer.writeheader()
        for record in read_metrics(folder / "metrics.jsonl"):
            self.write(record)

    def write(self, record: Record) -> None:
        if record.keys() & set(COLUMNS) - {"step"}:
            self._writer.writerow(record)

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Sink that writes event files into the folder `tensorboard`."""

    def __init__(self, folder: Path, step: int) -> None:
        made = need(PACKAGES["tensorboard"], "tensorboard", "[run] metrics: tensorboard").SummaryWriter
        self._writer = made(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Sink for Weights & Biases. The package reads project and mode from environment variables (WANDB_PROJECT, ...)."""

    def __init__(self, folder: Path, step: int) -> None:
        package = need(PACKAGES["wandb"], "wandb", "[run] metrics: wandb")
        self._run = package.init(name=folder.resolve().name, dir=str(folder), config={"run": str(folder), "from": step})

    def write(self, record: Record) -> None:
        if found := dict(scalars(record)):
            self._run.log(found, step=record["step"])

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Path, int], Sink]] = {"csv": CsvSink, "tensorboard": TensorBoardSink, "wandb": WandbSink}


def check(names: Sequence[str]) -> None:
    """Raise ValueError if the package of one of the named sinks is not installed."""
    for name in names:
        if name in PACKAGES:
            need(PACKAGES[name], name, f"[run] metrics: {name}")
