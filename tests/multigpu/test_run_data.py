"""Runs on damaged data, on data that differs between ranks, and on data whose tokens are not bytes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from launch.config.run_config import load
from launch.data.shard import HEADER, write_shard
from launch.data.shard_check import check_data
from launch.data.sources import open_data
from tests import training
from tests.refusals import may_raise


def random_data(folder: Path, vocabulary: int = 1000, documents: int = 1) -> Path:
    """Write data whose tokens are not bytes: they fall and rise between 0 and 999."""
    folder.mkdir()
    for split, length in (("train", 4000), ("validation", 700)):
        tokens = np.abs(np.arange(length) % 1998 - 999)
        write_shard(folder / f"{split}-00000.shard", np.array_split(tokens, documents), vocabulary)
    return folder


@pytest.mark.ranks(2)
def test_a_run_on_a_large_vocabulary_ends_with_a_unigram(ranks, tmp_path):
    config = training.config(tmp_path, random_data(tmp_path / "data"), "--model.vocab=1024", "--train.steps=2")
    ranks(2).run(training.run, config)
    *_, to_beat, done = training.said(config)
    assert to_beat.startswith("unigram loss of the same split: 6.") and to_beat.endswith(" nats/token")
    assert done.startswith("done: steps 2, validation loss ") and " nats/token, " in done


@pytest.mark.ranks(2)
def test_a_flipped_bit_and_a_token_outside_the_vocabulary_are_refused_on_all_ranks(ranks, tmp_path):
    config = training.config(tmp_path, random_data(tmp_path / "data"), "--model.vocab=1024")
    path = tmp_path / "data" / "validation-00000.shard"
    whole = path.read_bytes()
    at = HEADER.size + 8 + 2 * 123
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    told = ranks(2).run(may_raise, ValueError, training.run, config)
    assert told[0] == told[1] and told[0].startswith(f"{path}: damaged, the SHA-256 of the content begins with "), told
    with patch("launch.data.shard._check_tokens"):
        write_shard(path, [np.array([1] * 300 + [1000] + [1] * 300)], 1000)
    told = ranks(2).run(may_raise, ValueError, training.run, config)
    assert told[0] == told[1] and told[0].startswith(
        f"{path}: token 1000 at position 300 of 601 is outside the vocabulary of 1000; encode the text again"
    ), told


@pytest.mark.ranks(2)
def test_a_run_whose_attention_keeps_to_documents(ranks, tmp_path):
    data = random_data(tmp_path / "data", documents=100)
    losses = []
    for reset in ("false", "true"):
        folder = tmp_path / reset
        folder.mkdir()
        options = ("--model.vocab=1024", "--train.steps=2", f"--data.reset_attention={reset}")
        config = training.config(folder, data, *options)
        ranks(2).run(training.run, config)
        losses.append(training.metrics(config)[1])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05), "of untrained weights"


@pytest.mark.ranks(2)
def test_a_run_on_several_sources_continues_exactly(ranks, tmp_path):
    web, code = random_data(tmp_path / "web"), random_data(tmp_path / "code", documents=5)
    path = f'[{{ path = "{web}", weight = 3 }}, {{ path = "{code}", weight = 1 }}]'
    losses = []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            options = [
                "--model.vocab=1024",
                f"--train.steps={count}",
                "--train.min_lr=1",
                f"--run.dir={tmp_path / name}",
            ]
            config = training.config(tmp_path, web, *options, "--data.path", path)
            ranks(2).run(training.run, config)
        assert load(Path(config.run.dir) / "config.toml") == config
        losses.append(training.metrics(config))
    assert losses[0] == losses[1]
    assert f"data: {web}: 75.0% of the sequences, 0.39 epochs in 4 steps" in training.said(config)


def other_data(folders: list[Path]) -> str:
    try:
        return check_data(open_data(str(folders[dist.get_rank()]), 1000).train)
    except ValueError as error:
        return str(error)


@pytest.mark.ranks(2)
def test_ranks_that_read_different_data_are_refused(ranks, tmp_path):
    one, other = random_data(tmp_path / "one"), random_data(tmp_path / "other", vocabulary=1000)
    assert all(said.startswith("data: 8.01 kB in 1 shards, ") for said in ranks(2).run(other_data, [one, other]))
    write_shard(other / "train-00000.shard", [np.arange(500)], 1000)
    told = ranks(2).run(other_data, [one, other])
    assert all("rank 1 and rank 0 read different data under this name" in said for said in told), told
