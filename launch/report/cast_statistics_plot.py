"""Plot the cast statistics of a run: one column of panels for each of x, w and dy, one row for each statistic.

Each layer is a line; colors go from dark to light in the order of the model. If an operand is cast twice, the line of the
columnwise cast is dashed. Vertical lines mark recipe changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OPERANDS = ("x", "w", "dy")
NUMBERS = {  # name of a statistic in metrics.jsonl -> (label, scale) of its axis
    "sqnr_db": ("SQNR, dB", "linear"),
    "underflow": ("underflow, share", "linear"),
    "saturation": ("saturation, share", "linear"),
    "amax": ("amax", "log"),
    "scale_inv": ("largest scale_inv", "log"),
}


def write_stats(records: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    """Draw the cast statistics in the records of a metrics file into the PNG file `out`. Raises ValueError if the
    records have no cast statistics."""
    measured = [record for record in records if "stats" in record]
    names = list(dict.fromkeys(name for record in measured for name in record["stats"]))
    if not names:
        raise ValueError(f"{title}: no statistics found; set stats = true for a group of layers and train")
    figure = Figure(figsize=(14, 16), layout="constrained")
    axes = figure.subplots(len(NUMBERS), len(OPERANDS), sharex=True, sharey="row")
    figure.suptitle(title)
    for row, (number, (label, scale)) in enumerate(NUMBERS.items()):
        axes[row][0].set(ylabel=label, yscale=scale)
        for column, operand in enumerate(OPERANDS):
            draw(axes[row][column], measured, names, number, operand)
            mark_swaps(axes[row][column], records)
    for column, operand in enumerate(OPERANDS):
        axes[0][column].set_title(operand)
        axes[-1][column].set_xlabel("step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(out, dpi=110)


def parts_of(name: str) -> tuple[str, str, str]:
    """Split "layers.0.up.x.rowwise" into (layer, operand, orientation or "")."""
    layer, _, last = name.rpartition(".")
    if last in OPERANDS:
        return layer, last, ""
    layer, _, operand = layer.rpartition(".")
    return layer, operand, last


def draw(axes: Axes, measured: Sequence[dict[str, Any]], names: Sequence[str], number: str, operand: str) -> None:
    """Draw one statistic of one operand, with a line per layer."""
    layers = list(dict.fromkeys(parts_of(name)[0] for name in names))
    for name in names:
        layer, of, way = parts_of(name)
        having = [record for record in measured if record["stats"].get(name, {}).get(number) is not None]
        if of == operand and having:
            color = colormaps["viridis"](layers.index(layer) / max(1, len(layers) - 1))
            axes.plot(
                [record["step"] for record in having], [record["stats"][name][number] for record in having], color=color,
                linestyle="--" if way == "columnwise" else "-", linewidth=1, marker="." if len(having) == 1 else "",
                label=None if way == "columnwise" else layer,
            )  # fmt: skip
    axes.grid(alpha=0.3)


def mark_swaps(axes: Axes, records: Sequence[dict[str, Any]], text: bool = False) -> None:
    """Draw a vertical line at each recipe change; with `text`, write the new recipe on the side of the line with more room."""
    steps = [record["step"] for record in records]
    for record in records:
        if "swap" in record:
            axes.axvline(record["step"], color="0.4", linestyle=":", linewidth=1)
            if text:
                left = 2 * record["step"] > min(steps) + max(steps)
                axes.annotate(
                    f"{record['swap']['recipe']} ({record['swap']['layers']} layers)", (record["step"], 0.98),
                    xycoords=("data", "axes fraction"), xytext=(-3 if left else 3, 0), textcoords="offset points",
                    rotation=90, va="top", ha="right" if left else "left", fontsize=8,
                )  # fmt: skip
