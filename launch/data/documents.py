"""Read documents from files. A text file is one document; each row of JSON lines, a JSON array, Parquet or Arrow is one
document.

A Hugging Face dataset that `save_to_disk` has written is a folder of Arrow files, listed in state.json; reading it needs only
pyarrow. Rows are read as a stream, so files of any size can be read.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from launch.common.optional_packages import MissingPackage, need

Row = tuple[Any, int]  # value of the column, and approximate bytes of the row in the file
HEAD = 4096  # bytes of a .json file that are read to detect the format
MOST_LINE = 1 << 26  # maximum bytes of the first line of a .json file that are read to detect JSON lines
CHUNK = 1 << 20  # characters that are read at once from a JSON array; more within a long element
MOST_ELEMENT = 1 << 28  # maximum characters of one element of a JSON array
BLANK = re.compile(r"\s*")
ARROW_FILE = b"ARROW1"
SAVED, SPLITS = "state.json", "dataset_dict.json"  # files that mark a saved Hugging Face Dataset, and a DatasetDict


class RowError(ValueError):
    """Error for an invalid row; the message names the file and the row."""


def walk(folder: Path, left_out: frozenset[str] = frozenset()) -> dict[str, Path]:
    """Return the files below a folder by relative path, sorted. Hidden files and folders, and folders named in `left_out`, are
    skipped."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files.update({path.relative_to(folder).as_posix(): path for path in paths if path.is_file()})
    return dict(sorted(files.items()))


def list_files(given: Iterable[Path]) -> dict[str, Path]:
    """Return the given files, and all files in the given folders and datasets, by name. Raises ValueError if a path does not
    exist, or if two files have the same name."""
    files: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder; give another path")
        found = saved_dataset(path) or (walk(path) if path.is_dir() else {path.name: path})
        for name, file in found.items():
            _check_name(file, name)
            if name in files:
                raise ValueError(f"{file} and {files[name]} are both named {name}; give their common folder instead")
            files[name] = file
    return files


def saved_dataset(folder: Path) -> dict[str, Path]:
    """Return the Arrow files of a saved Hugging Face dataset by name; empty if the folder is not a dataset. Raises ValueError
    for a dataset with several splits, or with missing files."""
    if (folder / SPLITS).is_file():
        names = _listed(folder / SPLITS, lambda found: [str(name) for name in found["splits"]])
        raise ValueError(
            f"{folder}: a dataset with the splits {', '.join(names)}; give the folder of one split, such as "
            f"{folder / names[0]}"
        )
    if not (folder / SAVED).is_file():
        return {}
    names = _listed(folder / SAVED, lambda found: [each["filename"] for each in found["_data_files"]])
    files = {f"{folder.name}/{name}": folder / name for name in names}
    for file in files.values():
        if not file.is_file():
            raise ValueError(f"{file}: missing, but listed in {SAVED}; save the dataset again")
    return files


