"""The training program without ranks: plans for any number of ranks, the printed config, and refusals."""

from __future__ import annotations

import math
import sys

import pytest

from launch import train
from launch.checkpoint.background_saver import describe
from launch.config.run_config import load, to_toml
from launch.config.sections import Checkpoint
from launch.ranks import process_exit
from launch.train import lost_peer, plan_text
from launch.training.learning_rate import learning_rate, rate_remarks
from tests.command import command
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("world", "device", "mesh"),
    [
        (2, "cpu", "mesh: 2 cpu ranks = dp_replicate 1 x dp_shard 1 x tp 2"),
        (8, "sm_90", "mesh: 8 sm_90 ranks = dp_replicate 1 x dp_shard 4 x tp 2"),
    ],
)
def test_a_plan_needs_no_ranks(world, device, mesh):
    lines = plan_text(load("tiny"), world, device).splitlines()
    assert lines[0] == mesh and lines[1].startswith(
        "plan: 29 linears (20 fp8_current column, 8 fp8_current row, 1 bf16 "
    )
    assert ("reference" if device == "cpu" else "cublaslt fp8 tn") in lines[5]
    assert "saves: every 100 steps and after the last step, written while the next steps run" in lines
    assert lines[-1].startswith("saves:" if device == "cpu" else "time: not predicted: name a board")


def test_a_plan_shows_the_invariant_mode_and_refuses_what_it_cannot_keep_equal():
    invariant = {"--train.invariant": "true", "--train.micro_batch": "1"}
    lines = plan_text(load("tiny", [*sum(invariant.items(), ())]), 2, "sm_90").splitlines()
    assert any(
        line.startswith("invariant = true: results are bitwise equal on every mesh; GEMMs add 8 segments")
        for line in lines
    )
    assert any(
        line.startswith("wire: invariant = true: the bytes of partial sums in fp32 are not predicted") for line in lines
    )
    assert any(line.startswith("attention: flash (invariant: one head of k and v at a time") for line in lines)
    assert any(
        line.startswith("cuda graph: steps are launched one by one (the sums of invariant = true") for line in lines
    )
    with refuses("k_proj: amax_scope = 'all' does not hold for w: tp splits a block of fp8_block"):
        plan_text(load("tiny", [*sum(invariant.items(), ()), "--recipe", "fp8_block"]), 2, "cpu")
    with pytest.raises(ValueError, match="dp_replicate = 4: FSDP adds"):
        plan_text(load("tiny", [*sum(invariant.items(), ()), "--mesh.dp_replicate", "4"]), 8, "cpu")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"asynchronous": False}, "saves: every 100 steps and after the last step, training waits for each save"),
        ({"at_end": False}, "saves: every 100 steps, written while the next steps run"),
        ({"every": 0}, "saves: after the last step"),
        ({"every": 0, "at_end": False}, "saves: none ([checkpoint] every = 0 and at_end = false)"),
    ],
)
def test_a_plan_says_when_a_run_saves(settings, line):
    assert describe(Checkpoint(**settings)) == line


def test_a_billion_parameters_are_planned_without_their_memory():
    lines = plan_text(load("llama3_1b"), 4, "sm_90").splitlines()
    assert lines[0] == "mesh: 4 sm_90 ranks = dp_replicate 1 x dp_shard 2 x tp 2"
    assert any(line.startswith("model.layers.15.mlp.down_proj") and "2048 x 8192" in line for line in lines)


def test_a_plan_that_does_not_fit_is_one_sentence_and_nothing_else(monkeypatch):
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    sentence = "[mesh] world size 3 is not a multiple of dp_replicate 1 x tp 2 = 2, so dp_shard = -1 cannot be filled: "
    sentence += "start a multiple of that many ranks by torchrun --nproc-per-node, or choose a smaller axis"
    assert command("launch.train", "tiny", "--plan", "--world", "3") == (1, "", f"tiny.toml: {sentence}\n")


def test_a_plan_is_for_one_rank_or_more_and_a_run_for_those_that_are_there(monkeypatch):
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    monkeypatch.setattr(train, "train", lambda config: pytest.fail("it trains"))
    code, out, error = command("launch.train", "tiny", "--plan", "--world", "4.5")
    assert (code, out) == (2, "") and error.endswith("argument --world: expected an integer >= 1, got '4.5'\n")
    sentence = "--world, --device, --timeline: expected only with --plan; add --plan, or leave these options out\n"
    assert command("launch.train", "tiny", "--world", "2") == (1, "", sentence)
    assert command("launch.train", "tiny", "--device", "h200") == (1, "", sentence)


