"""Prepare a folder of shards from documents: `train-00000.shard, ...`, `validation-00000.shard, ...` and `index.json`.

Complete documents are held out for validation. Text files are held out in the order of hashes of their names, until they have
the requested share of the bytes. Rows are held out by a hash of file name and row number, so that rows can be read as a stream.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from launch.common.atomic_io import new_folder
from launch.data.documents import has_rows, rows
from launch.data.shard import Shard, Tokens, open_shard, write_shard
from launch.data.shard_index import write_index
from launch.data.tokenizer import BYTES, KnownTokens, Text, Tokenizer

SHARD_TOKENS = 1 << 27  # tokens of a shard, which is built in memory: 256 MiB with 2 bytes per token, 512 MiB with 4
SPLITS = ("train", "validation")
BATCH = 256  # maximum number of documents that are encoded at once
BATCH_BYTES = 1 << 24  # bytes of documents from which on a batch is encoded, even with fewer documents


@dataclass(frozen=True)
class Document:
    """Document with its split, "train" or "validation". `size`: bytes of the document in its file, for the progress bar."""

    split: str
    text: Text
    size: int


def check_share(share: float) -> None:
    """Raise ValueError for a validation share outside (0, 1)."""
    if not 0 < share < 1:
        raise ValueError(f"a validation share of {share} is not between 0 and 1: give 0.05 for 5 %")


def held_out(sizes: Mapping[str, int], share: float) -> set[str]:
    """Return the names of the documents for validation: the documents with the smallest hashes of names, until these documents
    have `share` of the bytes.

    sizes: bytes of each document by name. A document larger than `share` of all bytes is never held out, so that no single file
    makes up the validation split. The result may be empty. Raises ValueError if no document is left for training.
    """
    check_share(share)
    budget = share * sum(sizes.values())
    small = [name for name in sizes if sizes[name] <= budget]
    ranked = sorted(small, key=lambda name: hashlib.sha256(name.encode()).digest())
    filled = itertools.accumulate((sizes[name] for name in ranked), initial=0)
    chosen = {name for name, before in zip(ranked, filled, strict=False) if before < budget}
    if not any(sizes[name] for name in chosen):
        return set()  # files without text are no validation split
    if chosen and len(chosen) == len(sizes):
        raise ValueError(
            f"a validation share of {share} leaves nothing to train on, because whole files are held out and there are "
            f"{len(sizes)}; give more files or another share"
        )
    return chosen


def tail(sizes: Mapping[str, int], share: float) -> tuple[str, int]:
    """Return (name of the largest document, byte at which its validation part begins), for the case that every document is too
    large to be held out. Raises ValueError if the validation part or the training part would be empty."""
    largest = max(sizes, key=lambda name: sizes[name], default="")
    at = sizes.get(largest, 0) - round(share * sum(sizes.values()))
    if not 0 < at < sizes.get(largest, 0):
        raise ValueError(
            f"a validation share of {share} of {len(sizes)} files with {sum(sizes.values())} bytes of text is nothing to "
            f"validate on; give more text"
        )
    return largest, at


def beginning(text: bytes, at: int) -> int:
    """Return the first byte of the line that contains byte `at`. If this line begins so early that the part from there on would
    be more than twice as long as the part from `at` on, return the first byte of the UTF-8 character at `at`."""
    line = text.rfind(b"\n", max(0, 2 * at - len(text)), at) + 1
    while not line and at > 0 and text[at] & 0xC0 == 0x80:  # a byte inside a character
        at -= 1
    return line or at


def row_split(name: str, share: float) -> str:
    """Return the split of a row, chosen by a hash of `name`, which consists of file name and row number."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return SPLITS[number < share * 2**64]


def documents(files: Mapping[str, Path], share: float, column: str) -> Iterator[Document]:
    """Yield all documents of the files in order, without empty rows. If there are only text files and each is too large to be
    held out, the largest is yielded as two documents, one per split. `share`: share for validation; `column`: column of rows
    that holds the text."""
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
            at = beginning(text, cut[1])
            yield Document("train", (str(path), text[:at]), at)
            yield Document("validation", (str(path), text[at:]), len(text) - at)
        else:
            yield Document(SPLITS[name in validating], (str(path), path.read_bytes()), sizes[name])


def batched(stream: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches that are large enough for a tokenizer with threads."""
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
    """Writer of the shards of one split. A shard is written when it has at least `SHARD_TOKENS` tokens."""

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
            # the OSError of a full disk has no file name; add it
            raise OSError(error.errno, error.strerror, str(path)) from None
        self.shards.append(open_shard(path))
        self._pending = []


def prepare(
    files: Mapping[str, Path], folder: Path, *, validation: float, tokenizer: Tokenizer = BYTES, column: str = "text",
    progress: bool = False,
) -> None:  # fmt: skip
    """Create a folder of shards from files; the folder gets its name when it is complete.

    If there are only text files and each is larger than the validation share, the largest file is cut, at the end of
    a line if possible, and its second part becomes the validation split.

    Args:
        files: Files by name.
        folder: The folder to create.
        validation: Share for validation, of the bytes of text files and of the rows.
        tokenizer: Tokenizer of the text.
        column: Column of rows that holds the text.
        progress: Show a progress bar.

    Raises:
        ValueError: The input cannot be read, encoded or split, or another process has created the folder in the meantime.
    """
    with new_folder(folder) as work:
        _write(work, files, validation, tokenizer, column, progress)


def _write(
    work: Path, files: Mapping[str, Path], validation: float, tokenizer: Tokenizer, column: str, progress: bool
) -> None:
    """Write all shards and index.json into the folder `work`."""
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
    """Write the last shards and return all shards. Raises ValueError if a split has none."""
    for writer in writers:
        writer.flush()
        if not writer.shards:
            raise ValueError(
                f"no row was assigned to {writer.split} with a validation share of {share}; give more rows or another "
                f"share"
            )
    return [shard for writer in writers for shard in writer.shards]
