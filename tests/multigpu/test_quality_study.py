"""The quality study with a small model: subjects, trunks and branches, intervals and verdicts, table and plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench.quality_study.__main__ import main, refused
from bench.quality_study.branches import Branch, Slots, Study, read_results, run_study
from bench.quality_study.intervals import LEAST, Interval, correlation, differences, intervals, noise_floor, t_quantile
from bench.quality_study.report import branches_csv, curves, draw, losses_csv, measures, report, rows
from bench.quality_study.sources import sources
from bench.quality_study.subjects import BASELINES, BY_NAME, EIGHT, SUBJECTS
from launch.config.run_config import load
from launch.settings.schema import ConfigError
from tests import training

SMALL = [
    "--model.layers=2", "--model.hidden=64", "--model.ffn=128", "--model.heads=4", "--model.kv_heads=4", "--model.head_dim=16",
    "--train.sequence=64", "--train.global_batch=4", "--train.steps=10", "--train.warmup=1", "--train.eval_batches=1",
]  # fmt: skip
NAMES = [subject.name for subject in BASELINES]


def study(
    folder: Path, *names: str, overrides: Sequence[str] = SMALL, seeds: Sequence[int] = (0,), at: int = 4
) -> Study:
    subjects = tuple(BY_NAME[name] for name in (*NAMES, *names))
    return Study(folder, folder / "branches.jsonl", subjects, tuple(seeds), at, "data", tuple(overrides))


# --- statistics


@pytest.mark.parametrize(
    ("probability", "df", "t"),
    [(0.975, 1, 12.70620), (0.975, 2, 4.302653), (0.975, 30, 2.042272), (0.95, 5, 2.015048), (0.025, 4, -2.776445),
     (0.975, 1e6, 1.959966)],
)  # fmt: skip
def test_t_quantiles_are_those_of_tables(probability, df, t):
    assert t_quantile(probability, df) == pytest.approx(t, rel=1e-5)


@pytest.mark.parametrize("df", [2.5, 10.8])
def test_t_quantiles_invert_the_integral_of_the_density(df):
    t = t_quantile(0.975, df)
    x = np.linspace(0, t, 20001)
    norm = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi * df)
    density = norm * (1 + x**2 / df) ** (-(df + 1) / 2)
    assert float(np.sum(density[1:] + density[:-1]) / 2 * x[1]) == pytest.approx(0.475, rel=1e-6)


def test_an_interval_by_hand():
    losses = {
        "a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 1.0, 1: 2.0, 2: 4.0}, "s": {0: 1.001, 1: 2.004, 2: 4.012},
        "u": {0: 1.0, 1: 2.002}, "alone": {7: 1.0},
    }  # fmt: skip
    off = differences(losses, ("a", "b"))
    assert off["s"] == pytest.approx({0: 0.001, 1: 0.002, 2: 0.003}) and off["alone"] == {}, "another block"
    found = intervals(off, 2)
    variance = (2 * 0.001**2 + 2 * 0.0005**2) / 3  # squared deviations of s from its mean 0.002, and of u from 0.0005
    rho = correlation([{0: -0.001, 1: 0.0, 2: 0.001}, {0: -0.0005, 1: 0.0005}])
    assert rho == pytest.approx(2 * (0.001 * 0.0005) / (2 * 0.001**2 + 2 * 0.0005**2)) and rho > 1 / 3
    assert found.keys() == {"s", "u"}
    assert found["s"].sd == found["u"].sd == pytest.approx(math.sqrt(variance))
    assert found["s"].df == pytest.approx(3 / (1 + rho**2))
    half = t_quantile(0.975, found["s"].df) * math.sqrt(variance / 3)
    assert found["s"].half == pytest.approx(half) and found["u"].half == pytest.approx(half * math.sqrt(3 / 2))
    assert intervals(off, 2, common=True)["s"].df == pytest.approx(3 / 2), "two subjects as if they were one"
    one = intervals({"s": {0: 0.001}}, 2)["s"]
    assert one.half == math.inf and one.verdict(0.01) == "not resolved"


def test_verdicts_are_those_of_the_interval():
    def of(mean: float, half: float, blocks: int = LEAST) -> Interval:
        sd = half * math.sqrt(blocks) / t_quantile(0.975, 9)
        return Interval((mean,) * blocks, sd, 9)

    cases = {(0.0005, 0.0009): "within", (0.0007, 0.0009): "not resolved", (0.003, 0.0016): "not resolved"}
    cases |= {(0.003, 0.0014): "outside", (-0.005, 0.002): "not resolved", (-0.005, 0.0009): "within"}
    for (mean, half), said in cases.items():
        assert of(mean, half).verdict(0.0015, 0.001) == said, (mean, half)
    assert of(-0.005, 0.002).verdict(0.0015) == "within", "no resolution is asked for"
    assert of(0.0, 1e-6, LEAST - 1).verdict(0.0015) == of(1.0, 1e-6, LEAST - 1).verdict(0.0015) == "not resolved"


@pytest.mark.parametrize(("shared", "blocks", "subjects"), [(0.0, 3, 12), (0.0, 4, 4), (2.0, 4, 6)])
def test_how_often_verdicts_are_wrong(shared, blocks, subjects):
    """Each wrong verdict is given to about 2.5 % (1.2 to 4 %) of the subjects exactly at the bar, and to at most 4 % if the
    subjects of a block (a trunk and the branches from it) share noise."""
    draws, sd, bar, tables = np.random.default_rng(0), 0.0005, 0.0015, 400
    wrong, far = {"within": 0, "outside": 0}, {"outside": 0}
    for _ in range(tables):
        noise = draws.normal(0, sd, (subjects + 2, blocks))
        noise[2:] += draws.normal(0, shared * sd, blocks)
        loss = 2 * (1 + draws.normal(0, 0.01, blocks)) * (1 + noise)
        loss[2:] *= 1 + bar
        table = {str(number): dict(enumerate(each)) for number, each in enumerate(loss)}
        for each in intervals(differences(table, ("0", "1")), 2, common=shared > 0).values():
            if (said := each.verdict(bar)) in wrong:
                wrong[said] += 1
            far["outside"] += each.verdict(bar - 6 * sd * max(1, shared)) == "outside"
    count = tables * subjects
    assert all((0.012 if shared == 0 else 0.001) < number / count < 0.04 for number in wrong.values()), wrong
    assert far["outside"] / count > 0.9, "a difference of many standard deviations is found"


def test_two_baselines_are_compared_with_the_noise_of_one_to_one():
    losses = {"a": {0: 1.0, 1: 1.0, 2: 1.0}, "b": {0: 1.001, 1: 0.999, 2: 1.0}}
    pooled = Interval((0.0,) * 3, 0.001, 12)
    floor = noise_floor(losses, ("a", "b"), {"s": pooled})
    assert floor is not None and floor.sd == pytest.approx(0.001 * math.sqrt(2 / 1.5)) and floor.df == 12
    assert floor.differences == pytest.approx((0.001, -0.001, 0.0))
    alone = noise_floor(losses, ("a", "b"), {})
    assert alone is not None and alone.sd == pytest.approx(0.001) and alone.df == 2
    assert noise_floor({"a": losses["a"]}, ("a",), {}) is None


# --- subjects


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_subject_fits_the_config_and_differs_from_the_baseline(subject, tmp_path):
    made = study(tmp_path, overrides=(), at=800)
    config, base = load("quality", made.branch(subject, 0)[1:]), load("quality", made.branch(BASELINES[0], 0)[1:])
    settings = ("groups", "mesh", "train")
    assert (subject is BASELINES[0]) == all(getattr(config, each) == getattr(base, each) for each in settings)
    assert "HALF" not in str(config)
    assert (config.train.steps, config.train.global_batch) == (base.train.steps, base.train.global_batch)


def test_a_tail_begins_at_the_last_18_percent(tmp_path):
    made = study(tmp_path, overrides=(), at=800)
    group = load("quality", made.branch(BY_NAME["nvfp4-forward-tail"], 0)[1:]).groups[0]
    assert group.swaps(1526) == [(1251, {"name": "nvfp4", "high_precision": ["fprop"]})]


def test_what_a_machine_cannot_run_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = {subject.name: reason for subject, reason in refused(SUBJECTS, 1)}
    assert said["wire-fp8"] == "this subject needs 2 GPUs, and this machine has 1"
    assert said["adamw8bit"] == "this subject needs the package torchao, which is not installed" and "nvfp4" not in said
    assert "wire-fp8" not in {subject.name for subject, _ in refused(SUBJECTS, 2)}


def test_a_trunk_has_the_learning_rates_of_branches_or_is_refused(tmp_path):
    study(tmp_path, at=4).check()
    with pytest.raises(ConfigError, match=r"--branch-at 9: the learning rate decays from step 9 on.*got 'wsd'"):
        study(tmp_path, at=9).check()
    with pytest.raises(ConfigError, match=r"decays from step 3 on.*got 'cosine'"):
        study(tmp_path, overrides=[*SMALL, "--train.schedule=cosine"]).check()
    with pytest.raises(ConfigError, match="expected fewer than the 10 steps of a branch"):
        study(tmp_path, at=10).check()


# --- running


def finish(made: Study, run: Path, steps: int, done: int, loss: float = 2.0) -> None:
    """Write the files of a finished run."""
    folder = run / "checkpoints" / f"step-{done}"
    folder.mkdir(parents=True)
    first = made.branch_at + 1 if run != made.trunk_folder(0) else 1
    lines = [json.dumps({"step": step, "loss": loss, "seconds": 0.5}) for step in range(first, done + 1)]
    lines += [json.dumps({"step": done, "validation_loss": loss})]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "env.txt").write_text("python 3\ntorch 2.0\ndevice 0: Board\n")


def test_branches_follow_their_trunk_are_resumed_and_failures_are_told(tmp_path):
    made, ran, fails = study(tmp_path, "mxfp8", seeds=(0, 1)), list[str](), {"mxfp8-0"}

    def train(arguments: Sequence[str], devices: Sequence[int], log: Path) -> int:
        config = load(arguments[0], arguments[1:])
        run = Path(config.run.dir)
        ran.append(run.name)
        if run.name in fails:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("first\nout of memory\n")
            return 1
        if config.checkpoint.resume != "auto":
            assert Path(config.checkpoint.resume).is_dir(), "the trunk's checkpoint is there"
        finish(made, run, config.train.steps, config.train.steps)
        return 0

    (problem,) = run_study(made, Slots(1, 2), 2, train)
    assert problem.startswith(f"{tmp_path}/runs/mxfp8-0: the run ended with code 1: out of memory; see ")
    assert sorted(ran) == sorted(f"{name}-{seed}" for name in ("trunk", *NAMES, "mxfp8") for seed in (0, 1))
    assert len(found := read_results(made.results)) == 5 and found[0].device == "Board" and found[0].step_ms == 500
    assert not (tmp_path / "runs" / "bf16-0" / "checkpoints").exists() and made.trunk_checkpoint(0).is_dir()
    fails.clear()
    ran.clear()
    with made.results.open("a") as file:
        file.write('{"torn')
    assert len(read_results(made.results)) == 5, "a line that a killed run left"
    made.results.write_text(made.results.read_text().removesuffix('{"torn'))
    assert run_study(made, Slots(1, 2), 2, train) == [] and ran == ["mxfp8-0"], "finished branches are not repeated"
    assert len(read_results(made.results)) == 6


def test_a_branch_of_two_ranks_takes_a_place_on_two_gpus():
    slots = Slots(2, 2)
    with slots.take(1) as first, slots.take(2) as both:
        assert first == [0] and sorted(both) == [0, 1]
        with slots.take(1) as third:
            assert third == [1], "the GPU with a free place"


@pytest.mark.ranks(1)
@pytest.mark.slow
def test_a_branch_that_changes_nothing_is_the_run_without_a_branch(ranks, tmp_path, capsys):
    def train(arguments: Sequence[str], devices: Sequence[int], log: Path) -> int:
        ranks(1).run(training.run, load(arguments[0], arguments[1:]))
        return 0

    small = [*SMALL, "--train.steps=6"]
    arguments = [str(tmp_path), "--seeds", "0", "--subjects", "nvfp4", "--branch-at", "3", "--megabytes", "0.5", *small]
    assert main([*arguments, "--side-by-side", "1"], train) == 0
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.endswith(text) and "| nvfp4 | 1 | " in text and "not resolved" in text
    assert {path.name for path in tmp_path.glob("*.*")} >= {
        "branches.jsonl",
        "branches.csv",
        "losses.csv",
        "report.png",
    }
    found = {each.subject: each for each in read_results(tmp_path / "branches.jsonl")}
    whole = load("quality", [*small, "--data.path", str(tmp_path / "data"), "--run.dir", str(tmp_path / "whole"),
                             "--train.seed", "0"])  # fmt: skip
    ranks(1).run(training.run, whole)
    losses = [round(loss, 6) for loss in training.metrics(whole).values()]
    assert found["bf16"].losses == losses[3:], "bit for bit"
    assert found["nvfp4"].losses != losses[3:] and found["nvfp4"].losses[0] == pytest.approx(losses[3], rel=0.01)
    assert main([*arguments, "--train.lr=1e-4", "--side-by-side", "1"], lambda *_: 3) == 1, (
        "other settings: all is run anew"
    )


# --- report


def branch(subject: str, seed: int, loss: float, data: str = "d", **others: object) -> Branch:
    """Return a branch of steps 5 to 14 with equal losses."""
    made = Branch(seed, subject, 4, 14, 11, [loss] * 10, loss, 20.0, 9.0, "Board", "2.11", "2026-11-26", data, "s")
    return replace(made, **others)  # type: ignore[arg-type]


def table(effects: dict[str, float], seeds: int = 4) -> list[Branch]:
    spread = [0.0001, -0.0001, 0.0, 0.0002]
    return [
        branch(name, seed, 2.0 * (1 + 0.01 * seed) * (1 + effect + spread[(seed + place) % 4]))
        for seed in range(seeds)
        for place, (name, effect) in enumerate(effects.items())
    ]


EFFECTS = {"bf16": 0.0, "bf16-again": 0.0, "mxfp8": 0.0002, "planted-nvfp4": 0.003, "fp8_block": 0.0015, "nvfp4": 0.005}


def test_the_table_finds_what_was_planted():
    found = {(row.subject, row.measure): row for row in rows(table(EFFECTS))}
    said = {name: found[name, "end"].verdict for name in EFFECTS if name != "bf16"}
    assert said == {
        "bf16-again": "within", "mxfp8": "within", "planted-nvfp4": "outside", "fp8_block": "not resolved", "nvfp4": "within",
    }  # fmt: skip
    text = report(table(EFFECTS))
    assert "| planted-nvfp4 | 4 | +0.3" in text and text.count(" outside |") == 2
    assert f"steps 5 to 14; means of {round(0.1 * 14)} steps, the learning rate decays after step 11" in text
    few = report(table(EFFECTS, seeds=1))
    assert "| nvfp4 | 1 | +0.49% | +0.49% | +0.80% | not resolved |" in few and not {"nan", "inf"} & set(few.split())


def test_measures_are_means_before_the_decay_and_at_the_end():
    made = branch("mxfp8", 0, 0.0, losses=[float(step) for step in range(5, 15)], steps=20, validation=3.0)
    assert measures(made) == {"end": 13.5, "early": 10.5, "validation": 3.0}, "steps 13, 14; steps 10, 11"


def test_branches_of_other_data_are_not_paired():
    made = table({"bf16": 0.0, "bf16-again": 0.0, "mxfp8": 0.0})
    other = branch("mxfp8", 0, 9.0, data="other")
    assert rows([*made, other]) and report([*made, other]) == report(made).replace("12 branches", "13 branches")


def test_files_hold_every_branch_and_the_plot_every_subject():
    made = table(EFFECTS)
    assert branches_csv(made).count("\n") == 1 + len(made)
    lines = losses_csv(made).splitlines()
    assert lines[0].startswith("step,bf16-0,bf16-1,") and lines[1].startswith("5,2.0002,") and len(lines) == 11
    assert curves(made)["planted-nvfp4"] == pytest.approx([0.003 / (1 + 0.00005)] * 10, abs=2e-4)
    figure = draw(made)
    assert {line.get_label() for axes in figure.axes[::2] for line in axes.lines} >= set(EFFECTS) - {"bf16"}
    assert figure.axes[1].get_xlabel().endswith(f"the bar of {EIGHT.end:.2%}")


def test_results_of_machines_are_merged_unless_settings_differ(tmp_path, capsys):
    made = table(EFFECTS)
    for name, part in (("a", made[:12]), ("b", made[12:]), ("c", [branch("mxfp8", 7, 1.0, settings="other")])):
        (tmp_path / name).write_text("".join(json.dumps(asdict(each)) + "\n" for each in part))
    assert main([str(tmp_path / "out"), "--merge", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == report(made)
    assert main([str(tmp_path / "out"), "--merge", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "branches of different settings cannot be compared: other, s" in capsys.readouterr().err


def test_what_cannot_be_studied_is_refused_before_anything_is_made(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "study"), "--subjects", "nope", *SMALL], lambda *_: pytest.fail("trained"))
    assert left.value.code == 2 and "argument --subjects: invalid choice: 'nope'" in capsys.readouterr().err
    assert main([str(tmp_path / "study"), "--branch-at", "9", *SMALL], lambda *_: pytest.fail("trained")) == 1
    assert not (tmp_path / "study").exists()


@pytest.mark.full  # the test of a complete study also makes the data
def test_the_data_is_a_sample_of_sources_the_same_every_time():
    few = sources(0.5)
    assert list(few) == sorted(few) == list(sources(0.5)) and all(name.endswith(".py") for name in few)
    assert 0.5e6 <= sum(path.stat().st_size for path in few.values()) < 3e6
