"""What the benchmarks of one GPU leave behind: `--json` and `--plot`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="PNG for the results")


def write_files(options: argparse.Namespace, results: Any, plot: Callable[[Path], None]) -> None:
    """Those that were asked for."""
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.plot:
        plot(options.plot)
