"""Data, without a device: the shard format and its errors, preparation and the split, the order of windows from one or
several sources, the built-in text, and the bigram loss."""

import hashlib
import math
import multiprocessing
import os
import tracemalloc
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.data import counting_baseline as baselines
from launch.data import prepare as preparing
from launch.data import sources as data
from launch.data.__main__ import main
from launch.data.counting_baseline import baseline, bigram_loss, unigram_loss
from launch.data.documents import list_files
from launch.data.prepare import held_out, prepare
from launch.data.shard import HEADER, Shard, open_shard, verify, write_shard
from launch.data.sources import STDLIB, open_data, open_sources
from launch.data.token_stream import TokenStream, permute
from launch.data.tokenizer import BYTES, SEPARATOR, encode_bytes
from tests.command import command
from tests.refusals import must_raise, refuses


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    documents = [np.arange(length) % 257 for length in (5, 1, 300)]
    write_shard(tmp_path / "a.shard", documents, 257)
    return open_shard(tmp_path / "a.shard")


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number in range(20):
        (folder / ("deep" if number % 3 else ".") / f"{number}.txt").write_text(f"file {number}\n" * (30 + number))
    return list_files([folder])


def test_shard_keeps_documents(shard: Shard) -> None:
    verify(shard)
    assert shard.tokens.dtype == "<u2" and shard.vocabulary == 257
    assert shard.starts.tolist() == [0, 5, 6] and len(shard.tokens) == 306
    assert shard.tokens[6:].tolist() == [n % 257 for n in range(300)]


def test_shard_of_a_large_vocabulary(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.shard", [np.array([0, 65535, 65536])], 65537)
    assert open_shard(tmp_path / "a.shard").tokens.tolist() == [0, 65535, 65536]


def test_layout_is_the_documented_one(shard: Shard) -> None:
    raw = shard.path.read_bytes()
    assert raw[:12] == b"dlpshard\x01\0\0\0" and raw[12:16] == b"<u2\0"
    assert np.frombuffer(raw[16:40], "<u8").tolist() == [257, 306, 3]
    assert raw[40:72] == hashlib.sha256(raw[72:]).digest() == bytes.fromhex(shard.digest)
    assert np.frombuffer(raw[72:96], "<i8").tolist() == [0, 5, 6] and len(raw) == 96 + 2 * 306


def damage(shard: Shard, offset: int, new: bytes) -> Path:
    raw = bytearray(shard.path.read_bytes())
    raw[offset : offset + len(new)] = new
    shard.path.write_bytes(raw)
    return shard.path


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("offset", "new", "sentence"),
    [
        (
            0,
            b"PK\3\4",
            "not a token shard, it begins with b'PK\\x03\\x04hard' instead of b'dlpshard'; prepare it again",
        ),
        (8, b"\x07", "version 7 of the format, but this program reads 1; prepare it again"),
        (12, b"<f4", "tokens of dtype '<f4', but this program reads <u2 and <u4; prepare it again"),
        (24, u64(307), "truncated, the header states 710 bytes and the file has 708; prepare it again"),
        (24, u64(305), "too long, the header states 706 bytes and the file has 708; prepare it again"),
        (72, u64(1), "document starts do not ascend from 0 to below 306; prepare it again"),
        (80, u64(6), "document starts do not ascend from 0 to below 306; prepare it again"),
        (88, u64(306), "document starts do not ascend from 0 to below 306; prepare it again"),
        (24, u64(306 + 12) + u64(0), "0 documents in 318 tokens is not possible; prepare it again"),
    ],
)
def test_damaged_shard_is_refused(shard: Shard, offset: int, new: bytes, sentence: str) -> None:
    path = damage(shard, offset, new)
    assert must_raise(ValueError, open_shard, path) == f"{path}: {sentence}"


def test_torn_shard_says_expected_and_found_bytes(shard: Shard) -> None:
    whole = shard.path.read_bytes()
    for size, sentence in (
        (700, "truncated, the header states 708 bytes and the file has 700"),
        (71, "not a token shard: 71 bytes are fewer than the 72"),
    ):
        shard.path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=sentence):
            open_shard(shard.path)


@pytest.mark.parametrize(("offset", "new"), [(100, b"\xff"), (72 + 8, u64(4))])
def test_verify_finds_changed_content(shard: Shard, offset: int, new: bytes) -> None:
    changed = open_shard(damage(shard, offset, new))
    with pytest.raises(ValueError, match="damaged, the SHA-256 of the content begins with"):
        verify(changed)


