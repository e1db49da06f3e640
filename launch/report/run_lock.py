"""Lock of a run folder: one run at a time, and all ranks must see the same folder.

Rank 0 locks the file `.lock` and writes its host and process into the file. The other ranks read the file, so that a host with
another disk is detected before anything else is written. The system releases the lock when the process ends, and, under POSIX,
when the process closes any descriptor of the file; therefore rank 0 opens the file once.
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
PATIENCE = 3.0  # seconds until a network file system shows a new file


class Claim:
    """Exclusive use of a folder by this run. Raises ValueError on all ranks if the folder cannot be locked."""

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
        """On rank 0: create the folder and lock it; returns the content of the lock. Raises ValueError if this fails."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"--run.dir {self.path}: the path is a file; expected a folder, or a path that does not exist"
            )
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = (self.path / LOCK).open("a+")  # the lock of a folder that was moved aside moves with the file
            self._lock(self._file)
        except OSError as error:
            self.withdraw()
            raise ValueError(f"--run.dir {self.path}: {error.strerror}; choose a folder that can be written") from None
        self._file.seek(0)
        return self._file.read()

    def _lock(self, file: IO[str]) -> None:
        """Lock the file, and write the host and process of this rank into it."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ValueError(
                f"--run.dir {self.path}: {file.read() or 'another run'} is running in this folder; wait for its end, "
                f"or choose another folder"
            ) from None
        except OSError as error:
            self.remark = f"{self.path} cannot be locked ({error.strerror}): start no other run in this folder"
        file.truncate(0)
        file.write(f"{_me()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()

    def withdraw(self) -> None:
        """On rank 0: remove all traces of a rejected run."""
        if self._made and self.path.is_dir():
            (self.path / LOCK).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()


def unlike(lock: Path, holder: str) -> str | None:
    """Return the reason why this rank does not find the content of rank 0 in the lock file; "" if it does."""
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
