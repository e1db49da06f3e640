"""Increase of the loss by recipes, wire formats and optimizers: runs that branch off from bf16 runs, compared with bf16.

    python -m bench.quality_study FOLDER [--seeds 0 1 2] [--subjects NAME ...] [--side-by-side 4] [--branch-at 800]
                                          [--results FILE] [--merge FILE ...] [--section.key value ...]

    FOLDER/data, data.txt       shards of Python sources, as bytes; list and hash of the sources
    FOLDER/runs/trunk-SEED      trunk: a run in bf16 from step 1 to 800
    FOLDER/runs/SUBJECT-SEED    branch: continues the trunk with the same data and learning rates, but one change (subjects.py)
    FOLDER/branches.jsonl       one line per finished branch, or --results FILE; --merge adds lines of other machines
    FOLDER/report.md, report.png, branches.csv, losses.csv

The final losses of two runs whose initial weights differ by one bit can differ by 1 %, so runs from scratch cannot resolve
smaller effects. Branches of one trunk can, since they are equal up to the branch. Every seed has two bf16 branches, whose only
difference is the order of a sum. The effect of a subject is the relative difference of its loss to the mean loss of both bf16
branches, averaged over seeds; intervals.py defines its confidence interval and the verdicts "within", "outside" and "not
resolved". To continue an interrupted study, repeat the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.quality_study.branches import Slots, Study, Train, read_results, run_study, train_in_a_process
from bench.quality_study.report import branches_csv, draw, losses_csv, report
from bench.quality_study.sources import make_data
from bench.quality_study.subjects import BASELINES, BY_NAME, Subject
from launch.config.run_config import count
from launch.settings.overrides import split
from launch.settings.schema import ConfigError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.quality_study", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="folder of data, runs and report; finished branches are not repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds, with one trunk each [0 1 2]")
    parser.add_argument(
        "--subjects", nargs="+", default=list(BY_NAME), choices=list(BY_NAME), metavar="NAME",
        help=f"branches of every trunk, in addition to the bf16 branches [all: {', '.join(BY_NAME)}]",
    )  # fmt: skip
    parser.add_argument("--side-by-side", type=count, default=4, help="number of simultaneous runs on one GPU [4]")
    parser.add_argument("--branch-at", type=count, default=800, help="step at which branches begin [800]")
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the sources [100]")
    parser.add_argument("--results", type=Path, help="file of finished branches [FOLDER/branches.jsonl]")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="report these files as well, and train nothing"
    )
    return parser


def refused(subjects: Sequence[Subject], devices: int) -> Iterator[tuple[Subject, str]]:
    """Yield the subjects that this machine cannot run, with the reasons."""
    for subject in subjects:
        if subject.ranks > devices:
            yield subject, f"this subject needs {subject.ranks} GPUs, and this machine has {devices}"
        elif subject.needs and importlib.util.find_spec(subject.needs) is None:
            yield subject, f"this subject needs the package {subject.needs}, which is not installed"


def write_report(study: Study, merged: Sequence[Path]) -> None:
    """Write report.md, report.png and the CSV files from the results of the study and of the `merged` files, and print the
    report. Raises ValueError if results were made with different settings."""
    found = {
        (each.seed, each.subject, each.data): each for path in (*merged, study.results) for each in read_results(path)
    }
    branches = list(found.values())
    if len(settings := {each.settings for each in branches}) > 1:
        raise ValueError(
            f"branches of different settings cannot be compared: {', '.join(sorted(settings))}; merge only files with equal "
            "settings"
        )
    text = report(branches)
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / "report.md").write_text(text)
    (study.folder / "branches.csv").write_text(branches_csv(branches))
    (study.folder / "losses.csv").write_text(losses_csv(branches))
    if branches:
        draw(branches).savefig(study.folder / "report.png", dpi=120)
    print(text, end="")


def main(arguments: Sequence[str], train: Train = train_in_a_process, devices: int | None = None) -> int:
    rest, overrides = split(arguments)
    options = make_parser().parse_args(rest)
    folder: Path = options.folder.resolve()
    devices = max(1, torch.cuda.device_count()) if devices is None else devices
    chosen = tuple(dict.fromkeys([*BASELINES, *(BY_NAME[name] for name in options.subjects)]))
    missing = dict(refused(chosen, devices))
    flat = tuple(text for name, value in overrides for text in (f"--{name}", value))
    results = options.results or folder / "branches.jsonl"
    study = Study(
        folder, results, tuple(s for s in chosen if s not in missing), tuple(options.seeds), options.branch_at, "", flat
    )
    failed: list[str] = []
    try:
        if not options.merge:
            study.check()
            for subject, reason in missing.items():
                print(f"{subject.name} is left out: {reason}", flush=True)
            study = replace(study, data=make_data(folder, options.megabytes))
            at_once = devices * options.side_by_side
            failed = run_study(study, Slots(devices, options.side_by_side), at_once, train)
        write_report(study, options.merge)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for problem in failed:
        print(problem, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
