"""Lock of a run folder: only one run at a time may use the folder, and all ranks must see the same folder.

Rank 0 locks the file `.lock` and writes its host and process ID into it. The other ranks compare the content, so that a host
that does not share the folder is detected before anything else is written. The lock ends with the process. POSIX also releases
a lock when the process closes any descriptor of the file; therefore rank 0 opens the file only once.
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
PATIENCE = 3.0  # seconds that other ranks wait for the file to appear on a network file system


class Claim:
    """Lock of a run folder, held until the process ends. Collective. Raises ValueError on all ranks if another run holds the
    lock, or if ranks do not share the folder. `remark`: warning for the log; None: no warning."""

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
        """Create and lock the folder, and return the content of the lock file. Runs on rank 0. Raises ValueError on failure."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"--run.dir {self.path}: the path is a file; expected a folder, or a path that does not exist"
            )
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = (self.path / LOCK).open("a+")  # replaces the lock of a folder that `move_aside` has renamed
            self._lock(self._file)
        except OSError as error:
            self.withdraw()
            raise ValueError(f"--run.dir {self.path}: {error.strerror}; choose a folder that can be written") from None
        self._file.seek(0)
        return self._file.read()

    def _lock(self, file: IO[str]) -> None:
        """Lock the file, and write host, process ID and time into it. If the file system has no locks, set `remark`. Raises
        ValueError if another run holds the lock."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ValueError(
                f"--run.dir {self.path}: this folder is in use by {file.read() or 'another run'}; wait for the end of that "
                f"run, or choose another folder"
            ) from None
        except OSError as error:
            self.remark = f"{self.path} cannot be locked ({error.strerror}): start no other run in this folder"
        file.truncate(0)
        file.write(f"{_me()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()

    def withdraw(self) -> None:
        """Remove the lock file, and the folder if it is then empty, provided that this run has created the folder. Runs on
        rank 0."""
        if self._made and self.path.is_dir():
            (self.path / LOCK).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()


def unlike(lock: Path, holder: str) -> str | None:
    """Return a sentence if the lock file of this rank does not have the content `holder` that rank 0 has written, after waiting
    `PATIENCE` seconds; None if it has."""
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
