"""Planned memory, without ranks. The tests compare the bytes that a transformer block saves with sums written in this
file. Others check resident memory, configs that do not fit, and suggested settings."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launch import train
from launch.config.run_config import Config, load
from launch.estimate import memory_check
from launch.estimate.memory import MOMENTS, Memory
from launch.estimate.memory_check import planned, remedies
from launch.ranks import process_exit
from launch.train import plan_text
from tests.cases import nightly
from tests.command import command

LARGE = [
    "--model.layers=80", "--model.hidden=8192", "--model.ffn=28672", "--model.heads=64", "--model.kv_heads=8",
    "--model.head_dim=128", "--model.tie_embeddings=false", "--train.sequence=8192", "--train.global_batch=64",
]  # fmt: skip
WIDE = [*LARGE, "--model.layers=12", "--train.micro_batch=4", "--mesh.dp_replicate=2"]


def held(config: Config, world: int, device: str = "sm_90") -> Memory:
    found = planned(config, world, device).memory
    assert isinstance(found, Memory), found
    return found


def row(config: Config, world: int, name: str) -> dict[str, float]:
    return held(config, world).rows[name]


def small(*changes: str) -> Config:
    """A config for one rank without tp: 2 blocks of width 256 in bf16, 128 tokens."""
    return load("tiny", [
        "--mesh.tp=1", "--model.layers=2", "--model.hidden=256", "--model.ffn=1024", "--model.heads=4",
        "--model.kv_heads=2", "--model.head_dim=64", "--model.fused=false", "--train.sequence=128",
        "--train.global_batch=1", "--train.micro_batch=1", "--train.checkpointing=none", "--train.compile=false",
        "--recipe=bf16", *changes,
    ])  # fmt: skip


def test_a_step_with_a_sentinel_is_eager_beside_the_graph():
    deterministic = "--train.deterministic=true"
    with_graph, eager = (
        small(deterministic, "--train.sentinel=64", f"--train.cuda_graph={each}") for each in ("auto", "false")
    )
    memory = held(with_graph, 1)
    of_step = {
        m: sum(memory.rows[name][m] for name in ("gradients", "saved activations", "gathered", "at work"))
        for m in MOMENTS
    }
    assert row(with_graph, 1, "sentinel")["update"] == max(of_step.values()) > 0
    assert not any(row(eager, 1, "sentinel").values()) and not any(row(small(deterministic), 1, "sentinel").values())


T, H, F, Q, KV = 128, 256, 1024, 256, 128
NORM = T * H * 2 + T * 4  # x and rstd
SUMS = T * 4 * 4  # attention's log-sum-exp
ATTENTION = 2 * T * (2 * Q + 2 * KV) + SUMS
EAGER = 2 * NORM + 2 * (2 * T * H) + ATTENTION + 2 * T * 4 * F  # gate, silu(gate), up and their product


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ([], EAGER),
        (["--train.compile=true"], EAGER - 2 * T * F),
        (["--train.checkpointing=full"], 2 * T * H),
        (["--train.checkpointing=selective"], 2 * T * (2 * Q + 2 * KV + 3 * H + 2 * F) + SUMS),
        (["--recipe=fp8_current"], EAGER - 2 * T * (2 * H + F) + T * (2 * H + Q + F)),
    ],
    ids=["eager", "compiled", "recomputed", "selective", "fp8"],
)
def test_what_a_block_saves(changes, block):
    """The expected bytes are sums over norms, the x of each linear, attention and the MLP."""
    found = row(small(*changes), 1, "saved activations")["first block"]
    tables = 2 * 4 * T * 64 * 2  # rotary tables in bf16 for q and k; the estimate may include them
    assert block <= found <= block + tables


def test_what_stays_is_cut_by_every_axis():
    whole, cut = (held(load("llama3_1b", ["--mesh.tp=2", *mesh]), world)
                  for mesh, world in (([], 2), (["--train.micro_batch=1"], 8)))  # fmt: skip
    for name in ("parameters", "optimizer"):
        assert whole.rows[name]["loss"] == pytest.approx(4 * cut.rows[name]["loss"], rel=0.01)
    parameters = planned(load("llama3_1b"), 2, "sm_90").plan.parameters
    assert whole.rows["parameters"]["loss"] == 4 * parameters and whole.rows["optimizer"]["loss"] == 8 * parameters


def test_slots_are_planned_where_memory_is_mapped():
    """The plan has buffers in symmetric memory for the transfers of both sequence-parallel styles (tokens x 2048, in
    bf16 and in codes), and for agreements on up to 65,536 amaxes. Each size is rounded up to 2 MiB, including the
    header."""
    serial = "--groups.default.overlap=serial", "--groups.edges.overlap=serial"
    one = "--train.micro_batch=1"
    assert not any(row(load("llama3_1b", ["--mesh.transport=nccl"]), 2, "symmetric memory").values())
    mapped = row(load("llama3_1b", [one, *serial]), 2, "symmetric memory")
    granule = 2 << 20
    slots = 2 * 2 * ((1 + 1 / 2 + 1 / 4) * 4096 * 2048 * 2 + 3 * granule) + granule
    assert set(mapped.values()) == {slots}
    pieces = [one, *serial, "--groups.default.overlap=chunked:4"]
    assert set(row(load("llama3_1b", pieces), 2, "symmetric memory").values()) == {slots + 2 * 3 * granule}, (
        "three more granules for each of column and row"
    )


def test_without_cached_weights_no_operand_stays():
    assert not any(row(load("llama3_1b", ["--train.weight_cache=forward"]), 2, "cached operands").values())


def test_a_plan_says_what_a_rank_holds():
    lines = plan_text(load("tiny"), 8, "sm_90").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("memory: each rank needs "))
    assert lines[at + 2].split() == ["what", *" ".join(MOMENTS).split()]
    assert lines[at + 4].startswith("parameters") and any(line.startswith("together") for line in lines[at:])


def test_what_cannot_fit_is_refused_with_what_would_help(monkeypatch):
    found = []
    monkeypatch.setattr(memory_check, "remedies", lambda *given: found.append(remedies(*given)) or found[-1])
    monkeypatch.setattr(process_exit, "leave", sys.exit)
    code, out, error = command("launch.train", "llama3_1b", *WIDE, "--plan", "--world", "8", "--device", "h100")
    assert code == 1 and not out and error.count("\n") == 1
    assert (
        error.startswith("llama3_1b.toml: each of 8 ranks needs ")
        and " of tensors at once, and 78.1 GB of the" in error
    )
    (helping,) = found
    assert len(helping) == 3 and all(setting in error for _, setting in helping)
    saves, setting = helping[0]
    changed = load("llama3_1b", [*WIDE, *setting.split()])
    assert held(load("llama3_1b", WIDE), 8, "h100").peak - held(changed, 8, "h100").peak == saves > 0


def test_a_run_warns_of_a_step_that_needs_more_memory_than_the_gpu_has(monkeypatch):
    config, said = load("llama3_1b", WIDE), []
    mesh = SimpleNamespace(size=lambda: 8, device_type="cuda")
    built, run = SimpleNamespace(plan=planned(config, 8, "h100").plan), SimpleNamespace(say=said.append)
    for name in ("NVIDIA H100 80GB HBM3", "an unknown GPU"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        train.predict_here(config, built, mesh, run)
    warning, _, unknown = said
    assert warning.startswith("WARNING: each of 8 ranks needs ") and "most would help --train." in warning
    assert unknown.startswith("time: not predicted: ")


@pytest.mark.slow
def test_the_first_remedy_for_a_config_that_saves_memory_already():
    """The config already recomputes blocks. It has one sequence per microbatch, 8-bit optimizer states, weights that
    are cast at each use, and the largest tp that the heads allow. The first of the suggested settings is an
    optimizer with 4-bit states."""
    config = load("llama3_70b", ["--model.layers=8"])
    plan = planned(config, 8, "h100").plan
    saves, setting = remedies(config, 8, "h100", plan)[0]
    assert setting == "--train.optimizer adamw4bit"
    assert saves == pytest.approx(plan.parameters * (2.03 - 1.06), rel=0.02)


FIT = [(name, world) for name in ("llama3_70b", "llama3_8b", "llama3_1b", "qwen3_8b") for world in (8, 64)]


@pytest.mark.parametrize(("name", "world"), [each if each == ("llama3_8b", 8) else nightly(*each) for each in FIT])
def test_large_models_fit_their_mesh_and_are_planned_in_seconds(name, world):
    began = time.process_time()
    text = plan_text(load(name), world, "h200")  # raises for configs that do not fit
    assert "together" in text and time.process_time() - began < 10


def test_the_plan_has_the_memory_of_the_recipes_that_need_most():
    long = ["--train.sequence=2048", "--train.steps=8"]  # saved activations outweigh cached operands
    fp8, bf16 = (held(small(*long, f"--recipe={recipe}"), 1) for recipe in ("fp8_current", "bf16"))
    assert bf16.peak > fp8.peak and "after step" not in bf16.describe()[0]
    for later in ("", ", {at_step = 6, recipe = 'fp8_current'}"):
        swap = ["--groups.default.swap", f"[{{at_step = 0.5, recipe = 'bf16'}}{later}]"]
        changed = held(small(*long, "--recipe=fp8_current", *swap), 1)
        assert changed.rows == bf16.rows
        assert changed.describe()[0].endswith("with the recipes after step 4")


def test_a_format_that_does_not_say_its_size_is_no_reason_not_to_plan(monkeypatch):
    config = small()
    monkeypatch.setattr("launch.estimate.memory.saved_by", lambda *given: 1 / 0)
    text = plan_text(config, 1, "sm_90")
    assert "memory: the bytes of a step in memory cannot be predicted: division by zero" in text
    with pytest.raises(ValueError, match="to skip the memory check, pass --device sm_90"):
        plan_text(replace(config), 1, "h200")
