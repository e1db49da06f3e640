"""Draw the schedule of a predicted microbatch (one row per stream, one color per kind of operation) and the costs of a step."""

from __future__ import annotations

from pathlib import Path

from launch.estimate.step_time import Forecast
from launch.estimate.timeline import LANES


def write_picture(found: Forecast, path: Path) -> None:
    """Draw the schedule of the last microbatch, and the seconds of the step by kind, into the PNG file `path`."""
    from matplotlib.figure import Figure  # slow to import, and needed only here
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[2, 3])
    kinds = list(dict.fromkeys(span.operation.kind for span in found.microbatch.spans))
    colors = {kind: f"C{i % 10}" for i, kind in enumerate(kinds)}
    lanes = [lane for lane in LANES if any(span.operation.lane == lane for span in found.microbatch.spans)]
    for row, lane in enumerate(lanes):
        for kind in kinds:
            bars = [
                (span.start * 1e3, (span.end - span.start) * 1e3)
                for span in found.microbatch.spans
                if (span.operation.lane, span.operation.kind) == (lane, kind)
            ]
            above.broken_barh(bars, (row - 0.4, 0.8), color=colors[kind], linewidth=0)
    above.set_yticks(range(len(lanes)), lanes)
    above.invert_yaxis()
    above.set_xlabel("milliseconds of the last microbatch")
    above.legend(handles=[Patch(color=colors[kind], label=kind) for kind in kinds], ncols=5, loc="upper center",
                 bbox_to_anchor=(0.5, -0.18), frameon=False)  # fmt: skip
    costs = found.costs()[::-1]
    below.barh(
        [kind for kind, _ in costs],
        [seconds * 1e3 for _, seconds in costs],
        color=[colors.get(kind, "gray") for kind, _ in costs],
    )
    for row, (_, seconds) in enumerate(costs):
        below.text(seconds * 1e3, row, f" {seconds * 1e3:.1f} ms, {seconds / found.seconds:.0%}", va="center")
    below.set_xlabel("milliseconds of the step")
    below.margins(x=0.12)
    figure.suptitle(
        f"{found.seconds * 1e3:.1f} ms a step, {found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%} "
        f"(predicted, {found.board})"
    )
    figure.savefig(path, dpi=120)


def write_timeline(found: Forecast | str, path: Path) -> None:
    """Write the predicted schedule as a picture (.png) or as a trace for Perfetto (.json).

    Args:
        found: The forecast, or the reason why there is none.
        path: File to write; the suffix decides the format.

    Raises:
        ValueError: There is no forecast, or the suffix is not .png or .json.
    """
    if isinstance(found, str):
        raise ValueError(f"--timeline {path}: no step time is predicted ({found}); omit --timeline")
    if path.suffix not in (".png", ".json"):
        raise ValueError(f"--timeline {path}: expected a name that ends in .png (a picture) or .json (a trace)")
    if path.suffix == ".png":
        write_picture(found, path)
    else:
        found.microbatch.write_trace(path)
