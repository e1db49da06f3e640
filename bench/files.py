"""Output files of benchmarks: `--json`, and `--plot` for benchmarks with a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_files(parser: argparse.ArgumentParser, *, draws: bool = True) -> None:
    parser.add_argument("--json", type=Path, help="file for the results")
    if draws:
        parser.add_argument("--plot", type=Path, help="PNG for the results")


def write_files(options: argparse.Namespace, results: Any, plot: Callable[[Path], None] | None = None) -> None:
    """Write `results` to the file of --json, and call `plot` with the file of --plot, for the options that were given. `plot`:
    None for a benchmark without a plot."""
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if plot is not None and options.plot:
        plot(options.plot)
