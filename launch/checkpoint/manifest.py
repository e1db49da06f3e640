"""Manifest of a checkpoint: a description of the run, and the size and hash of every file, checked before a file is used.

    manifest.json   the keys of `TYPES`; `digest` is a hash of all other keys

The hash of a file is the SHA-256 of the concatenated SHA-256s of its pieces of 64 MiB, so that threads can hash pieces
concurrently (hashlib releases the GIL). A rank hashes its files while writing them (`HashedFile`). When a checkpoint is read,
each rank checks the hashes of an equal share of the files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMAT = "dlp checkpoint 2"
MANIFEST = "manifest.json"
TYPES: dict[str, type] = {
    "format": str, "step": int, "world_size": int, "torch": str, "model": dict, "recipes": dict, "data": dict,
    "config": str, "files": dict, "digest": str,
}  # fmt: skip
ENTRY = {"bytes": int, "sha256": str}
NAME = re.compile(r"step-(0|[1-9][0-9]*)")
PIECE = 64 << 20
THREADS = 8


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be used; the message names the checkpoint, the reason and a remedy."""


def complete(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a run, oldest step first."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def resolve(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that `[checkpoint] resume` names: None for "none", the newest finished checkpoint in `folder` or
    None for "auto", else the path.

    Raises CheckpointError if the path is not a folder, or lies in the folder of this run and is not a finished checkpoint.
    With "auto", raises CheckpointError if a file has the name of a checkpoint and a later step than all finished checkpoints.
    """
    if resume == "none":
        return None
    if resume == "auto":
        newest = next(reversed(complete(folder)), None)
        least = -1 if newest is None else step_of(newest)
        for stray in sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and not path.is_dir()):
            if step_of(stray) > least:
                go_on = f", or use --checkpoint.resume {newest}" if newest else ""
                raise CheckpointError(
                    f"{stray} is foreign: a file with the name of the newest checkpoint; rename or remove it{go_on}"
                )
        return newest
    if not Path(resume).is_dir():
        raise CheckpointError(f"--checkpoint.resume {resume}: no such checkpoint; expected auto, none or its folder")
    path = Path(resume).resolve()
    if folder.parent.resolve() in path.parents and path not in complete(folder.resolve()):
        raise CheckpointError(
            f"--checkpoint.resume {resume}: not a finished checkpoint of this run, although in the folder of the run; "
            f"to continue from this checkpoint, choose another --run.dir"
        )
    return Path(resume)


WayOut = Callable[[Path], str]


def other_weights(path: Path) -> str:
    """Return the remedy for error messages about a checkpoint of which only the weights are read."""
    return "name another checkpoint, or make it again"


def way_out(path: Path) -> str:
    """Return the remedy in error messages of a run that resumes from `path`."""
    beside = complete(path.parent)
    older = beside[: beside.index(path)] if path in beside else []
    previous = f"--checkpoint.resume {older[-1]} to continue from that one, " if older else ""
    return f"use {previous}--checkpoint.resume none to start again"


def hashed(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file: size in bytes, and hash."""
    size = path.stat().st_size

    def piece(start: int) -> bytes:
        digest, left = hashlib.sha256(), PIECE
        with path.open("rb") as file:
            file.seek(start)
            while left and (read := file.read(min(left, 1 << 20))):
                digest.update(read)
                left -= len(read)
        return digest.digest()

    with ThreadPoolExecutor(THREADS) as threads:
        pieces = threads.map(piece, range(0, size, PIECE))
        return {"bytes": size, "sha256": hashlib.sha256(b"".join(pieces)).hexdigest()}


class HashedFile(io.BufferedWriter):
    """New file that is written sequentially and hashed at the same time.

    The kernel starts to write each piece to the disk when the piece is complete, so that the last fsync waits for less.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._size, self._piece, self._pieces = 0, hashlib.sha256(), b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start, end in _to_pieces(self._size, len(view)):
            part = view[start:end]
            super().write(part)
            self._piece.update(part)
            self._size += len(part)
            if self._size % PIECE == 0:
                self._pieces += self._piece.digest()
                self._piece = hashlib.sha256()
                self.flush()
                _write_back(self.fileno(), self._size - PIECE)
        return len(view)

    def entry(self) -> dict[str, Any]:
        """Return the manifest entry of the content written so far, equal to `hashed` of the closed file."""
        rest = self._piece.digest() if self._size % PIECE else b""
        return {"bytes": self._size, "sha256": hashlib.sha256(self._pieces + rest).hexdigest()}


def _to_pieces(offset: int, length: int) -> list[tuple[int, int]]:
    """Split the `length` bytes from byte `offset` of a file at multiples of `PIECE`; return (start, end) of each part, relative
    to `offset`."""
    ends = [*range(PIECE - offset % PIECE, length, PIECE), length]
    return list(zip([0, *ends], ends, strict=False))


def _write_back(file: int, start: int) -> None:
    """Ask the kernel to start writing the piece at byte `start` to the disk, without waiting for the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, PIECE, os.POSIX_FADV_DONTNEED)


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its key `digest`."""
    said = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    manifest = {"format": FORMAT, **manifest}
    manifest["digest"] = digest(manifest)
    assert manifest.keys() == TYPES.keys(), sorted(manifest)
    with (path / MANIFEST).open("w") as file:
        file.write(json.dumps(manifest, indent=1))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path, way_out: WayOut = way_out) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint; the other files are not checked here.

    Raises CheckpointError for a foreign checkpoint (another format) or a torn one (incomplete or modified). `way_out` returns
    the remedy in the message.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} {_without_manifest(path)}; {way_out(path)}")
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is torn: {MANIFEST} is not JSON ({error}); {way_out(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {way_out(path)}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path} is foreign: its format is {found!r}, expected {FORMAT!r}; {way_out(path)}")
    if missing := sorted(TYPES.keys() - manifest.keys()):
        raise CheckpointError(f"{path} is torn: {MANIFEST} lacks {', '.join(missing)}; {way_out(path)}")
    if reason := _unlike(manifest):
        raise CheckpointError(f"{path} is torn: {MANIFEST} {reason}; {way_out(path)}")
    return dict(manifest)


def _without_manifest(path: Path) -> str:
    """Return the predicate of a message about a path without a manifest: what the path is instead, and which checkpoints are
    in or beside the path."""
    for kind, folder in (("is the folder of a run", path / "checkpoints"), ("is the folder of its checkpoints", path)):
        if found := complete(folder):
            return f"{kind}, whose newest checkpoint is {found[-1]}"
    if path.exists():
        return f"is foreign: it has no {MANIFEST}"
    beside = ", ".join(each.name for each in complete(path.parent))
    return f"is not there{f', only {beside}' if beside else ''}"


def _unlike(manifest: dict[str, Any]) -> str | None:
    """Return the first error in the digest, the value types or the file entries of a manifest; None if there is none."""
    if manifest["digest"] != digest(manifest):
        return "was changed after it was written"
    for key, kind in TYPES.items():
        if type(manifest[key]) is not kind or (kind is int and manifest[key] < 0):
            return f"has {manifest[key]!r:.40} as {key}"
    for name, entry in manifest["files"].items():
        plain = name == Path(name).name and name not in ("", "..") and "\0" not in name
        if not plain or not isinstance(entry, dict) or {k: type(v) for k, v in entry.items()} != ENTRY:
            return f"has {entry!r:.40} as the size and hash of {name!r:.40}"
    return None


def damage(path: Path, files: Mapping[str, Mapping[str, Any]], share: Iterable[str]) -> str | None:
    """Check the sizes of all `files`, and the hashes of the files named in `share`; return a sentence about the first damaged
    file, or None."""
    for name, entry in files.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != entry["bytes"]:
            state = "is missing" if actual is None else f"has {actual} bytes"
            return f"{name} {state}, expected {entry['bytes']} bytes"
    try:
        changed = [name for name in share if hashed(path / name) != files[name]]
    except OSError as error:
        return f"{error}"
    return f"{changed[0]} has another hash than the manifest states" if changed else None
