"""From text to token shards: `prepare` for files and folders, and the embedded `builtin:stdlib`.

A document is one file. Its tokens are its bytes (0..255) and a separator (256) at its end, so no tokenizer has to be
downloaded. Whole documents are held out for validation, chosen by the hash of their names. A folder of data holds
`train-00000.shard, ...` and `validation-00000.shard, ...`.

`builtin:stdlib` is the running Python's own library, without its tests: about 12 MB of real text on every machine. Its
shards are kept in the user's cache folder under the hash of the sources; any number of ranks may make them at once.

    python -m launch.data prepare --out DIR FILES_OR_FOLDERS...
    python -m launch.data inspect SHARD
"""

import argparse
import hashlib
import itertools
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from launch.shard import REMEDY, VERSION, Shard, Tokens, open_shard, verify, write_shard

STDLIB = "builtin:stdlib"
NOT_STDLIB = frozenset("site-packages dist-packages test tests idle_test lib2to3 ensurepip __pycache__".split())
SPLIT_VERSION = 1  # of encode_bytes and held_out: raise it when they change, so that no cached shard is taken for new
SEPARATOR = 256
SHARD_TOKENS = 1 << 27  # 256 MB; a shard is built in memory
SPLITS = ("train", "validation")


def encode_bytes(text: bytes) -> Tokens:
    """The bytes of one document and the separator, uint16 [len(text) + 1]."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(SEPARATOR))


TOKENIZERS: dict[str, tuple[Callable[[bytes], Tokens], int]] = {"bytes": (encode_bytes, 257)}  # encoder, vocabulary


@dataclass(frozen=True)
class Data:
    """The open shards of both splits."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


def open_data(path: str, vocabulary: int, validation: float = 0.05) -> Data:
    """Opens "builtin:stdlib" or a prepared folder for a model of `vocabulary` symbols.

    validation: share of builtin:stdlib's files held out. Raises ValueError if a shard is damaged, missing or has a
    larger vocabulary than the model.
    """
    folder, remedy, missing = Path(path), REMEDY, "make them with python -m launch.data prepare"
    if path == STDLIB:
        folder = stdlib_shards(validation)
        remedy = missing = f"delete the folder {folder}, and the next run makes it again"
    shards = {
        split: tuple(open_shard(each, remedy) for each in sorted(folder.glob(f"{split}-*.shard"))) for split in SPLITS
    }
    for split, found in shards.items():
        if not found:
            raise ValueError(f"{folder}: no {split}-*.shard in it; {missing}")
        for shard in found:
            if shard.vocabulary > vocabulary:
                raise ValueError(
                    f"{shard.path}: its vocabulary of {shard.vocabulary} is larger than the model's {vocabulary}; "
                    f"set [model] vocab to at least {shard.vocabulary}"
                )
    return Data(**shards)


def walk(folder: Path, left_out: frozenset[str] = frozenset()) -> dict[str, Path]:
    """Files below a folder by their relative name, sorted; hidden ones and folders named in `left_out` are skipped."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files.update({path.relative_to(folder).as_posix(): path for path in paths if path.is_file()})
    return dict(sorted(files.items()))


def list_files(given: Iterable[Path]) -> dict[str, Path]:
    """The files given and those below the folders given, by name; raises ValueError if one is missing or doubled."""
    files: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        for name, found in (walk(path) if path.is_dir() else {path.name: path}).items():
            _check_name(found, name)
            if name in files:
                raise ValueError(f"{found} and {files[name]} are both named {name}; give their common folder instead")
            files[name] = found
    return files


def _check_name(path: Path, name: str) -> None:
    """Names decide the split, by their hash, so they have to be text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{os.fsencode(path)!r}: the name of this file is not UTF-8; rename it") from None


def is_text(path: Path) -> bool:
    """No zero byte in the first 8 KB, which is how git tells text from data."""
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def held_out(sizes: Mapping[str, int], share: float) -> set[str]:
    """The names of the documents that validate: those whose names have the smallest hashes, up to `share` of the bytes.

    A document larger than that share is never one of them, so that no single file makes up the validation text (the
    library's largest file is 6 % of it); none may be small enough. Raises ValueError if none is left to train on.
    """
    if not 0 < share < 1:
        raise ValueError(f"a validation share of {share} is not between 0 and 1")
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


