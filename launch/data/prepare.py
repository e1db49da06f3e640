"""From documents to a folder of shards: `train-00000.shard, ...`, `validation-00000.shard, ...` and `index.json`.

Whole documents are held out for validation. Text files are chosen by the hashes of their names until their share of the bytes
is full; rows by a hash of the file's name and their number, so that rows are read once, as a stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from launch.data.documents import has_rows, rows
from launch.data.shard import Shard, Tokens, open_shard, write_shard
from launch.data.shard_index import write_index
from launch.data.tokenizer import BYTES, KnownTokens, Text, Tokenizer

SHARD_TOKENS = 1 << 27  # a shard is built in memory: 256 MB of small tokens, 512 of large ones
SPLITS = ("train", "validation")
LOCK = ".lock"  # of a preparation that is at work, in its own folder
BATCH = 256  # documents that are encoded at once
BATCH_BYTES = 1 << 24  # of them, if they are long


@dataclass(frozen=True)
class Document:
    """`size`: bytes of the file that it took, for the progress bar."""

    split: str
    text: Text
    size: int


def check_share(share: float) -> None:
    """ValueError for a share of the documents that cannot validate."""
    if not 0 < share < 1:
        raise ValueError(f"a validation share of {share} is not between 0 and 1: give 0.05 for 5 %")


def held_out(sizes: Mapping[str, int], share: float) -> set[str]:
    """The names of the documents that validate: those whose names have the smallest hashes, up to `share` of the bytes.

    A document larger than that share is never one of them, so that no single file makes up the validation text (the
    library's largest file is 6 % of it); none may be small enough. Raises ValueError if none is left to train on.
    """
    check_share(share)
    budget = share * sum(sizes.values())
    small = [name for name in sizes if sizes[name] <= budget]
    ranked = sorted(small, key=lambda name: hashlib.sha256(name.encode()).digest())
    filled = itertools.accumulate((sizes[name] for name in ranked), initial=0)
    chosen = {name for name, before in zip(ranked, filled, strict=False) if before < budget}
    if chosen and len(chosen) == len(sizes):
        raise ValueError(
            f"a validation share of {share} leaves nothing to train on, because whole files are held out and there are "
            f"{len(sizes)}; give more files or another share"
        )
    return chosen


def tail(sizes: Mapping[str, int], share: float) -> tuple[str, int]:
    """Where no whole file is small enough to be held out: the largest one, and at which byte its held-out end begins.
    Raises ValueError if there is nothing to cut."""
    largest = max(sizes, key=lambda name: sizes[name], default="")
    at = sizes.get(largest, 0) - round(share * sum(sizes.values()))
    if not 0 < at < sizes.get(largest, 0):
        raise ValueError(
            f"a validation share of {share} of {len(sizes)} files with {sum(sizes.values())} bytes of text is nothing to "
            f"validate on; give more text"
        )
    return largest, at


def row_split(name: str, share: float) -> str:
    """Of a row, by its name."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return SPLITS[number < share * 2**64]


def documents(files: Mapping[str, Path], share: float, column: str) -> Iterator[Document]:
    """All documents of the files, in their order, empty rows left out."""
    sizes = {name: path.stat().st_size for name, path in files.items() if not has_rows(path, column)}
    validating = held_out(sizes, share)
    cut = None if validating or len(sizes) < len(files) else tail(sizes, share)
    for name, path in files.items():
        if name not in sizes:
            for number, text, size in rows(path, column):
                if text:
                    yield Document(row_split(f"{name}:{number}", share), (f"{path}, row {number}", text), size)
        elif cut is not None and cut[0] == name:
            text = path.read_bytes()
            at = text.rfind(b"\n", 0, cut[1]) + 1 or cut[1]
            yield Document("train", (str(path), text[:at]), at)
            yield Document("validation", (str(path), text[at:]), len(text) - at)
        else:
            yield Document(SPLITS[name in validating], (str(path), path.read_bytes()), sizes[name])


def batched(stream: Iterable[Document]) -> Iterator[list[Document]]:
    """So many at once that encoding them in threads is worth it."""
    batch: list[Document] = []
    nbytes = 0
    for document in stream:
        batch.append(document)
        nbytes += len(document.text[1])
        if len(batch) == BATCH or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


@dataclass
class ShardWriter:
    """The shards of one split. A shard is closed by the document that fills it."""

    folder: Path
    split: str
    vocabulary: int
    shards: list[Shard] = field(default_factory=list)
    _pending: list[Tokens] = field(default_factory=list)
    _room: int = 0

    def add(self, document: Tokens) -> None:
        self._room = self._room if self._pending else SHARD_TOKENS
        self._pending.append(document)
        self._room -= len(document)
        if self._room <= 0:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        path = self.folder / f"{self.split}-{len(self.shards):05}.shard"
        try:
            write_shard(path, self._pending, self.vocabulary)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # that of a full disk has no name
        self.shards.append(open_shard(path))
        self._pending = []


def unfinished(folder: Path) -> list[Path]:
    """The folders of preparations of a folder that did not end: they were killed, or are `at_work`."""
    name = re.compile(re.escape(f".{folder.name}-") + "[0-9a-f]{32}")
    return sorted(each for each in folder.parent.glob(".*") if name.fullmatch(each.name))


def at_work(work: Path) -> bool:
    """Whether a process holds the lock of such a folder. The system lets go of it, however the process ends."""
    try:
        with (work / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock yet, no folder any more, or a file system that has no locks
        return False
    return False


def prepare(
    files: Mapping[str, Path], folder: Path, *, validation: float, tokenizer: Tokenizer = BYTES, column: str = "text",
    progress: bool = False,
) -> bool:  # fmt: skip
    """Makes a folder of shards from files by name; the folder appears when it is complete. Where there are text files alone
    and every one is larger than the validation share, as a single one is, the largest is two documents, cut at the end of a
    line. `column`: of rows.

    False if another process completes the same folder first, whose work then stands. ValueError for what cannot be read,
    encoded or split.
    """
    work = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    try:
        with (work / LOCK).open("wb") as lock:
            with contextlib.suppress(OSError):  # of a file system that has no locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(work, files, validation, tokenizer, column, progress)
            (work / LOCK).unlink()
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            return False
        return True
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(
    work: Path, files: Mapping[str, Path], validation: float, tokenizer: Tokenizer, column: str, progress: bool
) -> None:
    """All shards and their index."""
    writers = {split: ShardWriter(work, split, tokenizer.vocabulary) for split in SPLITS}
    known, total = KnownTokens(tokenizer), sum(path.stat().st_size for path in files.values())
    with tqdm(desc="prepare", total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for batch in batched(documents(files, validation, column)):
            for document, tokens in zip(batch, tokenizer.encode([each.text for each in batch]), strict=True):
                known.check(document.text[0], tokens)
                writers[document.split].add(tokens)
            bar.update(min(sum(document.size for document in batch), total - bar.n))
        bar.update(total - bar.n)
    write_index(work, tokenizer, _closed(writers.values(), validation))


def _closed(writers: Iterable[ShardWriter], share: float) -> Sequence[Shard]:
    """All shards. ValueError for a split without any."""
    for writer in writers:
        writer.flush()
        if not writer.shards:
            raise ValueError(
                f"no document fell to {writer.split}, of whose rows a share of {share} validates; give more of them or another "
                f"share"
            )
    return [shard for writer in writers for shard in writer.shards]
