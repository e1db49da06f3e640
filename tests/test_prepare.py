"""Preparing data from files of rows and with a tokenizer file: errors are one sentence, and a refused preparation
leaves no files."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import generate, harness
from launch.checkpoint.manifest import CheckpointError
from launch.data import documents
from launch.data import prepare as preparing
from launch.data import shard as shards
from launch.data.__main__ import main
from launch.data.documents import list_files
from launch.data.prepare import prepare
from launch.data.shard_index import INDEX
from launch.data.sources import open_data
from launch.data.tokenizer import BYTES, open_tokenizer
from tests.refusals import must_raise

WORDS = "the cat sat on a mat and saw one dog"
ROWS = [f"{word} number {number}" for number, word in enumerate(WORDS.split() * 20)]


def texts(
    folder: Path, decode: Callable[[Any], str] = lambda tokens: bytes(tokens.astype(np.uint8)).decode()
) -> list[str]:
    """All documents of prepared data, without their separators, sorted."""
    opened = open_data(str(folder), 1 << 20)
    split = [np.split(np.asarray(each.tokens), each.starts[1:]) for each in opened.train + opened.validation]
    return sorted(decode(document[:-1]) for documents in split for document in documents)


def json_lines(path: Path, rows: list[str] = ROWS) -> Path:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.writelines(json.dumps({"text": row, "id": 1}) + "\n" for row in rows)
    return path


def parquet(path: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": list(range(len(ROWS))), "text": ROWS}), path, row_group_size=64)
    return path


def saved(folder: Path) -> Path:
    """Write files as `datasets.Dataset.save_to_disk` does."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (ROWS[:150], ROWS[150:]), strict=True):
        table = pa.table({"text": part})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def arrow_file(path: Path) -> Path:
    """Write the file format of Arrow, as pyarrow and polars do; `datasets` writes streams."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": list(range(len(ROWS))), "text": ROWS})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as written:
        written.write_table(table, max_chunksize=64)
    return path


def json_array(path: Path) -> Path:
    """Write an array of objects and strings that begins with a byte order mark and spans several chunks; compress the file
    if its name ends in .gz; return the path."""
    mixed = [{"text": row, "id": 1} if number % 3 else row for number, row in enumerate(ROWS)]
    text = "\ufeff" + json.dumps(mixed, indent=1) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


SOURCES = {
    "a.ndjson": json_lines,
    "a.json": json_lines,
    "b.json": json_array,
    "b.json.gz": json_array,
    "a.JSONL": json_lines,
    "a.jsonl.gz": json_lines,
    "a.parquet": parquet,
    "a.arrow": arrow_file,
    "set": saved,
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(documents, "CHUNK", 50)  # less than two rows
    source = SOURCES[name](tmp_path / name)
    prepare(list_files([source]), tmp_path / "out", validation=0.2)
    assert texts(tmp_path / "out") == sorted(ROWS)
    opened = open_data(str(tmp_path / "out"), 257)
    assert 0.1 < len(opened.validation[0].starts) / len(ROWS) < 0.3
    listed = json.loads((tmp_path / "out" / INDEX).read_text())
    assert listed["tokenizer"] == {"name": "bytes", "digest": "", "vocabulary": 257, "separator": 256}
    assert sum(entry["documents"] for entry in listed["shards"].values()) == len(ROWS)


def test_rows_and_files_together_and_rows_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    json_lines(folder / "a.jsonl", ["", *ROWS, ""]).open("a").write("\n")
    (folder / "b.txt").write_text("a file")
    prepare(list_files([folder]), tmp_path / "out", validation=0.2)
    assert texts(tmp_path / "out") == sorted([*ROWS, "a file"])


def tokenizer(folder: Path, end: str | None = "</s>", words: str = " ".join(ROWS), **config: Any) -> Path:
    """Write tokenizer.json with words as tokens and, unless `end` is None, tokenizer_config.json, which names the separator
    `end`; return the path of tokenizer.json."""
    package = pytest.importorskip("tokenizers")
    known = {word: place for place, word in enumerate(dict.fromkeys(["[UNK]", "</s>", *words.split()]))}
    made = package.Tokenizer(package.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)  # tokenizers often enable truncation; preparation needs the complete text
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if end is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end} | config))
    return folder / "tokenizer.json"


def test_a_tokenizer_of_a_file(tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "model")
    source = json_lines(tmp_path / "a.jsonl")
    main(["prepare", "--out", str(tmp_path / "out"), str(source), "--tokenizer", str(path), "--validation", "0.2"])
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer.from_file(str(path))
    assert texts(tmp_path / "out", lambda tokens: made.decode(tokens.tolist())) == sorted(ROWS)
    listed = json.loads((tmp_path / "out" / INDEX).read_text())["tokenizer"]
    assert listed["separator"] == 1 and listed["vocabulary"] == made.get_vocab_size() and len(listed["digest"]) == 64
    opened = open_data(str(tmp_path / "out"), 1000)
    assert all(each.tokens[-1] == 1 for each in opened.train)
    object_like = tokenizer(tmp_path / "other", end={"content": "</s>"})  # type: ignore[arg-type]
    assert open_tokenizer(str(object_like)).separator == 1
    assert open_tokenizer(str(tokenizer(tmp_path / "bare", end=None)), "[UNK]").separator == 0


def refused(tmp_path: Path, *arguments: str) -> str:
    """Run a preparation that must be refused; check that it leaves no files, and return the message."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:
        main(["prepare", "--out", str(tmp_path / "out"), "--validation", "0.2", *arguments])
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize("program", [generate, harness])
def test_who_reads_a_tokenizer_is_told_its_separator(monkeypatch, tmp_path: Path, program) -> None:
    monkeypatch.setattr(harness, "need", lambda *package: None)  # the error comes before lm_eval is needed
    arguments = ["nowhere", "--tokenizer", str(tokenizer(tmp_path, end=None))]
    arguments += ["--prompt", "a"] if program is generate else ["--tasks", "a"]
    with pytest.raises(ValueError, match="names an eos_token, .* name it with --separator"):
        program.main(arguments)
    with pytest.raises(CheckpointError, match="nowhere is not there"):  # the tokenizer is read before this error
        program.main([*arguments, "--separator", "</s>"])