def prepare(
    files: Mapping[str, Path], folder: Path, *, validation: float, tokenizer: str = "bytes", progress: bool = False
) -> None:
    """Makes a folder of shards from files by name, each one document; the folder appears when it is complete. Where
    every file is larger than the validation share, as a single one is, the largest is two documents, cut at the end of a
    line.

    If another process completes the same folder first, its work stands.
    """
    encode, vocabulary = TOKENIZERS[tokenizer]
    sizes = {name: path.stat().st_size for name, path in files.items()}
    validating = held_out(sizes, validation)
    cut = None if validating else tail(sizes, validation)
    unfinished = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        for split in SPLITS:
            held = split == "validation"
            names = [cut[0]] if cut and held else [name for name in files if (name in validating) == held]
            shown = tqdm(names, desc=split, unit=" files", disable=not progress)
            texts = (_text(files[name], cut[1] if cut and cut[0] == name else None, held) for name in shown)
            _write_split(unfinished, split, map(encode, texts), vocabulary)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _text(path: Path, cut: int | None, end: bool) -> bytes:
    """A file; or of one that is cut, what lies before the last line that begins before byte `cut`, or its `end` from there."""
    text = path.read_bytes()
    if cut is None:
        return text
    at = text.rfind(b"\n", 0, cut) + 1 or cut
    return text[at:] if end else text[:at]


def _write_split(folder: Path, split: str, documents: Iterable[Tokens], vocabulary: int) -> None:
    """Writes as many shards as the documents need; a shard is closed by the document that fills it."""
    paths = (folder / f"{split}-{number:05}.shard" for number in itertools.count())
    pending: list[Tokens] = []
    room = SHARD_TOKENS
    for document in documents:
        pending.append(document)
        room -= len(document)
        if room <= 0:
            write_shard(next(paths), pending, vocabulary)
            pending, room = [], SHARD_TOKENS
    if pending:
        write_shard(next(paths), pending, vocabulary)


def stdlib_files() -> dict[str, Path]:
    """The running Python's own sources by relative name, without tests and without what pip installed."""
    files = walk(Path(os.__file__).parent, NOT_STDLIB)
    return {name: path for name, path in files.items() if name.endswith(".py")}


def stdlib_shards(validation: float) -> Path:
    """The folder of builtin:stdlib's shards, made if it is not in the cache ($XDG_CACHE_HOME/dlp or ~/.cache/dlp). ValueError
    where that cannot be written."""
    files = stdlib_files()
    digest = hashlib.sha256(f"{VERSION} {SPLIT_VERSION} {validation} {len(files)}".encode())
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "dlp" / f"stdlib-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        try:
            prepare(files, folder, validation=validation)
        except OSError as error:
            raise ValueError(
                f"builtin:stdlib: the cache {cache / 'dlp'} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME "
                f"to a folder that can, or name one that launch.data prepare made as [data] path"
            ) from None
    return folder


def describe(shard: Shard) -> str:
    """The header and the documents of a shard, in a few lines."""
    lengths = np.diff(np.append(shard.starts, len(shard.tokens)))
    return (
        f"{shard.path}: {len(shard.tokens):,} tokens of dtype {shard.tokens.dtype.str}, vocabulary {shard.vocabulary}\n"
        f"documents: {len(lengths):,} of {lengths.min():,} to {lengths.max():,} tokens\n"
        f"sha256: {shard.digest}"
    )


def _prepare_command(known: argparse.Namespace) -> None:
    if known.out.exists():
        raise ValueError(f"{known.out}: exists already; remove it or choose another --out")
    files = list_files(known.files)
    text = {name: path for name, path in files.items() if is_text(path)}
    prepare(text, known.out, validation=known.validation, tokenizer=known.tokenizer, progress=True)
    for name in files.keys() - text.keys():
        print(f"left out, not text: {name}")
    for path in sorted(known.out.iterdir()):
        print(describe(open_shard(path)))


def _inspect_command(known: argparse.Namespace) -> None:
    shard = open_shard(known.shard)
    verify(shard)
    print(describe(shard) + ", as its content")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.data", description="Makes and inspects token shards.")
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("prepare", help="turn text files and folders into shards, one document a file")
    making.add_argument("files", nargs="+", type=Path, help="text files, and folders of them")
    making.add_argument("--out", required=True, type=Path, help="the folder to make")
    making.add_argument("--tokenizer", choices=sorted(TOKENIZERS), default="bytes")
    making.add_argument("--validation", type=float, default=0.05, help="share of files held out (default: 0.05)")
    making.set_defaults(command=_prepare_command)
    inspecting = commands.add_parser("inspect", help="check a shard, hash included, and describe it")
    inspecting.add_argument("shard", type=Path)
    inspecting.set_defaults(command=_inspect_command)
    known = parser.parse_args(arguments)
    known.command(known)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
