"""Atomic files and folders: written under a temporary name and renamed when complete."""

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

YOUNG = 60.0  # seconds within which a new folder may lack its lock


def rewrite(path: Path, text: str) -> None:
    """Replace the content of a file. If writing fails, as on a full disk, OSError names the file, and the old content stays."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, and rename the folder to `path` at the end. After an exception nothing is left.

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
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Return whether another process is filling the temporary folder `work`, or may have just started."""
    try:
        lock = os.open(work, os.O_RDONLY)
    except OSError:  # the folder was removed in the meantime
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime < YOUNG
    except OSError:  # locked, or a file system without locks
        return True
    finally:
        os.close(lock)
