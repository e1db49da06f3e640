"""Lock of a run folder: one run at a time, and all ranks must see the same folder.

Rank 0 holds a lock on the file `.lock` and writes into it who it is; the others read that, so a host with a disk of its own
is noticed before anything else is written. The system releases the lock with the process, however that ends; and, as POSIX
has it, when the process closes any other descriptor of the file. So rank 0 opens it once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from launch.ranks import rank_objects

LOCK = ".lock"
PATIENCE = 3.0  # seconds that a network file system has to show a new file


class Claim:
    """The claim of this rank's run on a folder. Raises ValueError on all ranks where it cannot be had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remark: str | None = None
        self._made = False
        self._file: IO[str] | None = None
        holder = rank_objects.from_rank_0(self.take)
        problem = None if self._file is not None else unlike(path / LOCK, holder)
        if problem := next(filter(None, rank_objects.from_all(problem)), None):
            raise ValueError(
                f"--run.dir {path}: {problem}, and a checkpoint needs one folder that all ranks share; choose one on a file "
                f"system that all hosts mount"
            )

    def take(self) -> str:
        """On rank 0: make the folder and lock it; returns what stands in the lock. ValueError where that fails."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--run.dir {self.path}: it is a file; expected a folder, or a path that is free")
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = (self.path / LOCK).open("a+")  # of a folder that was moved aside the lock goes with its file
            self._lock(self._file)
        except OSError as error:
            self.withdraw()
            raise ValueError(f"--run.dir {self.path}: {error.strerror}; choose a folder that can be written") from None
        self._file.seek(0)
        return self._file.read()

    def _lock(self, file: IO[str]) -> None:
        """Lock it, and write into it who this is."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ValueError(
                f"--run.dir {self.path}: {file.read() or 'another run'} is at work in it; wait for its end, or choose "
                f"another folder"
            ) from None
        except OSError as error:
            self.remark = f"{self.path} cannot be locked ({error.strerror}): start no other run in it"
        file.truncate(0)
        file.write(f"{_me()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()

    def withdraw(self) -> None:
        """On rank 0: leave no trace of a run that was refused."""
        if self._made and self.path.is_dir():
            (self.path / LOCK).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()


def unlike(lock: Path, holder: str) -> str | None:
    """What keeps this rank from reading in the lock what rank 0 wrote there."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if lock.read_text() == holder:
                return None
            found = "another file"
        except OSError as error:
            found = error.strerror or str(error)
        if time.monotonic() > end:
            return f"{_me()} does not see the file that {holder} made in it ({found})"
        time.sleep(0.1)


def _me() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"
