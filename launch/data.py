"""Data of a run: prepared folders and the embedded `builtin:stdlib`, and the program that prepares and inspects.

A document is a text file or a row. Its tokens are its bytes (0..255) and a separator (256) at its end, so no tokenizer has to
be downloaded, or those of a tokenizer.json. A folder of data holds `train-00000.shard, ...`, `validation-00000.shard, ...`
and `index.json`.

`builtin:stdlib` is the running Python's own library, without its tests: about 12 MB of real text on every machine, 24 MB as
tokens of two bytes. Its shards are kept in the user's cache folder under the hash of the sources; any number of ranks may
make them at once.

    python -m launch.data prepare --out DIR FILES_OR_FOLDERS... [--tokenizer tokenizer.json] [--column text]
    python -m launch.data inspect SHARD_OR_FOLDER
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.documents import has_rows, is_text, list_files, looks_like_rows, walk
from launch.index import check_against, read_index
from launch.prepare import SPLITS, at_work, check_share, prepare, unfinished
from launch.shard import REMEDY, VERSION, Shard, open_shard, verify
from launch.tokenizer import add_options, open_tokenizer

STDLIB = "builtin:stdlib"
NOT_STDLIB = frozenset("site-packages dist-packages test tests idle_test lib2to3 ensurepip __pycache__".split())
SPLIT_VERSION = 2  # of encoding, split and index: raise it when they change, so that no cached shard is taken for new


@dataclass(frozen=True)
class Data:
    """The open shards of both splits; those of a folder lie together. `tokenizer`: the SHA-256 of its file, "" for bytes, None
    where it is not known. `weights`: of the folders, where there are several."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    tokenizer: str | None = None
    weights: Mapping[Path, float] = field(default_factory=dict)


def open_sources(given: str | Sequence[Mapping[str, Any]], vocabulary: int, validation: float = 0.05) -> Data:
    """What `[data] path` names: one source, or several with their weights. Raises ValueError where one cannot be used, two are
    the same, or tokenizers differ."""
    if isinstance(given, str):
        return open_data(given, vocabulary, validation)
    opened = [open_data(each["path"], vocabulary, validation) for each in given]
    weights = {data.train[0].path.parent: each["weight"] for data, each in zip(opened, given, strict=True)}
    if len(weights) < len(opened):
        raise ValueError(f"[data] path: expected folders that differ, got {', '.join(each['path'] for each in given)}")
    tokenizer, first = opened[0].tokenizer, given[0]["path"]
    for data, each in zip(opened, given, strict=True):
        if data.tokenizer != tokenizer:
            raise ValueError(
                f"{each['path']}: its tokens are of {_short(data.tokenizer)}, and those of {first} of {_short(tokenizer)}; "
                f"prepare both with one tokenizer"
            )
    train, held = (tuple(shard for data in opened for shard in getattr(data, split)) for split in SPLITS)
    return Data(train, held, tokenizer, weights)


def described(given: str | Sequence[Mapping[str, Any]]) -> str:
    """What `[data] path` names, for people: a source, or several with their weights."""
    if isinstance(given, str):
        return given
    return " and ".join(f"{each['path']} (weight {each['weight']:g})" for each in given)


def _short(tokenizer: str | None) -> str:
    """A tokenizer by its digest."""
    if tokenizer is None:
        return "a tokenizer that is not known, without index.json"
    return f"the tokenizer {tokenizer[:12]}" if tokenizer else "bytes"


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
    if (index := read_index(folder, remedy)) is None:
        return Data(shards["train"], shards["validation"])
    check_against(index, folder, [shard for found in shards.values() for shard in found], remedy)
    return Data(shards["train"], shards["validation"], index["tokenizer"]["digest"])


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


def _prepare_command(options: argparse.Namespace) -> None:
    if options.out.exists():
        raise ValueError(f"{options.out}: exists already; remove it or choose another --out")
    check_share(options.validation)
    for left in unfinished(options.out):
        if at_work(left):
            raise ValueError(
                f"{options.out}: another preparation is at work on it, in {left}; wait for its end, or choose another --out"
            )
        print(f"{left} is of a preparation that did not end; remove it")
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    files = list_files(options.files)
    read = {name: path for name, path in files.items() if has_rows(path, options.column) or is_text(path)}
    try:
        made = prepare(
            read, options.out, validation=options.validation, tokenizer=tokenizer, column=options.column, progress=True
        )
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ValueError(f"{where}; nothing is left of {options.out}") from None
    if not made:
        raise ValueError(
            f"{options.out}: another preparation has made it meanwhile, and that stands; choose another --out"
        )
    for name in files.keys() - read.keys():
        print(f"left out, not text: {name}")
    for name, path in read.items():
        if looks_like_rows(path) and not has_rows(path, options.column):
            print(f"read as one text, since it is neither JSON lines nor an array of objects or strings: {name}")
    for path in sorted(options.out.glob("*.shard")):
        print(describe(open_shard(path)))


def _inspect_command(options: argparse.Namespace) -> None:
    paths = sorted(options.shard.glob("*.shard")) if options.shard.is_dir() else [options.shard]
    if not options.shard.exists():
        raise ValueError(
            f"{options.shard}: no such file or folder; give a shard, or a folder that launch.data prepare made"
        )
    if not paths:
        raise ValueError(f"{options.shard}: no *.shard in it; give a shard, or a folder that launch.data prepare made")
    for path in paths:
        shard = open_shard(path)
        verify(shard)
        print(describe(shard) + ", as its content")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.data", description="Makes and inspects token shards.")
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("prepare", help="turn text files and rows into shards, a document each")
    kinds = (
        "text files, JSON lines and arrays (.jsonl, .ndjson, .json, also .gz), .parquet, .arrow, folders of them, saved "
        "Hugging Face datasets"
    )
    making.add_argument("files", nargs="+", type=Path, help=kinds)
    making.add_argument("--out", required=True, type=Path, help="the folder to make")
    add_options(making)
    making.add_argument("--column", default="text", help="of rows, where their text is (default: text)")
    making.add_argument("--validation", type=float, default=0.05, help="share of documents held out (default: 0.05)")
    making.set_defaults(command=_prepare_command)
    inspecting = commands.add_parser("inspect", help="check shards, hashes included, and describe them")
    inspecting.add_argument("shard", type=Path, help="one, or a folder of them")
    inspecting.set_defaults(command=_inspect_command)
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
