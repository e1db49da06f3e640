"""Write files and folders atomically: under a temporary name, renamed when complete."""

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

YOUNG = 60.0  # seconds for which a new temporary folder counts as in use without a lock, because its lock may follow


def rewrite(path: Path, text: str) -> None:
    """Replace the content of a file. If writing fails, the old content stays, and the OSError names the file."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields an empty temporary folder and renames it to `path` at the end. After an exception the
    temporary folder is removed. Temporary folders of processes that have ended are removed first.

    Raises:
        ValueError: another process has created `path` in the meantime; that folder stays.
    """
    for left in path.parent.glob(f".{path.name}-*.tmp"):
        if re.fullmatch(re.escape(f".{path.name}-") + r"[0-9a-f]{32}\.tmp", left.name) and not _at_work(left):
            shutil.rmtree(left, ignore_errors=True)
    work = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
    work.mkdir(parents=True)
    lock = os.open(work, os.O_RDONLY)  # the system releases a lock when its process ends
    try:
        with suppress(OSError):  # raised by file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for `_at_work` of other processes, which locks the folder briefly
        yield work
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            raise ValueError(
                f"{path}: another process has created this folder in the meantime; choose another folder"
            ) from None
    finally:
        os.close(lock)
        shutil.rmtree(work, ignore_errors=True)


def _at_work(work: Path) -> bool:
    """Return whether another process may be writing to the temporary folder `work`: the folder is locked, cannot be opened or
    locked, or was modified less than `YOUNG` seconds ago."""
    try:
        lock = os.open(work, os.O_RDONLY)
    except OSError:  # the folder was removed in the meantime
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime < YOUNG
    except OSError:  # the folder is locked, or the file system has no locks
        return True
    finally:
        os.close(lock)
