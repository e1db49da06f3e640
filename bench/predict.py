"""Predicted and measured seconds per step, side by side.

    python -m bench.predict                    the recorded runs of bench/results/predict.json
    python -m bench.predict --runs FILE.json   other runs: a list of {board, world, arguments, milliseconds, source, fitted}

`one_dgrad` false: the run was of a tree that summed the dgrads of siblings in memory, and so does the prediction. `fitted` says
whether constants of the board's table were fitted to the run. Only the errors of other runs show how far the
model is off. No run is started: the measured times are recorded. `launch.train` prints the measured and the
predicted step after 20 steps; its line makes a new row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dlp.parallel.model import rows
from dlp.parallel.model.plan import table
from launch.config.run_config import load
from launch.estimate.few_blocks import Extended

RUNS = Path(__file__).parent / "results" / "predict.json"


@dataclass(frozen=True)
class Compared:
    """One run: predicted and measured milliseconds per step."""

    name: str
    predicted: float
    measured: float
    source: str
    fitted: bool = False

    @property
    def error(self) -> float:
        """Signed share of the measured time."""
        return self.predicted / self.measured - 1


def compare(run: dict[str, Any]) -> Compared:
    """Predict the step of a recorded run."""
    name, *settings = run["arguments"]
    config, world, board = load(name, settings), run["world"], run["board"]
    together = rows.together if run.get("one_dgrad", True) else lambda *formats: None
    with patch.object(rows, "together", together):
        extended = Extended(config, world, board)
    seconds, _ = extended.seconds()
    label = f"{world} x {board} {' '.join(run['arguments'])}"
    return Compared(label, seconds * 1e3, run["milliseconds"], run["source"], run.get("fitted", False))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.predict", description="Predicted beside measured seconds per step.")
    parser.add_argument("--runs", type=Path, default=RUNS, help="a file of recorded runs [%(default)s]")
    options = parser.parse_args(arguments)
    found = [compare(run) for run in json.loads(options.runs.read_text())]
    lines = [
        (f"{each.predicted:.1f}", f"{each.measured:.1f}", f"{each.error:+.1%}", each.name, each.source) for each in found
    ]  # fmt: skip
    print("\n".join(table(("predicted ms", "measured ms", "error", "run", "source"), lines)))
    print()
    for fitted, kind in ((True, "to which constants were fitted"), (False, "that the model has not seen")):
        errors = [abs(each.error) for each in found if each.fitted == fitted]
        if errors:
            print(f"{len(errors)} runs {kind}: largest error {max(errors):.1%}, mean {statistics.mean(errors):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
