"""Draw loss, gradient norm, learning rate and throughput of one or more runs into one picture.

python -m launch.plot RUN [RUN ...] --out FILE.png
python -m launch.plot RUN --stats --out FILE.png       draws the cast statistics of one run (report/cast_statistics_plot.py)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.report.cast_statistics_plot import write_stats
from launch.report.plots import read_run, write_plot


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.plot", description="Draw the metrics of runs into one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture to write (PNG)")
    parser.add_argument("--stats", action="store_true", help="draw the statistics of the casts of one run")
    options = parser.parse_args(arguments)
    if not options.stats:
        write_plot(options.runs, options.out)
        return
    if len(options.runs) > 1:
        raise ValueError(f"--stats: expected one run, got {len(options.runs)}")
    write_stats(read_run(options.runs[0]), str(options.runs[0]), options.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}; choose another file or folder")