def test_a_timeline_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    path = tmp_path / "missing" / "step.json"
    plan = ("tiny", "--plan", "--world", "2", "--device", "h100", "--timeline", str(path))
    assert command("launch.train", *plan) == (1, "", f"{path}: No such file or directory\n")


@pytest.mark.parametrize("arguments", [["--print-config"], ["--plan", "--world", "4", "--device", "cpu"]])
def test_what_is_printed_without_ranks(arguments, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", "tiny", "--train.lr", "1e-4", *arguments])
    monkeypatch.setattr(train, "train", lambda config: pytest.fail("it trains"))
    train.main()
    config = load("tiny", ["--train.lr", "1e-4"])
    expected = to_toml(config) if arguments == ["--print-config"] else plan_text(config, 4, "cpu") + "\n"
    assert capfd.readouterr().out == expected


def test_the_learning_rate_warms_up_and_falls_to_its_minimum():
    settings = load("tiny", ["--train.lr=0.5", "--train.warmup=4", "--train.steps=12", "--train.min_lr=0.2"]).train
    rates = [learning_rate(step, settings) for step in range(12)]
    assert rates[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.1)
    assert learning_rate(40, settings) == pytest.approx(0.1), "beyond its end"


# schedule -> learning rate after the fraction `done` of the steps after the warm-up; the peak is 1, the end 0.5 (constant: 1)
HEIGHTS = {  # 11 steps after 2 steps of warm-up; wsd decays in the last 4 steps
    "cosine": lambda done: 0.5 + 0.25 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - 0.5 * done,
    "wsd": lambda done: 1 - 0.5 * max(0.0, done - 0.6) / 0.4,
    "constant": lambda done: 1.0,
}


@pytest.mark.parametrize("schedule", HEIGHTS)
def test_schedules(schedule):
    options = ["lr=1", "warmup=2", "steps=13", "min_lr=0.5", f"schedule={schedule}", f"decay={4 / 13}"]
    settings = load("tiny", [f"--train.{option}" for option in options]).train
    rates = [learning_rate(step, settings) for step in range(14)]
    expected = [HEIGHTS[schedule](done / 10) for done in range(11)]
    assert rates == pytest.approx([0.5, 1, *expected, expected[-1]])


def test_a_lost_peer_is_told_from_other_errors():
    gloo = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17827: Connection reset by peer."
    assert lost_peer(RuntimeError(gloo)) and lost_peer(train.dist.DistBackendError("NCCL error"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_continued_run_says_where_its_learning_rate_leaves_the_curve():
    """The curve of 300 steps ends at a tenth of the peak; the curve of 600 steps is at 0.59 of the peak after 300
    steps."""
    before, longer = (load("tiny", [f"--train.steps={steps}", "--train.lr=0.01"]) for steps in (300, 600))
    assert list(rate_remarks(300, to_toml(before), before.train)) == []
    (warning,) = rate_remarks(300, to_toml(before), longer.train)
    assert warning == (
        "WARNING: the learning rate goes from 0.001 in step 300 to 0.00586 in step 301, where the previous settings "
        "would give 0.001, because train.steps changed the schedule; to keep 0.001: --train.lr 0.001 --train.min_lr 1 "
        "--train.warmup 0"
    )
    kept = load("tiny", ["--train.steps=600", "--train.lr=0.001", "--train.min_lr=1", "--train.warmup=0"]).train
    assert list(rate_remarks(300, to_toml(before), kept)) == []
    (early,) = rate_remarks(10, to_toml(before), load("tiny", ["--train.steps=300", "--train.lr=0.02"]).train)
    assert "because train.lr changed" in early
    assert list(rate_remarks(10, to_toml(before), longer.train)) == [], "the warm-up is the same"
    to_zero = load("tiny", ["--train.steps=300", "--train.min_lr=0"])
    (no_way,) = rate_remarks(300, to_toml(to_zero), longer.train)
    assert no_way.endswith("changed the schedule"), "--train.lr 0 would be refused"