def test_wrong_tokenizers_are_refused(tmp_path: Path) -> None:
    rows = str(json_lines(tmp_path / "a.jsonl"))
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": 1}')
    told = refused(tmp_path, rows, "--tokenizer", str(broken))
    assert told.startswith(f"{broken}: not a tokenizer of the package tokenizers (")
    told = refused(tmp_path, rows, "--tokenizer", "gpt2")
    assert told == "gpt2: no such tokenizer, expected bytes or the tokenizer.json of a model"
    path = tokenizer(tmp_path / "bare", end=None)
    told = refused(tmp_path, rows, "--tokenizer", str(path))
    assert told.endswith("names an eos_token, so the token that ends a document is not known; name it with --separator")
    told = refused(tmp_path, rows, "--tokenizer", str(path), "--separator", "<|end|>")
    assert told.endswith(
        f": the separator '<|end|>' is not one of the {len(ROWS) + 13} tokens of this tokenizer; name one of its tokens with "
        f"--separator"
    )
    for config, told in (('{"eos_token": ', "JSONDecodeError: "), ('{"eos_token": {"a": 1}}', "KeyError: 'content')"),
                         ("[1]", "AttributeError: ")):  # fmt: skip
        beside = path.with_name("tokenizer_config.json")
        beside.write_text(config)
        assert refused(tmp_path, rows, "--tokenizer", str(path)).startswith(f"{beside}: no readable eos_token ({told}")
    package = pytest.importorskip("tokenizers")
    package.Tokenizer(package.models.WordLevel({"</s>": 0})).save(str(path))
    told = refused(tmp_path, rows, "--tokenizer", str(path), "--separator", "</s>")
    assert told.startswith(f"{path}: this tokenizer cannot encode the documents from {rows}, row 1 to {rows}, row ")
    assert told.endswith("Missing [UNK] token from the vocabulary); give a tokenizer for this text")
    path = tokenizer(tmp_path / "foreign", words="le chat")
    told = refused(tmp_path, str(json_lines(tmp_path / "long.jsonl", ROWS * 3)), "--tokenizer", str(path))
    assert told.startswith(f"{path}: 75% of the tokens up to {tmp_path / 'long.jsonl'}, row 2")
    assert told.endswith("this tokenizer does not fit the text; give another tokenizer")


