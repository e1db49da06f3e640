"""What appears whole or not at all: it is written beside its place, and renamed when it is complete."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

YOUNG = 60.0  # seconds within which a new folder may not have its lock yet


def rewrite(path: Path, text: str) -> None:
    """The whole content of a file. An OSError, as of a full disk, names it and leaves it as it was."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields the empty folder to fill, which no other process fills. What is raised inside leaves nothing behind.

    Raises:
        ValueError: Another process has made `path` meanwhile, which then stands.
    """
    for left in path.parent.glob(f".{path.name}-*.tmp"):
        if re.fullmatch(re.escape(f".{path.name}-") + r"[0-9a-f]{32}\.tmp", left.name) and not _at_work(left):
            shutil.rmtree(left, ignore_errors=True)
    work = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
    work.mkdir(parents=True)
    lock = os.open(work, os.O_RDONLY)  # the system lets go of a lock with its process
    try:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            raise ValueError(
                f"{path}: another process has made it meanwhile, and that stands; choose another folder"
            ) from None
    finally:
        os.close(lock)
        shutil.rmtree(work, ignore_errors=True)


def _at_work(work: Path) -> bool:
    """Whether a process fills such a folder, or may have just begun to."""
    try:
        lock = os.open(work, os.O_RDONLY)
    except OSError:  # gone meanwhile
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime < YOUNG
    except OSError:  # locked, or a file system without locks
        return True
    finally:
        os.close(lock)
