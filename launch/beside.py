"""What appears whole or not at all: it is written beside its place, and renamed when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """Yields the empty folder to fill. What is raised inside leaves nothing behind."""
    work = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        work.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
