"""Training text of the study: Python sources of the standard library and of installed packages; each byte is a token."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from pathlib import Path

from launch.data.documents import walk
from launch.data.prepare import prepare
from launch.data.sources import stdlib_files


def sources(megabytes: float) -> dict[str, Path]:
    """Return a sample of Python sources of the standard library and of installed packages, by name. Files are taken in the
    order of the hashes of their names until their size reaches `megabytes`."""
    files = stdlib_files()
    for distribution in importlib.metadata.distributions():
        for top in (distribution.read_text("top_level.txt") or "").split():
            folder = Path(str(distribution.locate_file(top)))
            if folder.is_dir():
                files |= {f"{top}/{name}": path for name, path in walk(folder).items() if name.endswith(".py")}
    chosen, size = {}, 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if size < megabytes * 1e6:
            chosen[name] = files[name]
            size += files[name].stat().st_size
    return dict(sorted(chosen.items()))


def make_data(folder: Path, megabytes: float) -> str:
    """Write the shards to FOLDER/data and a description of the sources to FOLDER/data.txt, unless FOLDER/data exists. Returns
    the hash of the sources."""
    if not (folder / "data").exists():
        files = sources(megabytes)
        digest = hashlib.sha256()
        for name, path in files.items():
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        folder.mkdir(parents=True, exist_ok=True)
        packages = sorted({f"{each.name} {each.version}" for each in importlib.metadata.distributions()})
        size = sum(path.stat().st_size for path in files.values())
        lines = [
            f"sha256 {digest.hexdigest()}", f"{len(files)} files, {size} bytes", f"python {sys.version.split()[0]}"
        ]  # fmt: skip
        (folder / "data.txt").write_text("\n".join([*lines, *packages]) + "\n")
        prepare(files, folder / "data", validation=0.02)
    return (folder / "data.txt").read_text().split()[1]
