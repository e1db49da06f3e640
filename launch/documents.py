"""Documents of files: a text file is one, and each row of JSON lines, Parquet or Arrow is one.

A Hugging Face dataset that was saved to disk is a folder of Arrow files, which its state.json lists; it is read by pyarrow
alone. Rows are read as a stream, however large a file is.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.tokenizer import MissingPackage, need

Row = tuple[Any, int]  # what stands in the column, and about how many bytes of the file that was
SAVED, SPLITS = "state.json", "dataset_dict.json"  # of a Hugging Face dataset, and of several


class RowError(ValueError):
    """A row that is none; the message names the file and the row."""


def walk(folder: Path, left_out: frozenset[str] = frozenset()) -> dict[str, Path]:
    """Files below a folder by their relative name, sorted; hidden ones and folders named in `left_out` are skipped."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files.update({path.relative_to(folder).as_posix(): path for path in paths if path.is_file()})
    return dict(sorted(files.items()))


def list_files(given: Iterable[Path]) -> dict[str, Path]:
    """The files given, those below the folders given and those of datasets, by name; ValueError if one is missing or
    doubled."""
    files: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        found = saved_dataset(path) or (walk(path) if path.is_dir() else {path.name: path})
        for name, file in found.items():
            _check_name(file, name)
            if name in files:
                raise ValueError(f"{file} and {files[name]} are both named {name}; give their common folder instead")
            files[name] = file
    return files


def saved_dataset(folder: Path) -> dict[str, Path]:
    """The Arrow files of a Hugging Face dataset, by name; none where the folder is not one."""
    if (folder / SPLITS).is_file():
        names = _listed(folder / SPLITS, lambda found: [str(name) for name in found["splits"]])
        raise ValueError(
            f"{folder}: a dataset of the splits {', '.join(names)}; give one of their folders, as {folder / names[0]}"
        )
    if not (folder / SAVED).is_file():
        return {}
    names = _listed(folder / SAVED, lambda found: [each["filename"] for each in found["_data_files"]])
    files = {f"{folder.name}/{name}": folder / name for name in names}
    for file in files.values():
        if not file.is_file():
            raise ValueError(f"{file}: missing, {SAVED} beside it lists it; save the dataset again")
    return files


def _listed(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """What a dataset's file lists, one name at least."""
    try:
        found = names(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not that of a saved dataset ({type(error).__name__}: {error})") from None
    if not found:
        raise ValueError(f"{path}: it lists nothing, so the dataset is empty; save it again, or leave it out")
    return found


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


def has_rows(path: Path) -> bool:
    return _kind(path).endswith(tuple(READERS))


def _kind(path: Path) -> str:
    """A name of which the end says what the file is, in capitals, too."""
    return path.name.lower()


def rows(path: Path, column: str) -> Iterator[tuple[int, bytes, int]]:
    """(number, text, bytes of the file) of each row from 1; the text is empty where there is none. ValueError for a file or a
    row that cannot be read."""
    reader = next(read for suffix, read in READERS.items() if _kind(path).endswith(suffix))
    number = 0
    try:
        for number, (value, nbytes) in enumerate(reader(path, column), start=1):
            if not isinstance(value, str | None):
                raise RowError(f"{path}, row {number}: {column} is no text but {value!r:.40}; name another --column")
            yield number, _encoded(value or "", path, number), nbytes
    except (RowError, MissingPackage):
        raise
    except (ValueError, OSError, EOFError, zlib.error) as error:  # pyarrow's own are ValueErrors and OSErrors
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}, row {number + 1}: cannot be read ({reason}); get the file again") from None


def _encoded(text: str, path: Path, number: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{path}, row {number}: no text, it has half a character at {error.start}; leave it out"
        ) from None


def json_lines(path: Path, column: str) -> Iterator[Row]:
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line) if line.strip() else {column: ""}
            if not isinstance(row, dict) or column not in row:
                _no_column(f"{path}, row {number}", column, row if isinstance(row, dict) else ())
            yield row[column], len(line)


def parquet(path: Path, column: str) -> Iterator[Row]:
    with need("pyarrow.parquet", "pyarrow", f"{path}: Parquet").ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            _no_column(str(path), column, file.schema_arrow.names)
        share = path.stat().st_size // max(1, file.metadata.num_rows)
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            yield from ((value, share) for value in batch.column(0).to_pylist())


def arrow(path: Path, column: str) -> Iterator[Row]:
    package = need("pyarrow", "pyarrow", f"{path}: Arrow")
    with package.memory_map(str(path)) as source, package.ipc.open_stream(source) as stream:
        if column not in stream.schema.names:
            _no_column(str(path), column, stream.schema.names)
        for batch in stream:
            share = batch.nbytes // max(1, batch.num_rows)
            yield from ((value, share) for value in batch.column(column).to_pylist())


def _no_column(where: str, column: str, there: Iterable[str]) -> None:
    raise RowError(f"{where}: no column {column}, it has {', '.join(there) or 'none'}; name one with --column")


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": json_lines, ".jsonl.gz": json_lines, ".parquet": parquet, ".arrow": arrow,
}  # fmt: skip
