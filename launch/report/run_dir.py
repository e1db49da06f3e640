"""Folder of a run.

    .lock  config.toml  plan.txt  overlap.json  env.txt  log/rank{N}.txt  metrics.jsonl  loss.png  checkpoints/step-N/

Each rank writes all its messages and exceptions to its own log; rank 0 also prints them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlp import Plan
from dlp.comm.mesh import ParallelDims
from launch.common.atomic_io import rewrite
from launch.config.run_config import Config, to_toml
from launch.ranks import rank_objects
from launch.report.run_lock import LOCK, Claim

LIBRARIES = ("CUDA_", "GLOO_", "NCCL_", "OMP_", "TORCH_")  # prefixes of environment variables that env.txt records


class RunDir:
    """Paths and logs of one run on this rank. Until `begin`, only the lock is written, and messages are kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.leader = dist.get_rank() == 0
        self._log: IO[str] | None = None
        self._kept: list[str] = []
        self._claim = Claim(path)
        if self._claim.remark is not None:
            self.say(self._claim.remark)

    def say(self, text: str) -> None:
        """Write a message to this rank's log; rank 0 also prints it."""
        self._write(f"{time.strftime('%H:%M:%S')} {text}\n")
        if self.leader:
            print(text, flush=True)

    def describe(self, what: str, numbers: dict[str, Any]) -> None:
        """Write diagnostic numbers to a file next to this rank's log."""
        path = self.path / "log" / f"{what}-rank{dist.get_rank()}.json"
        try:
            path.write_text(json.dumps(numbers, indent=1) + "\n")
            self.say(f"statistics of its tensors on this rank: {path}")
        except OSError as error:
            self.say(f"{path}: {error.strerror}; statistics of its tensors could not be written")

    def _write(self, text: str) -> None:
        if self._log is None:
            self._kept.append(text)
            return
        try:
            self._log.write(text)
        # a full disk does not end a run; Python keeps the last lines and writes them with the next lines
        except OSError as error:
            print(f"log/rank{dist.get_rank()}.txt: {error.strerror}: {text.rstrip()}", file=sys.stderr)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Write exceptions inside this context to this rank's log. A run that is rejected before it begins leaves no
        files."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):  # the error may be a full disk
                if self._log is None and isinstance(error, ValueError | OSError):
                    if self.leader:
                        self._claim.withdraw()
                else:
                    self._open_log()
                    self._write(traceback.format_exc())
            raise

    def begin(self, config: Config, mesh: DeviceMesh, plan: Plan, *, aside: bool) -> None:
        """Write the configuration, the plan and all kept messages, after all checks.

        `aside`: an existing run in the folder is a different run, and is moved aside first. Raises ValueError on all
        ranks if the folder cannot be written.
        """
        if moved := rank_objects.from_rank_0(lambda: self._describe(config, mesh, plan, aside)):
            self.say(f"the run that was here is now in {moved}")
        try:
            self._open_log()
            problem = None
        except OSError as error:
            problem = f"{self._log_path}: {error.strerror}; choose a --run.dir that can be written"
        if problem := next(filter(None, rank_objects.from_all(problem)), None):
            raise ValueError(problem)

    def _describe(self, config: Config, mesh: DeviceMesh, plan: Plan, aside: bool) -> Path | None:
        moved = None
        try:
            if aside and any(entry.name != LOCK for entry in self.path.iterdir()):
                moved = move_aside(self.path)
                self._claim.take()
            said = ParallelDims.from_mesh(mesh).describe(mesh.device_type)
            rewrite(self.path / "config.toml", to_toml(config))
            rewrite(self.path / "plan.txt", f"{said}\n{plan}\n")
            if plan.times is not None:
                rewrite(self.path / "overlap.json", plan.times.text(plan.choices()))
            rewrite(self.path / "env.txt", environment())
        except OSError as error:
            found = f"; the run that was here is now in {moved}" if moved else ""
            raise ValueError(
                f"{error.filename}: {error.strerror}; choose a --run.dir that can be written{found}"
            ) from None
        return moved

    @property
    def _log_path(self) -> Path:
        return self.path / "log" / f"rank{dist.get_rank()}.txt"

    def _open_log(self) -> None:
        if self._log is not None:
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        log = self._log_path.open("a", buffering=1)
        log.writelines(self._kept)
        self._log, self._kept = log, []


def move_aside(path: Path) -> Path:
    """Rename to the first of NAME.1, NAME.2, ... that does not exist."""
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def environment() -> str:
    """Versions, devices and library settings, for reproducing the run."""
    lines = [f"command {' '.join(sys.argv)}", f"python {platform.python_version()}", f"torch {torch.__version__}"]
    lines += [f"host {platform.platform()}, {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        lines += [f"cuda {torch.version.cuda}"]
        lines += [f"device {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    names = sorted(name for name in os.environ if name.startswith(LIBRARIES))
    return "\n".join(lines + [f"{name}={os.environ[name]}" for name in names]) + "\n"
