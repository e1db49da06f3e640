"""Predicted seconds of a step: the schedule, rates, sums of the parts, comparison with recorded runs, and the ranking
of settings."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from bench.predict import RUNS, compare
from launch import advise, measure
from launch.common.devices import board_of
from launch.config.run_config import load
from launch.estimate.few_blocks import Extended
from launch.estimate.memory_check import planned
from launch.estimate.rates import TABLES, rates_of
from launch.estimate.step_time import HOST, forecast
from launch.estimate.timeline import COMPUTE, DP_LINK, EXPOSED, TP_LINK, Program, schedule
from launch.estimate.timeline_picture import write_timeline
from launch.report import recorder
from launch.train import plan_text
from tests.cases import nightly


def few(name: str, *settings: str, layers: int = 3):
    config = load(name, settings)
    return replace(config, model=replace(config.model, layers=layers))


@cache
def step(name: str, world: int, *settings: str):
    config = few(name, *settings)
    return forecast(config, world, "h200", planned(config, world, "h200"))


def test_a_transfer_is_exposed_only_while_the_compute_lane_waits_for_it():
    program = Program()
    first = program.add("a", "GEMM", 3.0)
    sent = program.add("t", "transfer", 4.0, TP_LINK, (first,))
    program.add("b", "GEMM", 1.0)
    program.add("c", "GEMM", 2.0, waits=(sent,))
    found = schedule(program)
    assert [(span.start, span.end) for span in found.spans] == [(0, 3), (3, 7), (3, 4), (7, 9)]
    assert found.seconds == 9 and found.shares() == {"GEMM": 6.0, EXPOSED: 3.0}
    assert found.transfers() == {TP_LINK: 4.0}


def test_computation_is_slower_while_the_dp_link_is_busy():
    program = Program()
    program.add("gather", "transfer", 2.0, DP_LINK)
    program.add("a", "GEMM", 3.0, COMPUTE)
    assert schedule(program, 0.5).seconds == pytest.approx(5.0)  # two of the GEMM's three seconds take twice as long
    assert schedule(program, 0.0).seconds == 3.0


def test_rates_are_the_measured_ones_at_measured_sizes_and_between_them_else():
    rates, recipe = rates_of("h200"), load("llama3_1b").groups[0]
    found = planned(few("llama3_1b"), 2, "h200").plan.layers[9].recipe
    assert recipe.recipe == found.name == "fp8_current"
    small, between, large = (rates.gemm_rate(found, "fprop", (m, 1536, 2048)) for m in (8192, 11500, 16384))
    assert small == pytest.approx(2 * 8192 * 1536 * 2048 / 44.075e-6)
    assert small < between < large
    with pytest.raises(ValueError, match="has no times of .*, but of .*: choose one of these"):
        rates.gemm_rate(SimpleNamespace(name="other"), "fprop", (1, 1, 1))
    with pytest.raises(ValueError, match="dlp ships those of h100, h200: name one of these"):
        rates_of("b200")


RECORDED = json.loads(RUNS.read_text())


def is_eager(run) -> bool:
    return "--train.cuda_graph" in run["arguments"]


@pytest.mark.parametrize(
    ("fitted", "count", "largest", "mean"), [(True, 5, 0.06, 0.03), nightly(False, 32, 0.14, 0.04)]
)
def test_predictions_of_recorded_runs_are_as_near_as_the_page_says(fitted, count, largest, mean):
    runs = [run for run in RECORDED if run["fitted"] == fitted and not is_eager(run)]
    errors = [abs(compare(run).error) for run in runs]
    assert len(errors) == count
    assert max(errors) < largest and sum(errors) / count < mean, errors


def test_recorded_runs_without_a_graph_took_as_long_as_the_plan_says_for_hosts():
    # The same run was recorded on several hosts, which differ in speed by less than `host_spread`
    ratios = [1 / (1 + compare(run).error) for run in RECORDED if is_eager(run)]
    assert len(ratios) == 7 and all(0.95 < ratio < rates_of("h200").host_spread for ratio in ratios), ratios


@pytest.mark.parametrize(
    "settings",
    [(), ("--mesh.tp", "1"), ("--mesh.tp", "2", "--mesh.dp_replicate", "2"), ("--train.checkpointing", "full")],
    ids=" ".join,
)
def test_shares_sum_to_the_step(settings):
    found = step("llama3_1b", 4, *settings)
    assert sum(found.shares.values()) == pytest.approx(found.seconds)
    assert all(seconds > 0 for seconds in found.shares.values())
    assert 0.2 < found.mfu < 1.0


def test_more_work_takes_longer_and_faster_formats_do_not():
    base = step("llama3_1b", 2)
    assert step("llama3_1b", 2, "--train.checkpointing", "full").seconds > 1.1 * base.seconds
    again = step("llama3_1b", 2, "--train.checkpointing", "selective", "--train.compile", "false")
    assert again.seconds > step("llama3_1b", 2, "--train.compile", "false").seconds
    assert step("llama3_1b", 2, "--recipe", "bf16").seconds > base.seconds
    assert step("llama3_1b", 2, "--mesh.transport", "nccl").seconds > base.seconds
    assert step("llama3_1b", 2, "--train.compile", "false").seconds > base.seconds
    eager = step("llama3_1b", 2, "--train.cuda_graph", "false", "--train.micro_batch", "1")
    assert eager.host > 0 and HOST in dict(eager.costs()) and base.host == 0
    assert eager.slowest == pytest.approx(1.5 * eager.host) and base.slowest == base.seconds
    said = next(line for line in eager.describe() if line.startswith("up to"))
    assert "no CUDA graph hides the host" in said and not any(x.startswith("up to") for x in base.describe())


def test_linears_without_siblings_take_time():
    found = step("llama3_1b", 2, "--groups.default.siblings", "false")
    names = {span.operation.name for span in found.microbatch.spans}
    assert names >= {f"model.layers.1.{linear} {gemm}" for gemm in ("fprop", "dgrad", "wgrad")
                     for linear in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")}  # fmt: skip


def test_the_plan_of_a_board_says_the_time_and_that_of_a_kind_says_how_to_get_it(tmp_path):
    text = plan_text(few("llama3_1b"), 2, "h200", tmp_path / "step.json")
    assert "a step predicted on h200" in text and "links busy: tp" in text
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "attention" and event["dur"] > 0 for event in events)
    assert "time: not predicted: name a board that has a table of rates: --device h100 or h200" in plan_text(
        few("llama3_1b"), 2, "sm_90"
    )
    with pytest.raises(ValueError, match="expected a name that ends in .png"):
        plan_text(few("llama3_1b"), 2, "h200", tmp_path / "step.txt")
    with pytest.raises(ValueError, match="no step time is predicted"):
        write_timeline("a reason", tmp_path / "x.png")


def test_a_picture_is_drawn(tmp_path):
    write_timeline(step("llama3_1b", 4, "--mesh.tp", "1"), tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000


EDGES = '["layers.0.**", "layers.-4:.**", "lm_head"]'


@pytest.mark.parametrize(
    ("name", "world", "settings"),
    [
        ("llama3_1b", 2, []),
        ("llama3_1b", 2, ["--train.checkpointing", "full", "--train.recompute_every", "3"]),
        ("llama3_1b", 2, ["--groups.edges.match", EDGES]),
        ("llama3_1b", 2, ["--groups.edges.match", '["layers.1?.**"]']),
        ("llama3_8b", 8, []),  # reduces gradients in each microbatch; a model of 3 blocks would do so once
    ],
    ids=["ends", "every third recomputed", "four at the end", "a wildcard", "gradients of microbatches"],
)
def test_few_blocks_extend_to_all_exactly(name, world, settings):
    config = load(name, settings)
    whole = planned(config, world, "h100")
    extended = Extended(config, world, "h100")
    assert extended.found[0].load.reductions == whole.load.reductions
    assert extended.peak() == pytest.approx(whole.memory.peak)
    assert extended.seconds()[0] == pytest.approx(forecast(config, world, "h100", whole).seconds, rel=1e-3)


def test_advice_is_ranked_and_names_what_does_not_fit(capsys):
    arguments = ["--train.global_batch", "2", "--train.micro_batch", "1"]
    fit, refused = advise.advise("llama3_1b", arguments, 2, "h200", ["fp8_current", "bf16"])
    assert [each.seconds for each in fit] == sorted(each.seconds for each in fit)
    assert {part for each in fit for part in each.settings} >= {"fp8_current", "bf16"}
    assert all("needs" in each or "expected" in each for each in refused)
    advise.main(["llama3_1b", "--world", "2", "--board", "h200", "--show", "1", *arguments, "--run.dir", "my runs"])
    said = capsys.readouterr().out
    assert "settings fit" in said and "--run.dir 'my runs'" in said and "--plan --world 2 --device h200" in said
    with pytest.raises(ValueError, match="does not fit on 1 x h200 in any of .*: take more GPUs"):
        advise.main(
            ["llama3_70b", "--world", "1", "--board", "h200", "--train.global_batch", "1", "--train.micro_batch", "1"]
        )


def test_a_run_says_once_how_far_its_prediction_is_off(tmp_path, monkeypatch, capsys):
    run = SimpleNamespace(path=tmp_path, leader=True)
    config = load("tiny", ["--train.steps", "30"])
    shown = recorder.Recorder(config, run, torch.device("cpu"), 1)
    shown.predicted = 0.11
    shown.begin(0)
    for i in range(1, 26):
        shown.step(i, loss=1.0, norm=1.0, lr=1.0, seconds=1.0 if i <= 10 else 0.1, split={}, wire_bytes={})
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each for each in found if "prediction" in each] == [
        {"step": 20, "prediction": {"predicted": 0.11, "measured": 0.1, "error": 0.1}}
    ]
    assert "step 20/30: a step takes 100 ms (median of 10), predicted 110 ms (+10.0%)" in capsys.readouterr().out


def test_boards_are_found_by_the_name_of_a_device():
    assert [board_of(name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "Tesla V100")] == ["h200", "h100", ""]


def test_measured_rates_have_the_form_of_a_table():
    found = measure.measure("h200-2.json", "cpu", 1 << 16)
    shipped = json.loads((TABLES / "h200.json").read_text())
    assert found.keys() == shipped.keys()
    assert found["attention"][0].keys() == shipped["attention"][0].keys()
    with pytest.raises(ValueError, match="expected a GPU"):
        measure.main(["--overlap-table", "h200-2.json", "--out", "x.json"])


def test_replicas_of_a_host_contain_the_ranks_of_cp():
    """With tp 1 and cp 2 a host of 8 GPUs has room for 4 shards."""
    options = list(advise.meshes(load("llama3_1b", ["--mesh.cp", "2"]), 32))
    replicated = {each[1]: each[5] for each in options if each[3] != "1"}
    assert replicated == {"1": "4", "2": "2", "4": "1", "8": "1"}, "dp_shard by tp"
