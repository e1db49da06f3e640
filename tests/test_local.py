"""`make pretrain` on machines of every size: ranks and tp that fit, and what is said about them; no ranks are started."""

from __future__ import annotations

import pytest

from launch import local
from launch.config import ConfigError, load
from launch.local import choose, remarks


def tps(tp: int) -> list[int]:
    return [size for size in range(tp, 0, -1) if tp % size == 0]


@pytest.mark.parametrize(
    ("devices", "chosen", "said"),
    [
        (1, (1, 1), ["using tp = 1 instead of 2 on 1 GPU"]),
        (2, (2, 2), []),
        (3, (2, 2), ["using 2 of 3 GPUs: no mesh of more fits tp and global_batch 8"]),
        (4, (4, 2), []),
        (5, (4, 2), ["using 4 of 5 GPUs: no mesh of more fits tp and global_batch 8"]),
        (8, (8, 2), []),
    ],
)
def test_tiny_fits_any_number_of_devices(devices, chosen, said):
    config = load("tiny", ["--train.global_batch=8", "--train.micro_batch=-1"])
    assert choose(config, range(devices, 0, -1), tps(2)) == chosen
    assert list(remarks(config, chosen, devices, "GPU")) == said


def test_odd_numbers_are_used_whole_where_the_batch_allows():
    config = load("tiny", ["--train.global_batch=9", "--train.micro_batch=-1", "--mesh.sequence_parallel=false"])
    assert choose(config, [3, 2, 1], tps(2)) == (3, 1)
    assert list(remarks(config, (3, 1), 3, "GPU")) == ["using tp = 1 instead of 2 on 3 GPUs"]


def test_what_was_asked_for_is_refused_rather_than_changed():
    with pytest.raises(ConfigError, match="^tiny.toml: .mesh. world size 3 is not a multiple of dp_replicate 1 x tp 2"):
        choose(load("tiny"), [3], [2])
    with pytest.raises(ConfigError, match="world size 1 is not a multiple of dp_replicate 1 x tp 2"):
        choose(load("tiny"), [1], [2])


class Started(Exception):
    """In place of a run: (ranks, arguments)."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU, on which nothing starts."""

    def train(ranks: int, arguments: list[str]) -> int:
        raise Started(ranks, arguments)

    monkeypatch.setattr(local, "train", train)
    monkeypatch.setattr(local, "devices_here", lambda: (1, "GPU"))
    return monkeypatch


def started(arguments: list[str]) -> tuple[int, list[str]]:
    with pytest.raises(Started) as caught:
        local.main(arguments)
    return caught.value.args


def test_arguments_go_on_to_training(machine, capsys):
    assert started(["tiny", "--train.steps", "3"]) == (1, ["tiny", "--train.steps", "3", "--mesh.tp", "1"])
    assert capsys.readouterr().out == "using tp = 1 instead of 2 on 1 GPU\n"
    assert started(["--ranks", "4", "tiny"]) == (4, ["tiny", "--mesh.tp", "2"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--train.lr=fast"], "--train.lr: expected a number > 0, got 'fast'"),
        (
            ["--mesh.tp=2"],
            "tiny.toml: [mesh] world size 1 is not a multiple of dp_replicate 1 x tp 2 = 2, so dp_shard = ",
        ),
        (
            ["--ranks=3"],
            "tiny.toml: [mesh] world size 3 is not a multiple of dp_replicate 1 x tp 2 = 2, so dp_shard = ",
        ),
    ],
)
def test_mistakes_are_one_sentence_before_any_rank_starts(machine, capsys, arguments, sentence):
    assert local.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(sentence) and err.count("\n") == 1


@pytest.mark.parametrize("ranks", ["0", "-2", "two", "²"])
def test_ranks_are_one_or_more(machine, capsys, ranks):
    with pytest.raises(SystemExit, match="2"):
        local.main([f"--ranks={ranks}"])
    assert capsys.readouterr().err.endswith(f"error: argument --ranks: expected an integer >= 1, got {ranks!r}\n")


def test_a_machine_without_gpus_has_two_ranks_or_as_many_as_cores(monkeypatch):
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 0)
    for cores, ranks in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr(local.os, "cpu_count", lambda cores=cores: cores)
        assert local.devices_here() == (ranks, "CPU core")
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 8)
    assert local.devices_here() == (8, "GPU")


def test_the_config_is_printed_without_ranks(machine, capsys):
    assert local.main(["tiny", "--print-config"]) == 0
    assert capsys.readouterr().out.startswith("[mesh]\n")
