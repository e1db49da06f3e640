"""`make pretrain` on machines of every size: chosen ranks and tp, and messages. No ranks are started."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dlp.comm import mesh
from launch import local, train
from launch.config.run_config import load
from launch.local import choose, remarks
from launch.ranks import process_exit
from launch.settings.schema import ConfigError
from launch.training import optimizer
from tests.command import command
from tests.pool import forking
from tests.refusals import must_raise


def tps(tp: int) -> list[int]:
    return [size for size in range(tp, 0, -1) if tp % size == 0]


@pytest.mark.parametrize(
    ("devices", "chosen", "said"),
    [
        (1, (1, 1), ["using tp = 1 instead of 2 on 1 GPU"]),
        (2, (2, 2), []),
        (3, (2, 2), ["using 2 of 3 GPUs: no mesh of more ranks fits tp and global_batch 8"]),
        (4, (4, 2), []),
        (5, (4, 2), ["using 4 of 5 GPUs: no mesh of more ranks fits tp and global_batch 8"]),
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
    """Exception that is raised in place of a run, with the arguments (ranks, arguments)."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU, on which no process is started."""

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
        (["--train.cuda_graph=true"], "tiny.toml: [train] cuda_graph = true: expected a GPU, got a CPU; set it to "),
        (["--train.profiler=nvtx"], "tiny.toml: [train] profiler: expected a GPU for nvtx, got a CPU: set it to torch"),
        (
            ["--train.kernels=required"],
            f'tiny.toml: [train] kernels = "required": native kernels need a CUDA device, and torch {torch.__version__}',
        ),
        (
            ["--train.optimizer=adamw4bit"],
            "tiny.toml: [train] optimizer: 'adamw4bit' stores averages in encodings of torchao, ",
        ),
        (['--run.metrics=["wandb"]'], "[run] metrics: wandb needs the package wandb, which is not installed"),
        (["--data.path=nowhere"], "nowhere: the folder has no train-*.shard; create shards with"),
        (["--checkpoint.resume=nowhere"], "--checkpoint.resume nowhere: no such checkpoint; expected auto, none or"),
        (["--train.init_from=nowhere"], "nowhere is not there; name another checkpoint, or make it again"),
    ],
)
def test_mistakes_are_one_sentence_before_any_rank_starts(machine, capsys, tmp_path, arguments, sentence):
    machine.setattr(local.torch.cuda, "is_available", lambda: False)
    machine.setattr(optimizer.importlib.util, "find_spec", lambda name: None)
    machine.setitem(sys.modules, "wandb", None)
    arguments = [f"--run.dir={tmp_path}", *arguments]
    assert local.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(sentence) and err.count("\n") == 1


def test_a_shard_on_a_disk_that_is_not_mounted_is_one_sentence(machine, capsys, tmp_path):
    (tmp_path / "train-00000.shard").symlink_to(tmp_path / "disk" / "train-00000.shard")
    assert local.main([f"--data.path={tmp_path}"]) == 1
    assert capsys.readouterr().err == f"[Errno 2] No such file or directory: '{tmp_path}/train-00000.shard'\n"


def test_a_process_without_torchrun_is_one_rank_and_takes_the_tp_that_fits(monkeypatch, capsys):
    """Without torchrun, the first command of docs/data.md runs with tp = 1, although tiny.toml has tp = 2; an explicit tp = 2
    is refused."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    trained = []
    monkeypatch.setattr(train, "train", trained.append)
    monkeypatch.setattr(train, "leave", lambda code: None)
    monkeypatch.setattr(sys, "argv", ["launch.train", "tiny", "--data.path", "data/mine"])
    train.main()
    assert trained[0].mesh.tp == 1 and trained[0].data.path == "data/mine"
    assert capsys.readouterr().out == (
        "using tp = 1 instead of 2: a process without torchrun is the only rank; make pretrain, or torchrun "
        "--nproc-per-node 2, starts more\n"
    )
    sys.argv += ["--mesh.tp", "2"]
    with pytest.raises(SystemExit):
        train.main()
    assert "world size 1 is not a multiple of dp_replicate 1 x tp 2 = 2, so" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")  # ranks of torchrun use tp of the config
    train.main()
    assert trained[1].mesh.tp == 2 and capsys.readouterr().out == ""


def test_a_plan_is_refused_on_the_device_that_a_run_is_refused_on(capsys, monkeypatch):
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    asked = ["launch.train", "tiny", "--plan", "--train.cuda_graph", "true", "--device"]
    code, out, err = command(*asked, "cpu")
    sentence = "[train] cuda_graph = true: expected a GPU, got a CPU; set it to auto or false"
    assert (code, out, err) == (1, "", f"tiny.toml: {sentence}\n")
    assert command(*asked, "h200").out.startswith("mesh: 8 sm_90 ranks")


def test_torchruns_report_ends_with_the_sentence_of_a_refusal(tmp_path, monkeypatch, capsys):
    """torchrun prints 40 lines after the message. The last line with text, the root cause, repeats the message."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    with pytest.raises(SystemExit):
        process_exit.refuse("a setting does not fit")
    failure = ProcessFailure(0, 1, 1, str(file))
    report = ChildFailedError("launch.train", {0: failure}).format_msg()
    assert report.splitlines()[-2] == "  traceback : a setting does not fit"
    assert process_exit.is_refusal(failure.error_file_data)
    assert capsys.readouterr().err == "a setting does not fit\n"
    file.write_text('{"message": {"message": "KeyError", "extraInfo": {"timestamp": 1}}}')
    assert not process_exit.is_refusal(ProcessFailure(0, 1, 1, str(file)).error_file_data)


def connected(place: dict[str, str]) -> str:
    """Message of ranks that cannot connect at this address. Runs in a separate process without a process group."""
    os.environ.update(place)
    return must_raise(ValueError, mesh.init_process_group, "cpu")


def test_a_taken_port_is_one_sentence():
    with socket.create_server(("0.0.0.0", 0)) as taken, forking().Pool(1) as pool:
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told = pool.apply(connected, (place,))
    assert told.startswith(f"the ranks cannot connect at 127.0.0.1:{port}: The server socket has failed to")


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
