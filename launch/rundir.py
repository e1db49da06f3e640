"""The folder of a run.

    config.toml  plan.txt  env.txt  log/rank{N}.txt  metrics.jsonl  loss.png  checkpoints/step-N/

Everything a rank says goes to its own log, with exceptions; rank 0 also prints it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlp import Plan
from dlp.comm.mesh import describe
from launch.config import Config, to_toml
from launch.metrics import tell

LIBRARIES = ("CUDA_", "GLOO_", "NCCL_", "OMP_", "TORCH_")  # whose environment variables env.txt records


class RunDir:
    """Paths and logs of one run on this rank. `fresh`: a run that is already there is moved aside first."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.leader = dist.get_rank() == 0
        moved = move_aside(path) if fresh and self.leader and path.exists() else None
        dist.barrier()
        (path / "log").mkdir(parents=True, exist_ok=True)
        self._log = (path / "log" / f"rank{dist.get_rank()}.txt").open("a", buffering=1)
        if moved is not None:
            self.say(f"the run that was here is now in {moved}")

    def say(self, text: str) -> None:
        """To this rank's log; rank 0 prints it too."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        if self.leader:
            tell(text)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Whatever is raised inside is in this rank's log."""
        try:
            yield
        except BaseException:
            self._log.write(traceback.format_exc())
            raise

    def begin(self, config: Config, mesh: DeviceMesh, plan: Plan) -> None:
        """Write what the run is made of."""
        axes = mesh.shape[0], mesh.shape[1], mesh.shape[2]
        self.say(describe(axes, mesh.device_type))
        self.say(str(plan).splitlines()[0])
        if self.leader:
            (self.path / "config.toml").write_text(to_toml(config))
            (self.path / "plan.txt").write_text(f"{describe(axes, mesh.device_type)}\n{plan}\n")
            (self.path / "env.txt").write_text(environment())


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
