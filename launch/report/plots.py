"""Plot loss, gradient norm, learning rate and throughput of one or several runs into one picture.

A run is a folder with `metrics.jsonl`. The range of the loss axis ignores the first steps, whose high losses would hide the
differences between later steps. For several runs, a further panel shows differences from the loss of the first run. The figure
is constructed without pyplot, which has global state and looks for a display.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from launch.report.cast_statistics_plot import mark_swaps
from launch.report.metrics import read_metrics

SHOWN_FROM = 0.1  # share of the steps of a run that the range of the loss axis ignores
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Drawn:
    """Run in a picture: label in the legend, color, records of metrics.jsonl."""

    label: str
    color: str
    records: Records

    def series(self, key: str) -> tuple[list[int], list[float]]:
        return series(self.records, key)


def write_plot(runs: Sequence[Path], out: Path) -> None:
    """Draw runs, given by their folders, into the PNG file `out`. Raises ValueError if a folder has no metrics."""
    draw(runs).savefig(out, dpi=120)


def draw(runs: Sequence[Path]) -> Figure:
    """Return the figure, with one panel each for loss, differences (of several runs), gradient norm, learning rate,
    tokens/s."""
    drawn = [
        Drawn(label, f"C{number}", read_run(run)) for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True))
    ]  # fmt: skip
    several = len(drawn) > 1
    figure = Figure(figsize=(9, 11 + 1.5 * several), layout="constrained")
    loss, *differences, norm, rate, speed = figure.subplots(
        4 + several, 1, sharex=True, height_ratios=[4, *[2] * several, 1, 1, 1]
    )
    figure.suptitle(f"{len(drawn)} runs" if several else drawn[0].label)
    _draw_loss(loss, drawn)
    for axes in differences:
        _draw_differences(axes, drawn)
    for axes, key, name, scale in (
        (norm, "gradient_norm", "gradient norm", "log"), (rate, "lr", "learning rate", "linear"),
        (speed, "tokens_per_second", "tokens/s", "linear"),
    ):  # fmt: skip
        for run in drawn:
            axes.plot(*run.series(key), color=run.color, linewidth=0.8)
        axes.set(ylabel=name, yscale=scale, **({} if scale == "log" else {"ylim": (0, None)}))
    norm.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    norm.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    norm.yaxis.set_minor_formatter(NullFormatter())
    speed.set_xlabel("step")
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def labels(runs: Sequence[Path]) -> list[str]:
    """Return the label of each run: name of its folder (the path if names repeat), and its recipes."""
    names = [run.resolve().name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    return [f"{name}: {recipes}" if (recipes := _recipes(run)) else name for name, run in zip(names, runs, strict=True)]


def _recipes(run: Path) -> str:
    """Return the recipes of the layer groups of a run: "fp8_current (default), bf16 (edges)"; "" without a config.toml."""
    path = run / "config.toml"
    groups = tomllib.loads(path.read_text(encoding="utf-8")).get("groups", []) if path.is_file() else []
    named = [(group["recipe"], group["name"]) for group in groups if "recipe" in group]
    return ", ".join(f"{recipe if isinstance(recipe, str) else recipe['name']} ({name})" for recipe, name in named)


def read_run(run: Path) -> Records:
    path = run / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if not any("loss" in record for record in records):
        raise ValueError(f"{path}: no metrics found, expected the folder of a run with at least one step")
    return records


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of all records that have `key`."""
    having = [record for record in records if key in record]
    return [record["step"] for record in having], [record[key] for record in having]


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages of values, centered, over windows of about a twentieth of the values.

    Near the ends, where a window is incomplete, a straight line is fitted to the values of the window. Straight lines are
    therefore unchanged, and the smoothed curve does not lag."""
    half, count = max(1, len(values) // 40), len(values)
    if count < 3:
        return list(values)
    smoothed = np.convolve(values, np.full(2 * half + 1, 1 / (2 * half + 1)), "same")
    for i in (*range(half), *range(count - half, count)):
        first, last = max(0, i - half), min(count, i + half + 1)
        slope, level = np.polyfit(np.arange(first, last) - i, values[first:last], 1)
        smoothed[i] = level
    return [float(value) for value in smoothed]


def _draw_loss(axes: Axes, drawn: Sequence[Drawn]) -> None:
    top, unit = [], "nats/token"
    for run in drawn:
        steps, losses = run.series("loss")
        smoothed = smooth(losses)
        axes.plot(steps, losses, color=run.color, alpha=0.25, linewidth=0.8)
        of = f"{run.label}, " if len(drawn) > 1 else ""
        axes.plot(steps, smoothed, color=run.color, label=f"{of}smoothed")
        validated, validation = run.series("validation_loss")
        if validated:
            axes.plot(validated, validation, color=run.color, marker="o", linestyle="--", label=f"{of}validation")
        top += [*smoothed[int(SHOWN_FROM * len(losses)) :], *validation]
    found = {tuple(record["baseline"].values()) for run in drawn for record in run.records if "baseline" in record}
    for name, value, said in sorted(found):
        unit = said
        axes.axhline(value, color="0.3", linestyle="-.", linewidth=1, label=f"{name}, {value:.3f}")
        top.append(value)
    bottom = min(min(run.series("loss")[1]) for run in drawn)
    margin = 0.05 * (max(top) - min(*top, bottom))
    axes.set(ylabel=f"loss, {unit}", ylim=(min(*top, bottom) - margin, max(top) + margin) if margin > 0 else None)
    for run in drawn:
        mark_swaps(axes, run.records, text=True)


def _draw_differences(axes: Axes, drawn: Sequence[Drawn]) -> None:
    """Draw, for each run, the smoothed difference from the loss of the first run at the same step."""
    base = dict(zip(*drawn[0].series("loss"), strict=True))
    seen: list[float] = []
    for run in drawn:
        pairs = [(step, loss - base[step]) for step, loss in zip(*run.series("loss"), strict=True) if step in base]
        smoothed = smooth([difference for _, difference in pairs])
        axes.plot([step for step, _ in pairs], smoothed, color=run.color)
        seen += smoothed[int(SHOWN_FROM * len(pairs)) :]
    reach = 1.1 * max((abs(value) for value in seen), default=0)
    axes.set(ylabel=f"loss - loss of\n{drawn[0].label.partition(':')[0]}", ylim=(-reach, reach) if reach else None)
