"""Draws loss, validation loss and throughput of one run, or of several in one picture.

    python -m launch.plot RUN [RUN ...] --out FILE.png
    python -m launch.plot RUN --stats --out FILE.png       the statistics of its casts (launch/plot_stats.py)

A run is a folder with `metrics.jsonl`. matplotlib's figure is used without pyplot, which would keep global state and
look for a display.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch.metrics import read_metrics
from launch.plot_stats import mark_swaps, write_stats

SMOOTHING = 0.8  # of the line drawn through the steps' losses, which are themselves drawn faintly


def write_plot(runs: Sequence[Path], out: Path) -> None:
    """Draws runs into a PNG. Raises ValueError if a folder holds no metrics."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        _draw(loss, speed, _records(run), label, f"C{number}")
    loss.set_ylabel("loss, nats/token")
    speed.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    loss.legend()
    for axes in (loss, speed):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=120)


def labels(runs: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths if those are not all different."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{path}: no metrics there, expected the folder of a run that has made a step")
    return records


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have `key`."""
    having = [record for record in records if key in record]
    return [record["step"] for record in having], [record[key] for record in having]


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean without the bias towards a starting value."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(mean / weight)
    return smoothed


def _draw(loss: Axes, speed: Axes, records: Sequence[dict[str, Any]], label: str, color: str) -> None:
    steps, losses = series(records, "loss")
    loss.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    loss.plot(steps, smooth(losses), color=color, label=label)
    steps, losses = series(records, "validation_loss")
    if steps:
        loss.plot(steps, losses, color=color, marker="o", linestyle="--", label=f"{label}, validation")
    speed.plot(*series(records, "tokens_per_second"), color=color, linewidth=0.8)
    mark_swaps(loss, records, text=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.plot", description="Draws the metrics of runs into one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the picture to write, a PNG")
    parser.add_argument("--stats", action="store_true", help="the statistics of the casts of one run")
    known = parser.parse_args(arguments)
    if not known.stats:
        write_plot(known.runs, known.out)
        return
    if len(known.runs) > 1:
        raise ValueError(f"--stats draws one run, got {len(known.runs)}")
    write_stats(_records(known.runs[0]), str(known.runs[0]), known.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