def test_sources_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, told in (
        (
            '{"text": "a", "b"',
            ", row 2: cannot be read (Expecting ':' delimiter: line 2 column 1 (char 18)); get the file",
        ),
        ('{"body": "a", "id": 1}', ", row 2: no column text; the columns are body, id: name one with --column"),
        ('{"text": 5}', ", row 2: text is not text but 5; name another --column"),
        ('{"text": "\\ud800"}', ", row 2: not valid Unicode, an unpaired surrogate at character 0; leave the row out"),
    ):
        path.write_text(f'{{"text": "x"}}\n{line}\n')
        assert refused(tmp_path, str(path)).startswith(f"{path}{told}")
    torn = json_lines(tmp_path / "b.jsonl.gz")
    torn.write_bytes(torn.read_bytes()[:-20])
    assert refused(tmp_path, str(torn)).endswith("cannot be read (Compressed file ended before the end-of-stream marker "
                                                 "was reached); get the file again")  # fmt: skip
    path.write_text('{"text": "x"}\n')
    assert refused(tmp_path, str(path)).startswith("no row was assigned to ")


def test_arrays_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK", 8)
    path = tmp_path / "a.json"
    for text, told in (
        ('[{"text": "a"}, {"text": "b"', "row 2: cannot be read (Expecting ',' delimiter: "),
        ('["a" "b"]', "row 2: cannot be read (expected , or ], found '\"b\"'); get the file again"),
        ('["a", ]', "row 2: cannot be read (Expecting value: "),
        ('["a"', "row 1: cannot be read (the array does not end); get the file again"),
        ('["a"]\n["b"]', "row 2: cannot be read (expected the end of the file behind the array); get the file again"),
        ('["a", 5]', "row 2: text is not text but 5; name another --column"),
        ('[{"body": "a"}]', "row 1: no column text; the columns are body: name one with --column"),
        ('{"body": "a"}\n{"body": "b"}', "row 1: no column text; the columns are body: name one with --column"),
        ('["' + 40 * "a" + '"]', "row 1: cannot be read (Unterminated string starting at: "),
    ):
        if 40 * "a" in text:
            monkeypatch.setattr(documents, "MOST_ELEMENT", 16)
        path.write_text(text)
        assert refused(tmp_path, str(path)).startswith(f"{path}, {told}"), text


def test_data_that_is_read_as_one_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in (("a.json", '{\n "name": "x"\n}'), ("b.json", "[1, 2]"), ("c.json", "{"), ("d.csv", "text\nx"),
                       ("e.json", ""), ("f.txt", "[]"), ("g.json", '{"text": "one row"}')):  # fmt: skip
        (folder / name).write_text(text)
    main(["prepare", "--out", str(tmp_path / "out"), str(folder), "--validation", "0.3"])
    said = [
        line.rpartition(": ") for line in capsys.readouterr().out.split("\n") if line.startswith("read as one document")
    ]
    assert [name for _, _, name in said] == ["a.json", "b.json", "c.json", "d.csv", "e.json"]
    assert "one row" in texts(tmp_path / "out")


