"""Trunks and branches of the study: simultaneous runs of `launch.train`.

    trunk of a seed      a run in bf16 from step 1 to `branch_at`, which ends with a checkpoint
    branch of a subject  a run that continues from this checkpoint to the last step with the subject's overrides

When a branch ends, one JSON line is appended to the results file, and the branch's checkpoint is removed. An interrupted study
repeats only branches without a line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from bench.quality_study.subjects import Subject
from launch.checkpoint.manifest import complete
from launch.config.run_config import Config, load, to_toml
from launch.report.metrics import append, read_metrics
from launch.settings.schema import ConfigError
from launch.training.learning_rate import learning_rate

# arguments of launch.train, GPUs, log file -> exit code
Train = Callable[[Sequence[str], Sequence[int], Path], int]


@dataclass(frozen=True)
class Branch:
    """A finished branch.

    branch_at         last step of the trunk
    steps             last step of the branch
    early             last step before the learning rate decays
    losses            losses of steps branch_at + 1 to `steps`
    validation        validation loss after the last step
    step_ms           median milliseconds of a step
    seconds           duration of the run
    device, torch     name of the GPU, or "CPU"; version of torch
    data, settings    hashes of the data and of the settings; compared branches must have equal hashes
    """

    seed: int
    subject: str
    branch_at: int
    steps: int
    early: int
    losses: list[float]
    validation: float
    step_ms: float
    seconds: float
    device: str
    torch: str
    date: str
    data: str
    settings: str

    @property
    def block(self) -> tuple[int, str]:
        """Seed and data, which branches of one trunk share."""
        return self.seed, self.data


@dataclass(frozen=True)
class Study:
    """Subjects, seeds, settings and files of one study.

    folder       folder of data, runs and report
    results      file with a line for each finished branch
    subjects     subjects, including the bf16 baselines
    seeds        seeds, with one trunk each
    branch_at    last step of the trunks
    data         hash of the data in FOLDER/data; "" before the data are written
    overrides    command-line overrides of the config of every run
    """

    folder: Path
    results: Path
    subjects: tuple[Subject, ...]
    seeds: tuple[int, ...]
    branch_at: int
    data: str = ""
    overrides: tuple[str, ...] = field(default=())

    def common(self, seed: int) -> list[str]:
        """Return the arguments of `launch.train` that all runs of a seed have."""
        return [*self.overrides, "--train.seed", str(seed), "--data.path", str(self.folder / "data")]

    @cached_property
    def config(self) -> Config:
        """Config of a branch, without a subject's overrides."""
        return load("quality", self.common(0))

    @cached_property
    def settings(self) -> str:
        """Hash of the settings that all branches share."""
        shared = tomllib.loads(to_toml(self.config))
        shared["data"].pop("path")
        told = {key: value for key, value in shared.items() if key not in ("run", "checkpoint")}
        return sha256(json.dumps([told, self.branch_at], sort_keys=True).encode()).hexdigest()[:12]

    def trunk_folder(self, seed: int) -> Path:
        return self.folder / "runs" / f"trunk-{seed}"

    def trunk_checkpoint(self, seed: int) -> Path:
        return self.trunk_folder(seed) / "checkpoints" / f"step-{self.branch_at}"

    def branch_folder(self, subject: Subject, seed: int) -> Path:
        return self.folder / "runs" / f"{subject.name}-{seed}"

    def trunk(self, seed: int) -> list[str]:
        """Return the arguments of `launch.train` for the trunk. Its learning rate is constant after the warm-up, as in the
        branches up to this step."""
        steps = str(self.branch_at)
        return [
            "quality", *self.common(seed), "--train.schedule", "constant", "--train.steps", steps, "--train.eval_every", steps,
            "--train.eval_batches", "1", "--checkpoint.every", steps, "--run.dir", str(self.trunk_folder(seed)),
        ]  # fmt: skip

    def branch(self, subject: Subject, seed: int) -> list[str]:
        """Return the arguments of `launch.train` for a branch."""
        train = self.config.train
        return [
            "quality", *self.common(seed), *subject.overrides(train), "--checkpoint.resume", str(self.trunk_checkpoint(seed)),
            "--checkpoint.every", str(train.steps), "--train.eval_every", str(train.steps),
            "--run.dir", str(self.branch_folder(subject, seed)),
        ]  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError if the trunk is not shorter than the branches, if a step of the trunk has another learning rate
        than the same step in a branch, or if the config of a subject is invalid."""
        trunk, branch = load("quality", self.trunk(0)[1:]).train, self.config.train
        if not self.branch_at < branch.steps:
            raise ConfigError(f"--branch-at {self.branch_at}: expected fewer than the {branch.steps} steps of a branch")
        for step in range(self.branch_at):
            if learning_rate(step, trunk) != learning_rate(step, branch):
                raise ConfigError(
                    f"--branch-at {self.branch_at}: the learning rate decays from step {step + 1} on, and branches must begin "
                    f'before the decay; expected a smaller --branch-at, and train.schedule = "wsd" or "constant", got '
                    f"{branch.schedule!r}"
                )
        for subject in self.subjects:
            load("quality", self.branch(subject, 0)[1:])


def early_step(config: Config) -> int:
    """Return the last step with the full learning rate, counted from 1."""
    rates = [learning_rate(step, config.train) for step in range(config.train.steps)]
    return max(number for number, rate in enumerate(rates, 1) if rate == max(rates))


def read_results(path: Path) -> list[Branch]:
    """Read the finished branches of a results file; an incomplete last line is ignored."""
    if not path.is_file():
        return []
    *lines, _ = path.read_text().split("\n")
    return [Branch(**json.loads(line)) for line in lines if line]


def result(study: Study, subject: Subject, seed: int, seconds: float) -> Branch | None:
    """Read the result of a branch from the files of its run; None if steps or the last validation are missing."""
    folder, config = study.branch_folder(subject, seed), study.config
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    steps = [record for record in records if "loss" in record and record["step"] > study.branch_at]
    last = [record for record in records if record["step"] == config.train.steps and "validation_loss" in record]
    if not last or len(steps) != config.train.steps - study.branch_at:
        return None
    told = (folder / "env.txt").read_text().splitlines()
    device = next((line.partition(": ")[2] for line in told if line.startswith("device 0")), "CPU")
    version = next(line.split()[1] for line in told if line.startswith("torch "))
    times = sorted(record["seconds"] for record in steps)
    return Branch(
        seed, subject.name, study.branch_at, config.train.steps, early_step(config),
        [round(record["loss"], 6) for record in steps], last[0]["validation_loss"],
        round(1e3 * times[len(times) // 2], 2), round(seconds, 1), device, version, time.strftime("%Y-%m-%d"), study.data,
        study.settings,
    )  # fmt: skip


class Slots:
    """Free slots for runs: `side_by_side` on each of `devices` GPUs. Without GPUs the CPU counts as one device."""

    def __init__(self, devices: int, side_by_side: int) -> None:
        self._free = [side_by_side] * devices
        self._changed = threading.Condition()

    @contextmanager
    def take(self, ranks: int) -> Iterator[list[int]]:
        """Wait for a free slot on each of `ranks` GPUs, yield the numbers of these GPUs, and free the slots at the end."""
        with self._changed:
            self._changed.wait_for(lambda: sum(free > 0 for free in self._free) >= ranks)
            chosen = sorted(range(len(self._free)), key=lambda device: -self._free[device])[:ranks]
            for device in chosen:
                self._free[device] -= 1
        try:
            yield chosen
        finally:
            with self._changed:
                for device in chosen:
                    self._free[device] += 1
                self._changed.notify_all()


def train_in_a_process(arguments: Sequence[str], devices: Sequence[int], log: Path) -> int:
    """Run `launch.train` with one rank on each of `devices`, and return the exit code; the output goes to `log`."""
    several = ["launch.local", "--ranks", str(len(devices))] if len(devices) > 1 else ["launch.train"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        command = [sys.executable, "-m", *several, *arguments]
        return subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode


def run_study(study: Study, slots: Slots, at_once: int, train: Train = train_in_a_process) -> list[str]:
    """Train all missing trunks, and the missing branches of each trunk as soon as the trunk has ended. Returns messages about
    failures.

    `at_once`: number of simultaneous runs. `train`: function that runs `launch.train`."""
    done = {(each.seed, each.subject) for each in read_results(study.results) if each.settings == study.settings}
    missing = {seed: [s for s in study.subjects if (seed, s.name) not in done] for seed in study.seeds}
    failed: list[str] = []
    with ThreadPoolExecutor(at_once) as pool:
        trunks: dict[Future[str], int] = {
            pool.submit(_trunk, study, seed, slots, train): seed for seed in study.seeds if missing[seed]
        }
        branches: set[Future[str]] = set()
        while trunks or branches:
            ended, _ = wait({*trunks, *branches}, return_when=FIRST_COMPLETED)
            for each in ended:
                branches.discard(each)
                seed, problem = trunks.pop(each, None), each.result()
                if problem:
                    failed.append(problem)
                elif seed is not None:
                    branches |= {pool.submit(_branch, study, s, seed, slots, train) for s in missing[seed]}
    return failed


def _trunk(study: Study, seed: int, slots: Slots, train: Train) -> str:
    """Train a trunk unless its checkpoint exists. Returns a message if the run failed, else ""."""
    if study.trunk_checkpoint(seed) in complete(study.trunk_checkpoint(seed).parent):
        return ""
    with slots.take(1) as devices:
        return _run(study.trunk_folder(seed), study.trunk(seed), devices, train)[0]


def _branch(study: Study, subject: Subject, seed: int, slots: Slots, train: Train) -> str:
    folder = study.branch_folder(subject, seed)
    with slots.take(subject.ranks) as devices:
        problem, seconds = _run(folder, study.branch(subject, seed), devices, train)
    found = None if problem else result(study, subject, seed, seconds)
    if found is None:
        return problem or f"{folder}: the run ended before its last step; the same command repeats this branch"
    study.results.parent.mkdir(parents=True, exist_ok=True)
    append(study.results, json.dumps(asdict(found)) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    print(f"{subject.name}, seed {seed}: {found.seconds:.0f} s, {found.step_ms} ms a step", flush=True)
    return ""


def _run(folder: Path, arguments: list[str], devices: list[int], train: Train) -> tuple[str, float]:
    began, log = time.perf_counter(), folder.with_suffix(".log")
    if not (code := train(arguments, devices, log)):
        return "", time.perf_counter() - began
    last = log.read_text().strip().splitlines()[-1:] if log.is_file() else []
    return f"{folder}: the run ended with code {code}: {''.join(last)}; see {log}", 0.0