def _listed(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """Read the JSON file `path`, and return the list of names that `names` extracts. Raises ValueError if the list is empty or
    missing."""
    try:
        found = names(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not the state of a saved dataset ({type(error).__name__}: {error}); give the folder that "
            f"save_to_disk wrote"
        ) from None
    if not found:
        raise ValueError(f"{path}: no files listed, so the dataset is empty; save the dataset again, or leave it out")
    return found


def _check_name(path: Path, name: str) -> None:
    """Raise ValueError if the name of a file is not UTF-8, because the split of a document depends on a hash of the name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{os.fsencode(path)!r}: the name of this file is not UTF-8; rename it") from None


def is_text(path: Path) -> bool:
    """Return whether the first 8 KB of a file contain no zero byte, as git tests for text."""
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def has_rows(path: Path, column: str = "text") -> bool:
    """Return whether each row of a file is a document, decided by the suffix of the file; for .json by its content."""
    return _reader(path, column) is not None


def looks_like_rows(path: Path) -> bool:
    """Return whether the suffix is one of a data file. If such a file is read as one document, the program prints a remark."""
    return _kind(path).endswith(DATA)


def _kind(path: Path) -> str:
    """Return the name of a file in lower case, for comparison with suffixes."""
    return path.name.lower()


def _reader(path: Path, column: str) -> Callable[[Path, str], Iterator[Row]] | None:
    """Return the function that reads the rows of a file; None if the file is one document."""
    if _kind(path).endswith((".json", ".json.gz")):
        return _json_reader(path, column)
    return next((read for suffix, read in READERS.items() if _kind(path).endswith(suffix)), None)


def _json_reader(path: Path, column: str) -> Callable[[Path, str], Iterator[Row]] | None:
    """Return the function that reads the rows of a .json file; None if the file is one document.

    The file is a JSON array if it begins with an array of objects or strings. It is JSON lines if the first line is an object
    that has the column, or that is followed by more lines. Any other JSON, such as a settings file, is one document.
    """
    try:
        with _opened(path) as file:
            head = file.read(HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
            if head[:1] == b"[":
                return json_array if head[1:].lstrip()[:1] in (b"{", b'"') else None
            line, _, after = head.partition(b"\n")
            line += b"" if b"\n" in head else file.readline(MOST_LINE)
            row = json.loads(line)
            more = column in row or (after + file.read(HEAD)).strip()
            return json_lines if isinstance(row, dict) and more else None
    except (ValueError, TypeError, OSError, EOFError, zlib.error):
        return None


def rows(path: Path, column: str) -> Iterator[tuple[int, bytes, int]]:
    """Yield (number of the row from 1, text in UTF-8, approximate bytes of the row in the file) for each row. The text of an
    empty row is b"".

    Raises ValueError for a file or row that cannot be read."""
    reader = _reader(path, column)
    assert reader is not None, f"{path} has no rows"
    number = 0
    try:
        for number, (value, nbytes) in enumerate(reader(path, column), start=1):
            if not isinstance(value, str | None):
                raise RowError(f"{path}, row {number}: {column} is not text but {value!r:.40}; name another --column")
            yield number, _encoded(value or "", path, number), nbytes
    except (RowError, MissingPackage):
        raise
    except (ValueError, OSError, EOFError, zlib.error) as error:  # errors of pyarrow are ValueErrors and OSErrors
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}, row {number + 1}: cannot be read ({reason}); get the file again") from None


def _encoded(text: str, path: Path, number: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{path}, row {number}: not valid Unicode, an unpaired surrogate at character {error.start}; leave the row out"
        ) from None


def _opened(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def json_lines(path: Path, column: str) -> Iterator[Row]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line) if line.strip() else {column: ""}
            if not isinstance(row, dict) or column not in row:
                _no_column(f"{path}, row {number}", column, row if isinstance(row, dict) else ())
            yield row[column], len(line)


def json_array(path: Path, column: str) -> Iterator[Row]:
    """Yield the rows of a JSON array of strings, or of objects with the key `column`. The array is parsed element by
    element."""
    with _opened(path) as file:
        number = 0
        for row, nbytes in _elements(io.TextIOWrapper(file, encoding="utf-8-sig")):
            number += 1
            if isinstance(row, dict) and column not in row:
                _no_column(f"{path}, row {number}", column, row)
            yield row[column] if isinstance(row, dict) else row, nbytes


def _elements(file: TextIO) -> Iterator[tuple[Any, int]]:
    """Yield (element, number of characters) for each element of the JSON array in a file. Raises ValueError if the file is not
    an array."""
    decoder, text, size = json.JSONDecoder(), file.read(CHUNK), CHUNK
    # at: position after "[" or the previous element; before: separator that must precede the next element
    at, before = _behind_blanks(text, 0) + 1, ""
    while True:
        at = _behind_blanks(text, at)
        start = _behind_blanks(text, at + len(before))
        if text.startswith("]", at):
            break
        if at < len(text) and not text.startswith(before, at):
            raise ValueError(f"expected , or ], found {text[at : at + 20]!r}")
        problem = "the array does not end"
        try:
            row, end = decoder.raw_decode(text, start)
        except ValueError as error:
            problem = str(error)
        else:
            if end < len(text):  # otherwise the element may be a number with more digits after `text`
                yield row, end - at
                at, before, size = end, ",", CHUNK
                continue
        more = file.read(size) if len(text) - at < MOST_ELEMENT else ""
        if not more:
            raise ValueError(problem)
        # `size` doubles with each read, so that a long element is parsed only a few times
        text, at, size = text[at:] + more, 0, 2 * size
    if (text[at + 1 :] + file.read(CHUNK)).strip():
        raise ValueError("expected the end of the file behind the array")


def _behind_blanks(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    assert found is not None  # \s* also matches the empty string
    return found.end()


def parquet(path: Path, column: str) -> Iterator[Row]:
    with need("pyarrow.parquet", "pyarrow", f"{path}: Parquet").ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            _no_column(str(path), column, file.schema_arrow.names)
        share = path.stat().st_size // max(1, file.metadata.num_rows)
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            yield from ((value, share) for value in batch.column(0).to_pylist())


def arrow(path: Path, column: str) -> Iterator[Row]:
    package = need("pyarrow", "pyarrow", f"{path}: Arrow")
    with package.memory_map(str(path)) as source:
        # datasets writes streams; pyarrow and polars also write the file format, which begins with a magic number
        in_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(0)
        opened = package.ipc.open_file(source) if in_file else package.ipc.open_stream(source)
        if column not in opened.schema.names:
            _no_column(str(path), column, opened.schema.names)
        for batch in map(opened.get_batch, range(opened.num_record_batches)) if in_file else opened:
            share = batch.nbytes // max(1, batch.num_rows)
            yield from ((value, share) for value in batch.column(column).to_pylist())


def _no_column(where: str, column: str, there: Iterable[str]) -> None:
    raise RowError(f"{where}: no column {column}; the columns are {', '.join(there) or 'none'}: name one with --column")


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": json_lines, ".jsonl.gz": json_lines, ".ndjson": json_lines, ".ndjson.gz": json_lines,
    ".parquet": parquet, ".arrow": arrow,
}  # fmt: skip
DATA = (".json", ".json.gz", ".csv", ".tsv", *READERS)  # suffixes of data files, for `looks_like_rows`
