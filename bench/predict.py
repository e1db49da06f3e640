"""Predicted and recorded times per step, compared; no run is started.

    python -m bench.predict                    the recorded runs of bench/results/predict.json
    python -m bench.predict --runs FILE.json   other recorded runs

The file is a list of runs: {board, world, arguments, milliseconds, source, fitted, one_dgrad}. `fitted` says whether constants
of the GPU's table were fitted to the run; only the errors of the other runs show the accuracy of the prediction. `one_dgrad`
(default true) is false for runs that added the dgrads of siblings in memory; their prediction does the same. For a new row,
take the measured time per step that `launch.train` prints after 20 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dlp.parallel.model import rows
from dlp.parallel.model.plan import table
from launch.common.program import run_program
from launch.config.run_config import load
from launch.estimate.few_blocks import Extended

RUNS = Path(__file__).parent / "results" / "predict.json"


@dataclass(frozen=True)
class Compared:
    """Predicted and measured milliseconds per step of one run.

    name      number of ranks, GPU and arguments of the run
    source    origin of the measured time
    fitted    whether constants of the prediction were fitted to the run
    """

    name: str
    predicted: float
    measured: float
    source: str
    fitted: bool = False

    @property
    def error(self) -> float:
        """Difference relative to the measured time; positive if the prediction is too long."""
        return self.predicted / self.measured - 1


def compare(run: dict[str, Any]) -> Compared:
    """Predict the time per step of a recorded run (an entry of the file), and return it with the measured time."""
    name, *settings = run["arguments"]
    config, world, board = load(name, settings), run["world"], run["board"]
    together = rows.together if run.get("one_dgrad", True) else lambda *formats: None
    with patch.object(rows, "together", together):
        extended = Extended(config, world, board)
    seconds, _ = extended.seconds()
    label = f"{world} x {board} {' '.join(run['arguments'])}"
    return Compared(label, seconds * 1e3, run["milliseconds"], run["source"], run.get("fitted", False))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.predict", description="Compares predicted with measured times per step."
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="a file of recorded runs [%(default)s]")
    options = parser.parse_args(arguments)
    found = [compare(run) for run in json.loads(options.runs.read_text())]
    lines = [
        (f"{each.predicted:.1f}", f"{each.measured:.1f}", f"{each.error:+.1%}", each.name, each.source) for each in found
    ]  # fmt: skip
    print("\n".join(table(("predicted ms", "measured ms", "error", "run", "source"), lines)))
    print()
    for fitted, kind in ((True, "to which constants were fitted"), (False, "to which no constants were fitted")):
        errors = [abs(each.error) for each in found if each.fitted == fitted]
        if errors:
            print(f"{len(errors)} runs {kind}: largest error {max(errors):.1%}, mean {statistics.mean(errors):.1%}")


if __name__ == "__main__":
    run_program(main)
