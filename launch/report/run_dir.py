"""Folder of a run, and the logs in it.

    .lock  config.toml  plan.txt  overlap.json  env.txt  log/rank{N}.txt  metrics.jsonl  loss.png  checkpoints/step-N/

Each rank writes its messages and exceptions to log/rank{N}.txt; rank 0 also prints the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
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
    """Folder and log of a run on this rank. Before `begin` only the lock file is written, and messages stay in memory,
    unless an exception is logged (`logged`).

    path          folder of the run
    checkpoints   folder of its checkpoints
    leader        whether this rank is rank 0
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.leader = dist.get_rank() == 0
        self._log: IO[str] | None = None
        self._kept: list[str] = []
        self._claim = Claim(path)
        if self._claim.remark is not None:
            self.say(self._claim.remark)

    def say(self, *texts: str) -> None:
        """Write messages to the log of this rank; rank 0 also prints them."""
        for text in texts:
            self._write(f"{time.strftime('%H:%M:%S')} {text}\n")
            if self.leader:
                print(text, flush=True)

    def describe(self, what: str, numbers: dict[str, Any]) -> None:
        """Write diagnostic statistics to log/{what}-rank{N}.json."""
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
        # A full disk does not end a run: Python buffers the lines and writes them later
        except OSError as error:
            print(f"log/rank{dist.get_rank()}.txt: {error.strerror}: {text.rstrip()}", file=sys.stderr)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Return a context whose exceptions are written to the log. After a ValueError or OSError before `begin`, no log is
        written, and the folder is removed if this run has created it."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):  # the disk may be full
                if self._log is None and isinstance(error, ValueError | OSError):
                    if self.leader:
                        self._claim.withdraw()
                else:
                    self._open_log()
                    self._write(traceback.format_exc())
            raise

    def begin(self, config: Config, mesh: DeviceMesh, plan: Plan, *, aside: bool) -> None:
        """Write config, plan, environment and the messages so far into the folder. Collective; called after all checks.

        aside: first rename the folder if it holds another run (`move_aside`). Raises ValueError on all ranks if a file cannot
        be written.
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
    """Rename a folder to the first of NAME.1, NAME.2, ... that does not exist; return the new path. Raises ValueError for a
    path that ends without a name."""
    if path.name in ("", ".."):
        raise ValueError(
            f"{path}: expected a path that ends in the name of the folder, since the run in the folder is renamed; use "
            f"--run.dir {path.resolve()}"
        )
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def environment() -> str:
    """Return the content of env.txt: command, versions, devices and environment variables of libraries, one per line."""
    lines = [f"command {shlex.join(sys.argv)}", f"python {platform.python_version()}", f"torch {torch.__version__}"]
    lines += [f"host {platform.platform()}, {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        lines += [f"cuda {torch.version.cuda}"]
        lines += [f"device {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    names = sorted(name for name in os.environ if name.startswith(LIBRARIES))
    return "\n".join(lines + [f"{name}={os.environ[name]}" for name in names]) + "\n"
