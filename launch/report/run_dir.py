"""Folder of a run.

    .lock  config.toml  plan.txt  overlap.json  env.txt  log/rank{N}.txt  metrics.jsonl  loss.png  checkpoints/step-N/

Everything a rank says goes to its own log, with exceptions; rank 0 also prints it.
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

LIBRARIES = ("CUDA_", "GLOO_", "NCCL_", "OMP_", "TORCH_")  # whose environment variables env.txt records


class RunDir:
    """Paths and logs of one run on this rank. Until `begin` nothing is written but the lock: what is said is kept."""

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
        """To this rank's log; rank 0 prints it too."""
        self._write(f"{time.strftime('%H:%M:%S')} {text}\n")
        if self.leader:
            print(text, flush=True)

    def describe(self, what: str, numbers: dict[str, Any]) -> None:
        """Numbers for whoever looks for a cause, beside this rank's log."""
        path = self.path / "log" / f"{what}-rank{dist.get_rank()}.json"
        try:
            path.write_text(json.dumps(numbers, indent=1) + "\n")
            self.say(f"its tensors here are described in {path}")
        except OSError as error:
            self.say(f"{path}: {error.strerror}; its tensors are described nowhere")

    def _write(self, text: str) -> None:
        if self._log is None:
            self._kept.append(text)
            return
        try:
            self._log.write(text)
        except OSError as error:  # a full disk ends no run; Python keeps the last lines and writes them with the next
            print(f"log/rank{dist.get_rank()}.txt: {error.strerror}: {text.rstrip()}", file=sys.stderr)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Whatever is raised inside is in this rank's log; of a run that was refused before it began, nothing is left."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk may be the error
                if self._log is None and isinstance(error, ValueError | OSError):
                    if self.leader:
                        self._claim.withdraw()
                else:
                    self._open_log()
                    self._write(traceback.format_exc())
            raise

    def begin(self, config: Config, mesh: DeviceMesh, plan: Plan, *, aside: bool) -> None:
        """All is checked: write what the run is made of, and what was said. `aside`: a run that is already there is
        another one's, and is moved aside first. ValueError on all ranks where that cannot be written."""
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
    """Rename to the first of NAME.1, NAME.2, ... that is free."""
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def environment() -> str:
    """Versions, devices and the settings of libraries, for whoever has to repeat the run."""
    lines = [f"command {' '.join(sys.argv)}", f"python {platform.python_version()}", f"torch {torch.__version__}"]
    lines += [f"host {platform.platform()}, {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        lines += [f"cuda {torch.version.cuda}"]
        lines += [f"device {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    names = sorted(name for name in os.environ if name.startswith(LIBRARIES))
    return "\n".join(lines + [f"{name}={os.environ[name]}" for name in names]) + "\n"