def test_verify_finds_tokens_outside_the_vocabulary(shard: Shard) -> None:
    with refuses("a.shard: token 256 at position 262 of 306 is outside the vocabulary of 256; encode"):
        verify(open_shard(damage(shard, 16, u64(256))))


def test_prepare_keeps_every_document_once(corpus: dict[str, Path], tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", validation=0.2)
    opened = open_data(str(tmp_path / "out"), 257)
    texts = []
    for shard in opened.train + opened.validation:
        for document in np.split(np.asarray(shard.tokens), shard.starts[1:]):
            assert document[-1] == SEPARATOR and document[:-1].max() < 256
            texts.append(bytes(document[:-1].astype(np.uint8)))
    assert sorted(texts) == sorted(path.read_bytes() for path in corpus.values())
    assert len(opened.validation[0].starts) == len(held_out({n: p.stat().st_size for n, p in corpus.items()}, 0.2))


def test_prepare_leaves_nothing_behind_when_it_fails(corpus: dict[str, Path], tmp_path: Path) -> None:
    next(path for name, path in corpus.items() if name == "7.txt" or name.endswith("/7.txt")).unlink()
    with pytest.raises(FileNotFoundError):
        prepare(corpus, tmp_path / "out", validation=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_of_two_that_prepare_the_same_folder_the_first_stands(corpus: dict[str, Path], tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", validation=0.2)
    before = (tmp_path / "out" / "train-00000.shard").stat()
    with pytest.raises(
        ValueError, match="out: another process has created this folder in the meantime; choose another folder"
    ):
        prepare(corpus, tmp_path / "out", validation=0.2)
    assert (tmp_path / "out" / "train-00000.shard").stat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
    with pytest.raises(OSError):
        prepare(corpus, next(iter(corpus.values())), validation=0.2)


def test_prepare_splits_into_shards(corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(corpus, tmp_path / "one", validation=0.2)
    monkeypatch.setattr(preparing, "SHARD_TOKENS", 1000)
    prepare(corpus, tmp_path / "many", validation=0.2)
    one, many = (open_data(str(tmp_path / name), 257).train for name in ("one", "many"))
    assert len(one) == 1 and len(many) > 2
    assert all(1000 <= len(shard.tokens) < 2000 for shard in many[:-1])
    assert np.array_equal(np.concatenate([shard.tokens for shard in many]), one[0].tokens)


def test_held_out_documents_depend_on_names_and_fill_the_share() -> None:
    sizes = {f"{number}.txt": 10 + number for number in range(200)}
    chosen = held_out(sizes, 0.1)
    total = sum(sizes[name] for name in chosen) / sum(sizes.values())
    assert 0.1 <= total < 0.11
    assert held_out(dict(reversed(sizes.items())), 0.1) == chosen
    assert held_out(sizes | {"large": 100_000}, 0.1) >= chosen


def test_a_document_larger_than_the_share_is_not_held_out() -> None:
    sizes = {f"{number}.txt": 10 for number in range(20)}
    for name in ("a", "b", "c", "d"):
        assert name not in held_out(sizes | {name: 1000}, 0.05)


@pytest.mark.parametrize(
    ("sizes", "share", "sentence"),
    [
        ({"a": 10, "b": 10}, 0.99, "leaves nothing to train on, because whole files are held out and there are 2"),
        ({"a": 10, "b": 10}, 0.0, "a validation share of 0.0 is not between 0 and 1: give 0.05 for 5 %"),
    ],
)
def test_shares_that_leave_nothing_are_refused(sizes: dict[str, int], share: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        held_out(sizes, share)


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(100)]
    (tmp_path / "book.txt").write_text("".join(lines))
    main(["prepare", "--out", str(tmp_path / "out"), str(tmp_path / "book.txt"), "--validation", "0.1"])
    opened = open_data(str(tmp_path / "out"), 257)
    texts = [bytes(each[0].tokens[:-1].astype(np.uint8)).decode() for each in (opened.train, opened.validation)]
    assert texts[0] + texts[1] == "".join(lines) and texts[0].endswith("\n")
    assert 0.1 <= len(texts[1]) / sum(map(len, texts)) < 0.12


@pytest.mark.parametrize("begin", ["", "title\n", "a\n", "ab\n"])
def test_a_long_line_is_cut_between_characters(tmp_path: Path, begin: str) -> None:
    """The title must not become the complete training split."""
    text = begin + "\N{EURO SIGN}" * 1000
    (tmp_path / "book.txt").write_text(text)
    prepare({"book.txt": tmp_path / "book.txt"}, tmp_path / "out", validation=0.1)
    opened = open_data(str(tmp_path / "out"), 257)
    texts = [bytes(each[0].tokens[:-1].astype(np.uint8)).decode() for each in (opened.train, opened.validation)]
    assert "".join(texts) == text
    assert 0.099 < len(texts[1].encode()) / len(text.encode()) < 0.101


def test_an_empty_file_is_no_validation_split(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a line\n" * 100)
    (tmp_path / "empty.txt").touch()
    prepare(list_files([tmp_path / "book.txt", tmp_path / "empty.txt"]), tmp_path / "out", validation=0.1)
    opened = open_data(str(tmp_path / "out"), 257)
    assert len(opened.validation[0].tokens) == 71 and len(opened.train[0].tokens) == 700 - 70 + 2


def test_of_a_few_large_files_the_end_of_the_largest_is_held_out(tmp_path: Path) -> None:
    for name, size in (("a", 1000), ("b", 3000)):
        (tmp_path / name).write_bytes(b"x" * size)
    prepare(list_files([tmp_path / "a", tmp_path / "b"]), tmp_path / "out", validation=0.05)
    opened = open_data(str(tmp_path / "out"), 257)
    assert np.diff(np.append(opened.train[0].starts, len(opened.train[0].tokens))).tolist() == [1001, 2801]
    assert len(opened.validation[0].tokens) == 201
    for size, sizes in ((1, "1 files with 1 bytes"), (0, "0 files with 0 bytes")):
        (tmp_path / "a").write_bytes(b"x" * size)
        with refuses(f"a validation share of 0.05 of {sizes} of text is nothing to validate on"):
            prepare({"a": tmp_path / "a"} if size else {}, tmp_path / "none", validation=0.05)


def test_a_file_whose_name_is_no_text_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"a.txt", b"caf\xe9.txt"):
        (folder / os.fsdecode(name)).write_text("x")
    for given in (folder, folder / os.fsdecode(b"caf\xe9.txt")):
        with pytest.raises(ValueError, match=r"in/caf\\xe9.txt': the name of this file is not UTF-8; rename it"):
            list_files([given])


def test_a_token_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    for tokens, sentence in (
        ([1, 257, 0], "token 257 at position 1 of 3 is outside"),
        ([0, 1, -1], "token -1 at position 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write_shard(tmp_path / "a.shard", [np.array(tokens)], 257)
    assert not (tmp_path / "a.shard").exists()


def test_a_damaged_builtin_cache_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "stdlib_files", lambda: {f"{number}.py": Path(__file__) for number in range(30)})
    opened = open_data(STDLIB, 257)
    folder = opened.train[0].path.parent
    way_out = f"; delete the folder {folder}, and the next run creates it again$"
    damage(opened.train[0], 5000, b"\xff")
    with pytest.raises(ValueError, match=f"damaged, the SHA-256 .*{way_out}"):
        verify(opened.train[0])
    damage(opened.train[0], 0, b"PK")
    with pytest.raises(ValueError, match=f"not a token shard, it begins with .*{way_out}"):
        open_data(STDLIB, 257)
    opened.validation[0].path.unlink()
    opened.train[0].path.unlink()
    with pytest.raises(ValueError, match=f"no train-.*.shard{way_out}"):
        open_data(STDLIB, 257)


def test_list_files_skips_hidden_ones_and_refuses_doubles(tmp_path: Path) -> None:
    for name in ("a.txt", ".hidden", ".git/b.txt", "c/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert list(list_files([tmp_path])) == ["a.txt", "c/a.txt"]
    with pytest.raises(ValueError, match="are both named a.txt; give their common folder instead"):
        list_files([tmp_path / "a.txt", tmp_path / "c"])
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        list_files([tmp_path / "nowhere"])


def test_open_data_names_what_is_wrong(corpus: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"corpus: the folder has no train-\*.shard; create shards with python -m "
        r"launch.data prep",
    ):
        open_data(str(tmp_path / "corpus"), 257)
    prepare(corpus, tmp_path / "out", validation=0.2)
    with pytest.raises(ValueError, match=r"the vocabulary of 257 is larger than the model's 256; set \[model\] vocab"):
        open_data(str(tmp_path / "out"), 256)


def test_program(corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus" / "picture.png").write_bytes(b"\x89PNG\0")
    arguments = ["prepare", "--out", str(tmp_path / "out"), str(tmp_path / "corpus"), "--validation", "0.2"]
    main(arguments)
    printed = capsys.readouterr()
    assert "left out, not text: picture.png" in printed.out and "vocabulary 257" in printed.out
    assert "prepare: 100%" in printed.err
    with pytest.raises(ValueError, match="out: exists already; remove it or choose another --out"):
        main(arguments)
    main(["inspect", str(tmp_path / "out" / "train-00000.shard")])
    assert "dtype <u2, vocabulary 257" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "out")])
    assert capsys.readouterr().out.count(", matches the content") == 2
    with pytest.raises(ValueError, match=r"corpus: the folder has no \*.shard files; give a shard, or a folder from"):
        main(["inspect", str(tmp_path / "corpus")])
    arguments[2] = str(tmp_path / "other")
    with pytest.raises(ValueError, match="a validation share of 5.0 is not between 0 and 1: give 0.05 for 5 %"):
        main([*arguments[:-1], "5"])
    assert "prepare" not in capsys.readouterr().err  # the refusal comes before any file is read
    with pytest.raises(ValueError, match="0 files with 0 bytes of text is nothing to validate on"):
        main([*arguments[:3], str(tmp_path / "corpus" / "picture.png")])
    assert "left out, not text: picture.png" in capsys.readouterr().out
    code, _, err = command("launch.data", "inspect", "README")
    assert code == 1 and err == "README: no such file or folder; give a shard, or a folder from launch.data prepare\n"


# --- order of windows


def make_stream(
    tmp_path: Path, lengths: tuple[int, ...] = (103, 60), split: str = "train", **settings: int
) -> TokenStream:
    """Return a stream of shards with increasing tokens, so that the tokens of a window show its position."""
    shards, first = [], 0
    for number, length in enumerate(lengths):
        path = tmp_path / f"{number}.shard"
        write_shard(path, [np.arange(first, first + length)], 1 << 20)
        shards.append(open_shard(path))
        first += 1000
    return TokenStream(
        shards, split=split, **{"sequence": 10, "global_batch": 8, "micro_batch": 2, "seed": 0} | settings
    )


def global_batch(stream: TokenStream, step: int, world: int) -> torch.Tensor:
    """Return the inputs of one step in the order of the global batch, collected from the microbatches of all ranks."""
    micros = stream.global_batch // (stream.micro_batch * world)
    return torch.cat([stream.batch(step, micro, rank, world)[0] for micro in range(micros) for rank in range(world)])


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 1000])
def test_permute_is_a_permutation(count: int) -> None:
    places = np.arange(count, dtype=np.uint64)
    assert sorted(permute(places, count, (0, 0)).tolist()) == list(range(count))


def test_permute_shuffles_and_depends_on_the_key() -> None:
    places = np.arange(10_000, dtype=np.uint64)
    orders = [permute(places, 10_000, key).astype(float) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(order, places)[0, 1]) < 0.05 and abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
        for other in orders[:number]:
            assert (order == other).mean() < 0.01


def test_order_of_the_data_never_changes() -> None:
    """The order equals a stored order, because a resumed run must read the same data with any version of any
    package."""
    assert permute(np.arange(8, dtype=np.uint64), 100, (0, 0)).tolist() == [52, 16, 63, 97, 45, 87, 21, 91]


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    tokens, targets = make_stream(tmp_path).batch(3, 1, 0, 2)
    assert tokens.shape == targets.shape == (2, 10) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1) and tokens.is_contiguous() and targets.is_contiguous()


def test_positions_begin_anew_with_each_document(tmp_path: Path) -> None:
    """Token t of document d is 100 d + t, so each token determines its expected position, counted from the first token of
    its document in the window. One document begins at the second token of a window, and one window has six documents."""
    lengths = (3, 1, 25, 2, 18, 1, 1, 1, 1, 1, 1, 41, 2, 2)
    write_shard(tmp_path / "a.shard", [100 * d + np.arange(length) for d, length in enumerate(lengths)], 1 << 20)
    shard = open_shard(tmp_path / "a.shard")
    stream = TokenStream([shard], split="train", sequence=10, global_batch=9, micro_batch=9, seed=0)
    tokens, documents = stream.batch(0, 0, 0, 1)[0], stream.documents(0, 0, 0, 1)
    assert documents.positions.dtype == torch.int64 and documents.starts.dtype == torch.int32
    expected, starts = [], []
    for row in tokens.tolist():
        for place, token in enumerate(row):
            first = next(each for each in row if each // 100 == token // 100)
            expected.append(token - first)
            starts += [len(expected) - 1] if place == 0 or token % 100 == 0 else []
    assert documents.positions.flatten().tolist() == expected
    begins = [[place for place in starts if place // 10 == row] for row in range(9)]
    assert any(10 * row + 1 in each for row, each in enumerate(begins)) and max(map(len, begins)) == 6
    assert documents.starts.tolist() == [*starts, tokens.numel()]


def test_an_epoch_reads_every_window_once_and_none_across_shards(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, lengths=(161, 88))
    assert stream.num_windows == 16 + 8
    firsts = [int(row[0]) for step in range(3) for row in global_batch(stream, step, 1)]
    assert sorted(firsts) == [*range(0, 160, 10), *range(1000, 1080, 10)]
    second = [int(row[0]) for step in range(3, 6) for row in global_batch(stream, step, 1)]
    assert sorted(second) == sorted(firsts) and second != firsts


def mixed(tmp_path: Path, weights: tuple[float, ...] = (3, 1), **settings: int) -> TokenStream:
    """Return a stream of two folders with 12 and 5 windows. Tokens of the second folder begin at 100000."""
    opened = []
    for name, length, first in (("a", 81, 0), ("a", 42, 1000), ("b", 51, 100_000)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        path = folder / f"{first}.shard"
        write_shard(path, [np.arange(first, first + length)], 1 << 20)
        opened.append(open_shard(path))
    given = dict(zip((tmp_path / "a", tmp_path / "b"), weights, strict=True))
    batch = {"sequence": 10, "global_batch": 8, "micro_batch": 2, "seed": 0} | settings
    return TokenStream(opened, split="train", weights=given, **batch)  # type: ignore[arg-type]


def test_sources_have_their_shares_and_go_through_their_own_windows(tmp_path: Path) -> None:
    stream = mixed(tmp_path, global_batch=64)
    windows = np.concatenate([stream.order(step) for step in range(128)]).astype(int)
    second = windows >= 12
    assert [int(each.sum()) for each in np.split(second, 2)] == [1024, 1024], "exactly a quarter of each 4096 windows"
    assert 0.2 < second[:1024].mean() < 0.3, "spread over them"
    for of_source, there in ((windows[~second], [*range(12)]), (windows[second], [*range(12, 17)])):
        for epoch in range(3):
            read = of_source[epoch * len(there) : (epoch + 1) * len(there)].tolist()
            assert sorted(read) == there, "a source repeats no window within an epoch"
    tokens, shards = global_batch(stream, 0, 1)[:, 0] >= 100_000, torch.from_numpy(second[:64])
    assert torch.equal(tokens, shards), "the batch has the windows of `order`"
    assert list(stream.describe(10)) == [
        f"data: {tmp_path}/a: 75.0% of the sequences, 40 epochs in 10 steps",
        f"data: {tmp_path}/b: 25.0% of the sequences, 32 epochs in 10 steps",
    ]
    assert torch.equal(global_batch(mixed(tmp_path, global_batch=64), 77, 1), global_batch(stream, 77, 4))


def test_weights_are_a_part_of_the_order(tmp_path: Path) -> None:
    one, other = mixed(tmp_path), mixed(tmp_path, (1, 1))
    one.load_state_dict(one.state_dict())
    with refuses(r"made with weights \[2048, 2048\] and this run has \[3072, 1024\], .*; restore \[data\] path"):
        one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"b would get less than one of 4096 sequences; raise the weight of 0.0001"):
        mixed(tmp_path, (1, 1e-4))
    with refuses("/b: the 51 tokens of the largest train shard are fewer than one sequence of 60"):
        mixed(tmp_path, sequence=60)


def test_sources_of_different_tokenizers_are_refused(corpus: dict[str, Path], tmp_path: Path) -> None:
    sources = [{"path": str(tmp_path / name), "weight": 1.0} for name in ("a", "b")]
    prepare(corpus, tmp_path / "a", validation=0.2)
    prepare(corpus, tmp_path / "b", validation=0.3)
    opened = open_sources(sources, 257)
    assert list(opened.weights) == [tmp_path / "a", tmp_path / "b"] and len(opened.train) == 2
    with pytest.raises(ValueError, match="expected different folders, got "):
        open_sources([sources[0], sources[0]], 257)
    prepare(corpus, tmp_path / "c", validation=0.3, tokenizer=replace(BYTES, name="other", digest="12"))
    with refuses(f"{tmp_path}/c: the tokens are from the tokenizer 12, and the tokens of {tmp_path}/a from bytes; "):
        open_sources([sources[0], {"path": str(tmp_path / "c"), "weight": 1}], 257)


def test_a_batch_may_cross_epochs(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, lengths=(31,))
    firsts = [int(row[0]) for step in range(3) for row in global_batch(stream, step, 1)]
    assert stream.num_windows == 3 and all(sorted(firsts[i : i + 3]) == [0, 10, 20] for i in range(0, 24, 3))


@pytest.mark.parametrize("world", [2, 4])
def test_order_does_not_depend_on_ranks(tmp_path: Path, world: int) -> None:
    stream = make_stream(tmp_path)
    for step in range(4):
        assert torch.equal(global_batch(stream, step, world), global_batch(stream, step, 1))


def test_order_depends_on_seed_and_step(tmp_path: Path) -> None:
    one, other = make_stream(tmp_path), make_stream(tmp_path, seed=1)
    assert not torch.equal(global_batch(one, 0, 1), global_batch(other, 0, 1))
    assert not torch.equal(global_batch(one, 0, 1), global_batch(one, 1, 1))
    assert torch.equal(global_batch(one, 1, 1), global_batch(make_stream(tmp_path), 1, 1))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        sentence = (
            f"{tmp_path}: the 10 tokens of the largest {split} shard are fewer than one sequence of 10 and its last"
        )
        with pytest.raises(ValueError, match=sentence):
            make_stream(tmp_path, lengths=(10, 9), split=split)


def test_state_of_another_order_is_refused_by_name(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.load_state_dict(make_stream(tmp_path).state_dict())
    for key in ("sequence", "global_batch", "seed"):
        changed = make_stream(tmp_path, **{key: 4})
        with pytest.raises(ValueError, match=rf"made with {key} 4 and this run has .*; restore \[train\] {key}, or"):
            stream.load_state_dict(changed.state_dict())
    with refuses(r"made with data [0-9a-f]{12} and this run has [0-9a-f]{12}, .*; restore \[data\] path"):
        stream.load_state_dict(make_stream(tmp_path, lengths=(103, 61)).state_dict())


# --- embedded text, and bigram loss


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> data.Data:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with ThreadPoolExecutor(3) as ranks:
            opened, *_ = [rank.result() for rank in [ranks.submit(open_data, STDLIB, 384) for _ in range(3)]]
        folder = opened.train[0].path.parent
        assert folder.parent == Path(os.environ["XDG_CACHE_HOME"]) / "dlp"
    assert list(folder.parent.iterdir()) == [folder], "ranks that were late leave nothing behind"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json", "train-00000.shard", "validation-00000.shard",
    ]  # fmt: skip
    return opened


def test_stdlib_is_a_lot_of_text_and_five_percent_validate(stdlib: data.Data) -> None:
    train, validation = len(stdlib.train[0].tokens), len(stdlib.validation[0].tokens)
    assert train > 6_000_000 and 0.045 < validation / (train + validation) < 0.055
    names = list(data.stdlib_files())
    assert "this.py" in names and "json/decoder.py" in names
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in names)


def test_another_share_or_source_is_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number}.py": Path(__file__) for number in range(30)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "stdlib_files", lambda: files)
    folders = [data.stdlib_shards(share) for share in (0.1, 0.2, 0.1)]
    assert folders[0] == folders[2] != folders[1]
    (tmp_path / "31.py").write_text("1\n")
    files["31.py"] = tmp_path / "31.py"
    folders.append(data.stdlib_shards(0.1))
    (tmp_path / "31.py").write_text("2\n")
    folders.append(data.stdlib_shards(0.1))
    assert len(set(folders)) == 4


def test_ranks_that_create_the_stdlib_shards_at_the_same_time_get_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 4
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks)

    def together(*given: Any, **options: Any) -> None:
        barrier.wait(60)
        prepare(*given, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "stdlib_files", lambda: {f"{number}.py": Path(__file__) for number in range(30)})
    monkeypatch.setattr(data, "prepare", together)
    with ProcessPoolExecutor(ranks, context) as pool:
        (folder,) = {each.result() for each in [pool.submit(data.stdlib_shards, 0.1) for _ in range(ranks)]}
    assert list((tmp_path / "dlp").iterdir()) == [folder]
    for path in folder.glob("*.shard"):
        verify(open_shard(path))


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refuses(r"cache .*/file/dlp cannot be written \(Not a directory\); set XDG_CACHE_HOME to"):
        data.stdlib_shards(0.1)


def test_bigram_loss_of_stdlib(stdlib: data.Data) -> None:
    """The loss is about 2.42 nats, and depends a little on the Python version."""
    loss = bigram_loss(stdlib.train, stdlib.validation)
    assert 2.35 < loss < 2.5
    assert loss > bigram_loss(stdlib.validation, stdlib.validation)


def test_bigram_loss_of_known_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coins = np.random.default_rng(0).integers(0, 2, 40_000)
    zero_after_one = np.concatenate([[0] if coin == 0 else [1, 0] for coin in coins])
    for name, tokens in (("cycle", np.arange(40_000) % 4), ("chain", zero_after_one), ("once", [0, 0, 1, 0, 0])):
        write_shard(tmp_path / name, [np.asarray(tokens)], 257)
    cycle, chain, once = (open_shard(tmp_path / name) for name in ("cycle", "chain", "once"))
    # `cycle` has 10,000 pairs 0 -> 1 and 10,000 pairs 1 -> 2. `once` has the pairs 0 -> 0 (twice), 0 -> 1 and 1 -> 0. The
    # baseline adds 1.0 to the count of each of the 257 successors.
    assert bigram_loss([cycle], [once], 1.0) == pytest.approx(math.log(10_257**4 / 10_001) / 4, rel=1e-9)
    assert bigram_loss([cycle], [cycle]) < 0.01
    assert bigram_loss([chain], [chain]) == pytest.approx(math.log(2) * 2 / 3, abs=0.004)
    whole = bigram_loss([cycle, chain], [chain])
    monkeypatch.setattr("launch.data.counting_baseline.PIECE", 1000)
    assert bigram_loss([cycle, chain], [chain]) == pytest.approx(whole, rel=1e-12)


def test_a_large_vocabulary_has_a_unigram(tmp_path: Path) -> None:
    tokens = np.repeat([0, 1, 2, 50_000], [500_000, 250_000, 125_000, 125_000])
    write_shard(tmp_path / "train", [tokens], 50_257)
    write_shard(tmp_path / "validation", [tokens[::1000]], 50_001)
    train, validation = open_shard(tmp_path / "train"), open_shard(tmp_path / "validation")
    tracemalloc.start()
    found = baseline([train], [validation])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.name == "unigram" and found.loss == pytest.approx(1.75 * math.log(2), abs=0.06)
    assert str(found) == f"unigram loss of the same split: {found.loss:.3f} nats/token"
    assert peak < 100e6, "a bigram takes 20 GB"


def test_small_vocabularies_have_a_bigram_in_the_unit_of_their_tokens(tmp_path: Path, shard: Shard) -> None:
    assert baseline([shard], [shard])[::2] == ("byte-bigram", "nats/byte")
    for vocabulary, name in ((512, "bigram"), (513, "unigram")):
        write_shard(tmp_path / name, [np.arange(300)], vocabulary)
        other = open_shard(tmp_path / name)
        assert baseline([other], [shard])[::2] == baseline([shard], [other])[::2] == (name, "nats/token")


def test_of_much_text_pieces_are_counted(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "PIECE", 30)
    counted = [len(list(baselines._pieces([shard])))]
    monkeypatch.setattr(baselines, "MOST", 100)
    counted.append(len(list(baselines._pieces([shard]))))
    assert counted == [11, 3] and unigram_loss([shard], [shard]) > 0


def test_bytes_are_tokens() -> None:
    assert encode_bytes("é\n".encode()).tolist() == [0xC3, 0xA9, 10, SEPARATOR]
    assert encode_bytes(b"").tolist() == [SEPARATOR] and HEADER.size == 72
