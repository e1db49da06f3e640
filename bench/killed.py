"""Check that a run that is killed twice while saving, and resumed, has the same losses as an uninterrupted run.

    python -m bench.killed [CONFIG] [--ranks 2] [--out FOLDER] [--section.key value ...]

CONFIG is `llama3_1b` by default. Both runs are deterministic, recompute selectively and save asynchronously. The first kill
ends all processes at once, as when a host is lost; the second kill ends one rank. Each kill happens while a checkpoint is being
written and an earlier checkpoint exists. The program prints the time of saves and the first step whose loss differs. The exit
code is 1 if losses differ, or if a resumed run did not start from the last finished checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from launch.checkpoint.manifest import complete, step_of
from launch.report.metrics import read_metrics

SETTINGS = (
    "--train.steps=24", "--checkpoint.every=4", "--checkpoint.asynchronous=true", "--checkpoint.keep=3",
    "--train.deterministic=true", "--train.checkpointing=selective", "--train.eval_every=1000",
    "--train.eval_batches=1",
)  # fmt: skip
PATIENCE = 1200.0  # timeout of a run in seconds


class Run:
    """Process of `launch.train` under torchrun, in a separate session, whose output goes to FOLDER.txt."""

    def __init__(self, folder: Path, ranks: int, arguments: Sequence[str]) -> None:
        self.folder, self.began = folder, time.monotonic()
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command = [*module, "launch.train", *arguments, f"--run.dir={folder}"]
        self.output = folder.with_suffix(".txt").open("a")
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the end of the run, and return the exit code; or return None as soon as `until()` is true."""
        while (code := self.process.poll()) is None and not until():
            if time.monotonic() - self.began > PATIENCE:
                self.kill_all()
                sys.exit(f"the run did not end within {PATIENCE:g} s, see {self.output.name}")
            time.sleep(0.002)
        return code

    def saving(self, after: int) -> bool:
        """Return whether a checkpoint is being written while a checkpoint of a step later than `after` is finished."""
        checkpoints = self.folder / "checkpoints"
        done = complete(checkpoints)
        return bool(done) and step_of(done[-1]) > after and any(checkpoints.glob(".step-*.tmp"))

    def ranks(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]

    def kill_all(self) -> None:
        victims = self.ranks()
        os.kill(self.process.pid, signal.SIGKILL)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_one(self) -> None:
        os.kill(self.ranks()[-1], signal.SIGKILL)
        self.process.wait()


def losses(folder: Path) -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def log(folder: Path) -> list[str]:
    return (folder / "log" / "rank0.txt").read_text().splitlines()


def finish(run: Run) -> None:
    if code := run.wait():
        sys.exit(f"the run ended with exit code {code}, see {run.output.name}")


def killed_run(folder: Path, ranks: int, arguments: Sequence[str]) -> list[str]:
    """Kill a run twice, then let it finish. Returns messages about violated conditions."""
    at = 0
    for kill in (Run.kill_all, Run.kill_one):
        run = Run(folder, ranks, arguments)
        if run.wait(lambda run=run, at=at: run.saving(at)) is not None:  # type: ignore[misc]
            sys.exit(f"the run ended before it could be killed, see {run.output.name}")
        kill(run)
        at = step_of(complete(folder / "checkpoints")[-1])
        torn = [path.name for path in (folder / "checkpoints").glob(".step-*.tmp")]
        print(f"{kill.__name__} while {', '.join(torn) or 'a rename'} was written; step-{at} is finished", flush=True)
    finish(Run(folder, ranks, arguments))
    resumed = [line for line in log(folder) if "resuming from step" in line]
    if len(resumed) != 2 or f"resuming from step {at} " not in resumed[-1]:
        return [f"the run was not resumed twice from finished checkpoints: {resumed}"]
    return []


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m bench.killed", description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default="llama3_1b")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--out", type=Path, default=Path("runs/killed"), help="new folder for both runs")
    known, rest = parser.parse_known_args(arguments)
    known.out.mkdir(parents=True)
    settings = [known.config, *SETTINGS, *rest]
    alone = known.out / "alone"
    finish(Run(alone, known.ranks, settings))
    wrong = killed_run(known.out / "killed", known.ranks, settings)
    expected, found = losses(alone), losses(known.out / "killed")
    differing = [step for step in expected if found.get(step) != expected[step]]
    if differing or found.keys() != expected.keys():
        wrong.append(f"losses differ, first at step {min(differing, default=0)}: {expected} and {found}")
    for line in log(alone):
        if "of the steps' time" in line:
            print(f"uninterrupted run: {line}")
    print(*(wrong or [f"{len(found)} losses are bitwise equal; the last loss is {found[max(found)]}"]), sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