def test_parquet_and_datasets_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    torn = parquet(tmp_path / "a.parquet")
    told = refused(tmp_path, str(torn), "--column", "body")
    assert told == f"{torn}: no column body; the columns are id, text: name one with --column"
    whole = bytearray(torn.read_bytes())
    torn.write_bytes(whole[:-50])
    assert refused(tmp_path, str(torn)).startswith(f"{torn}, row 1: cannot be read (")
    folder = saved(tmp_path / "set")
    (folder / "data-00001-of-00002.arrow").unlink()
    assert refused(tmp_path, str(folder)) == (
        f"{folder}/data-00001-of-00002.arrow: missing, but listed in state.json; save the dataset again"
    )
    for name, content, told in (
        ("state.json", '{"_data_files": []}', "no files listed, so the dataset is empty; save the dataset again, or "
            "leave it out"),
        ("dataset_dict.json", '{"splits": []}', "no files listed, so the dataset is empty; save the dataset again, or "
            "leave it out"),
        ("dataset_dict.json", "{", "not the state of a saved dataset (JSONDecodeError: "),
    ):  # fmt: skip
        (folder / name).write_text(content)
        assert refused(tmp_path, str(folder)).startswith(f"{folder / name}: {told}")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert refused(tmp_path, str(tmp_path / "all")) == (
        f"{tmp_path}/all: a dataset with the splits train, test; give the folder of one split, such as {tmp_path}/all/train"
    )


@pytest.mark.parametrize(("package", "name"), [("tokenizers", "tokenizers"), ("pyarrow.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    options = ["--tokenizer", str(tmp_path / "tokenizer.json")] if name == "tokenizers" else []
    told = refused(tmp_path, str(tmp_path / "a.parquet"), *options)
    assert told.endswith(f" needs the package {name}, which is not installed: pip install {name}")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rows = json_lines(tmp_path / "a.jsonl")
    monkeypatch.setattr(shards.os, "fsync", full)
    told = refused(tmp_path, str(rows))
    assert told.endswith(f"/train-00000.shard: No space left on device; {tmp_path / 'out'} was not created"), told


def test_what_a_killed_preparation_left_is_removed(tmp_path: Path) -> None:
    left, *others = (tmp_path / name for name in (f".out-{'0a' * 16}.tmp", ".out-mine.tmp", f".other-{'0a' * 16}.tmp"))
    for folder in (left, *others):
        folder.mkdir()
        os.utime(folder, (0, 0))
    rows = str(json_lines(tmp_path / "a.jsonl"))
    main(["prepare", "--out", str(tmp_path / "out"), rows, "--validation", "0.2"])
    assert not left.exists() and all(folder.is_dir() for folder in others)


def test_of_two_preparations_of_a_folder_the_last_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = tmp_path / "out", preparing.write_index
    asked = ["prepare", "--out", str(out), str(json_lines(tmp_path / "a.jsonl")), "--validation", "0.2"]

    def second_begins(*given: Any) -> None:
        monkeypatch.setattr(preparing, "write_index", write)
        main(asked)
        write(*given)

    monkeypatch.setattr(preparing, "write_index", second_begins)
    refusal = f"{out}: another process has created this folder in the meantime; choose another folder"
    assert must_raise(ValueError, main, asked) == refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
    assert sorted(path.name for path in out.iterdir()) == [INDEX, "train-00000.shard", "validation-00000.shard"]


def test_an_index_finds_shards_that_are_missing_swapped_or_foreign(tmp_path: Path) -> None:
    files = list_files([json_lines(tmp_path / "a.jsonl")])
    for name, share in (("one", 0.2), ("two", 0.3)):
        prepare(files, tmp_path / name, validation=share)
    folder, other = tmp_path / "one", tmp_path / "two"

    def told() -> str:
        return must_raise(ValueError, open_data, str(folder), 257)

    path = folder / "train-00000.shard"
    whole = path.read_bytes()
    (folder / "train-00001.shard").write_bytes(whole)
    assert told() == f"{folder}/train-00001.shard: this shard is not listed in index.json; prepare it again"
    path.rename(folder / "train-00001.shard")
    assert "train-00000.shard: this shard is missing, but listed in index.json; prepare it again" in told()
    (folder / "train-00001.shard").unlink()
    path.write_bytes((other / path.name).read_bytes())
    assert told().startswith(f"{path}: damaged or from another preparation: the header says ")
    path.write_bytes(whole)
    (folder / INDEX).write_text("{")
    assert told().startswith(f"{folder / INDEX}: not an index of shards (JSONDecodeError: ")


def test_bytes_have_a_separator_of_their_own() -> None:
    with pytest.raises(ValueError, match="--separator: bytes are separated by 256"):
        open_tokenizer("bytes", "</s>")
    assert open_tokenizer("bytes") is BYTES
