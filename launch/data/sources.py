"""Open the data of a run, `[data] path`: prepared folders, or the embedded `builtin:stdlib`.

A prepared folder holds `train-00000.shard, ...`, `validation-00000.shard, ...` and `index.json`. Its tokens are from a
tokenizer.json, or are bytes (0 to 255) with a separator (256) after each document, for which no tokenizer has to be downloaded.

`builtin:stdlib` is the standard library of the running Python as bytes, without tests: about 12 MB of text, 24 MB as tokens of
two bytes. Its shards are stored in the cache folder of the user, under a hash of the source files; several ranks may create
them at the same time.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.data.documents import walk
from launch.data.prepare import SPLITS, prepare
from launch.data.shard import REMEDY, VERSION, Shard, open_shard
from launch.data.shard_index import check_against, read_index

STDLIB = "builtin:stdlib"
NOT_STDLIB = frozenset("site-packages dist-packages test tests idle_test lib2to3 ensurepip __pycache__".split())
# Version of encoding, split and index. Increase it when these change, so that cached shards of older versions are not used.
SPLIT_VERSION = 2


@dataclass(frozen=True)
class Data:
    """Open shards of both splits; shards of one folder are adjacent.

    tokenizer  SHA-256 of the tokenizer file; "": bytes; None: unknown
    weights    weight of each folder; empty for a single source
    """

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    tokenizer: str | None = None
    weights: Mapping[Path, float] = field(default_factory=dict)


def open_sources(given: str | Sequence[Mapping[str, Any]], vocabulary: int, validation: float = 0.05) -> Data:
    """Open the source or the weighted sources of `[data] path`. Raises ValueError for an invalid source, for two equal sources,
    or for sources with different tokenizers.

    vocabulary: `[model] vocab`; validation: share of files of builtin:stdlib for validation.
    """
    if isinstance(given, str):
        return open_data(given, vocabulary, validation)
    opened = [open_data(each["path"], vocabulary, validation) for each in given]
    weights = {data.train[0].path.parent: each["weight"] for data, each in zip(opened, given, strict=True)}
    if len(weights) < len(opened):
        raise ValueError(f"[data] path: expected different folders, got {', '.join(each['path'] for each in given)}")
    tokenizer, first = opened[0].tokenizer, given[0]["path"]
    for data, each in zip(opened, given, strict=True):
        if data.tokenizer != tokenizer:
            raise ValueError(
                f"{each['path']}: the tokens are from {_short(data.tokenizer)}, and the tokens of {first} from "
                f"{_short(tokenizer)}; prepare both with one tokenizer"
            )
    train, held = (tuple(shard for data in opened for shard in getattr(data, split)) for split in SPLITS)
    return Data(train, held, tokenizer, weights)


def described(given: str | Sequence[Mapping[str, Any]]) -> str:
    """Return `[data] path` as text for messages."""
    if isinstance(given, str):
        return given
    return " and ".join(f"{each['path']} (weight {each['weight']:g})" for each in given)


def _short(tokenizer: str | None) -> str:
    """Describe a tokenizer by its hash; `tokenizer` as in `Data`."""
    if tokenizer is None:
        return "an unknown tokenizer (no index.json)"
    return f"the tokenizer {tokenizer[:12]}" if tokenizer else "bytes"


def open_data(path: str, vocabulary: int, validation: float = 0.05) -> Data:
    """Open "builtin:stdlib" or a prepared folder. Arguments as in `open_sources`. Raises ValueError for a damaged or missing
    shard, or if the vocabulary of a shard is larger than `vocabulary`."""
    folder, remedy, missing = Path(path), REMEDY, "create shards with python -m launch.data prepare"
    if path == STDLIB:
        folder = stdlib_shards(validation)
        remedy = missing = f"delete the folder {folder}, and the next run creates it again"
    shards = {
        split: tuple(open_shard(each, remedy) for each in sorted(folder.glob(f"{split}-*.shard"))) for split in SPLITS
    }
    for split, found in shards.items():
        if not found:
            raise ValueError(f"{folder}: the folder has no {split}-*.shard; {missing}")
        for shard in found:
            if shard.vocabulary > vocabulary:
                raise ValueError(
                    f"{shard.path}: the vocabulary of {shard.vocabulary} is larger than the model's {vocabulary}; "
                    f"set [model] vocab to at least {shard.vocabulary}"
                )
    if (index := read_index(folder, remedy)) is None:
        return Data(shards["train"], shards["validation"])
    check_against(index, folder, [shard for found in shards.values() for shard in found], remedy)
    return Data(shards["train"], shards["validation"], index["tokenizer"]["digest"])


def stdlib_files() -> dict[str, Path]:
    """Return the Python files of the standard library by relative path, without tests and installed packages."""
    files = walk(Path(os.__file__).parent, NOT_STDLIB)
    return {name: path for name, path in files.items() if name.endswith(".py")}


def stdlib_shards(validation: float) -> Path:
    """Return the folder with the shards of builtin:stdlib in $XDG_CACHE_HOME/dlp or ~/.cache/dlp; create it if it is missing.
    Raises ValueError if the cache cannot be written."""
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
        except ValueError:
            if not folder.is_dir():  # otherwise another rank has created the folder first
                raise
        except OSError as error:
            raise ValueError(
                f"builtin:stdlib: the cache {cache / 'dlp'} cannot be written ({error.strerror or error}); set "
                f"XDG_CACHE_HOME to a writable folder, or set [data] path to a folder from launch.data prepare"
            ) from None
    return folder
