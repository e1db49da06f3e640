"""index.json of a folder of shards: the tokenizer and the hash of each shard, to detect missing and additional shards.

    {"format": "dlp data 1", "tokenizer": {"name", "digest", "vocabulary", "separator"},
     "shards": {"train-00000.shard": {"tokens", "documents", "sha256"}, ...}}

The index is optional: a folder with only `.shard` files from `write_shard` can be read as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.data.shard import Shard
from launch.data.tokenizer import Tokenizer

FORMAT = "dlp data 1"
INDEX = "index.json"


def entry_of(shard: Shard) -> dict[str, Any]:
    return {"tokens": len(shard.tokens), "documents": len(shard.starts), "sha256": shard.digest}


def write_index(folder: Path, tokenizer: Tokenizer, shards: Sequence[Shard]) -> None:
    """Write index.json for the shards in `folder`."""
    said = {key: getattr(tokenizer, key) for key in ("name", "digest", "vocabulary", "separator")}
    entries = {shard.path.name: entry_of(shard) for shard in shards}
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "tokenizer": said, "shards": entries}, indent=1) + "\n")


def read_index(folder: Path, remedy: str) -> dict[str, Any] | None:
    """Return the content of index.json; None if the file does not exist. Raises ValueError if it is not an index; `remedy` ends
    the message."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] == FORMAT and {"name", "digest"} <= found["tokenizer"].keys() and found["shards"].keys():
            return dict(found)
        reason = f"the format is {found['format']!r}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path}: not an index of shards ({reason}); {remedy}")


def check_against(index: dict[str, Any], folder: Path, shards: Sequence[Shard], remedy: str) -> None:
    """Raise ValueError if a shard is missing, not listed in the index, or differs from its entry; `remedy` ends the message."""
    there, listed = {shard.path.name: shard for shard in shards}, index["shards"]
    for name in sorted(there.keys() ^ listed.keys()):
        wrong = f"is missing, but listed in {INDEX}" if name in listed else f"is not listed in {INDEX}"
        raise ValueError(f"{folder / name}: this shard {wrong}; {remedy}")
    for name, shard in there.items():
        if entry_of(shard) != listed[name]:
            raise ValueError(
                f"{shard.path}: damaged or from another preparation: the header says {entry_of(shard)}, {INDEX} says "
                f"{listed[name]}; {remedy}"
            )
