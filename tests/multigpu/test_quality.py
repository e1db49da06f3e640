"""The two programs that judge recipes, small: gradient fidelity, and the quality study with its verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlp.quant.gemm import DEVICES
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.recipe import load as load_recipe
from launch import quality_study
from launch.config import load
from launch.gradient_fidelity import (
    JUDGED,
    LIMIT,
    UNITS,
    Fidelity,
    double_scale,
    gradients,
    judged,
    limit_of,
    measure,
    missed,
    rows,
    spoiled,
    swap_nibbles,
    table,
    under,
)
from launch.quality_study import Difference, Study, Verdict, final, main, sources
from tests import training
from tests.cases import RECIPES, matrix

pytestmark = pytest.mark.slow

SMALL = [
    "--model.layers=2", "--model.hidden=64", "--model.ffn=128", "--model.heads=4", "--model.kv_heads=2", "--model.head_dim=16",
    "--train.sequence=64", "--train.global_batch=4", "--train.steps=4", "--train.warmup=0", "--train.eval_batches=1",
    "--checkpoint.every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.shards(tmp_path_factory.mktemp("data"))


def test_every_quantized_recipe_is_judged_and_has_controls():
    assert set(JUDGED) == set(RECIPES) - {"bf16"}
    names = [name for name, _ in rows()]
    slightly = [name for name in JUDGED if f"{name}, w scale off by 1 %" in names]
    assert set(slightly) == set(JUDGED) - {"mxfp8"}, "its scales have powers of two only"
    assert {"nvfp4, nibbles swapped", "nvfp4, dy rounded to nearest", "nvfp4, no Hadamard transform"} < set(names)
    assert len(names) == 2 * len(JUDGED) + len(slightly) + 3


@pytest.mark.parametrize("name", sorted(JUDGED))
def test_a_spoiled_scale_doubles_the_values_of_dy_and_of_nothing_else(name):
    recipe = load_recipe(name, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))
    wrong, x = spoiled(recipe, double_scale(recipe), ("dy",)), matrix("gauss", 128, 128, 1)
    slot = ScaleSlot(torch.tensor(4.0), torch.zeros(()))
    for quantizer, factor in ((wrong.dy.rowwise, 2), (wrong.dy.columnwise, 2), (wrong.x.rowwise, 1)):
        plain = getattr(quantizer, "inner", quantizer)
        made, expected = (each.cast(x, each.observe(x), slot=slot) for each in (quantizer, plain))
        assert torch.equal(made.dequantize(), factor * expected.dequantize())


def test_swapped_nibbles_swap_neighbours():
    quantizer, x = load_recipe("nvfp4").x.rowwise, matrix("gauss", 16, 32, 1)
    made = quantizer.cast(x, quantizer.observe(x))
    swapped = swap_nibbles(made).dequantize().view(16, 16, 2).flip(-1).reshape(16, 32)
    assert torch.equal(swapped, made.dequantize())


def test_what_must_not_part_and_what_must_is_said():
    good = Fidelity("mxfp8", 0, 0.05, 1, 1, (0, "a"), 0.9 * LIMIT)
    noticed = Fidelity("nvfp4, nibbles swapped", 0, 0.2, 1, 1, (0.3, "model.layers.0.a"), 0.5)
    assert missed([good, noticed]) == []
    bad = [Fidelity("mxfp8", 0, 0.05, 1, 1, (0, "a"), apart) for apart in (0.03, math.nan)]
    assert missed(bad)[0] == "mxfp8: 3.00% of the error apart from the fake quantization, more than 2%"
    assert len(missed(bad)) == 2, "a NaN is not below the limit"
    blind = [Fidelity("nvfp4, nibbles swapped", 0, 0.1, 1, 1, (0, "a"), apart) for apart in (0.01, math.nan)]
    assert missed(blind)[0].endswith("1.00% of the error apart from the fake quantization: it was not noticed")
    assert len(missed(blind)) == 2
    line = "| nvfp4, nibbles swapped | +0.000% | 20.0% | 30.0% layers.0.a | 1.0000 | 1.000 | 50.00% |"
    assert table([noticed]).splitlines()[-1] == line


def test_products_of_a_gpus_units_may_part_more():
    kinds = {device: {name for name in JUDGED if limit_of(load_recipe(name), device) == UNITS} for device in DEVICES}
    torchs = {"fp8_current", "fp8_delayed", "fp8_rowwise", "int8"}
    assert kinds == {"cpu": set(), "cuda": torchs, "sm_90": {*torchs, "fp8_block"}, "sm_100": set(JUDGED)}
    row = Fidelity("fp8_current", 0, 0.05, 1, 1, (0, "a"), 0.126, UNITS)
    assert missed([row]) == [] and len(missed([replace(row, apart=0.21), replace(row, name="fp8_current, x")])) == 2


def judge(path: Path, data: Path) -> list[Fidelity]:
    sizes = ["--mesh.tp=1", "--model.layers=1", "--train.global_batch=4", "--train.dtype=fp32"]
    config = training.config(path, data, *sizes, "--recipe=bf16", "--checkpoint.resume=none")
    trainer, _ = training.trainer(config)
    reference, again = under(trainer, "bf16", 1), gradients(trainer, 1)
    assert again[0] == reference[0] and all(torch.equal(again[1][name], g) for name, g in reference[1].items())
    return list(judged(trainer, 1))


@pytest.mark.ranks(1)
def test_every_recipe_has_the_gradients_of_its_definition_and_no_control_has(ranks, tmp_path, data):
    (found,) = ranks(1).run(judge, tmp_path, data)
    assert missed(found) == [] and len(found) == len(list(rows()))
    assert all(row.apart > 4 * LIMIT for row in found if "," in row.name), "far from the limit"


def test_what_cannot_be_judged_is_refused(tmp_path, data, monkeypatch):
    config = training.config(tmp_path, data, "--mesh.tp=1", "--model.fused=true")
    with pytest.raises(ValueError, match=r"fakes linears that read x; set --model.fused=false"):
        measure(config, 1)
    monkeypatch.setattr("launch.gradient_fidelity.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"is judged on one rank; got 2"):
        measure(config, 1)


def finish(study: Study, recipe: str, seed: int, loss: float, steps: int = 10, done: int = 10) -> None:
    """The files of a run."""
    folder = study.run_folder(recipe, seed)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f"[train]\nsteps = {steps}\n")
    lines = [f'{{"step": {step + 1}, "loss": {loss}}}\n' for step in range(done)]
    (folder / "metrics.jsonl").write_text("".join(lines) + f'{{"step": {done}, "validation_loss": {loss}}}\n')


def test_a_difference_counts_only_if_it_is_resolved(tmp_path):
    study = Study(tmp_path, ("bf16", "mxfp8", "nvfp4", "fp8_block"), (0, 1, 2), 1, ())
    (tmp_path / "data.txt").write_text("sha256 0\n")
    for seed in range(3):
        finish(study, "bf16", seed, 2.0)
        finish(study, "mxfp8", seed, 2.0 * (1.002 + 0.001 * seed))
        finish(study, "nvfp4", seed, 2.0 * (1.002 + 0.001 * seed))
        finish(study, "fp8_block", seed, 2.0 * (1 + 0.01 * seed), done=10 if seed < 2 else 8)
    text = quality_study.report(study)
    assert "| mxfp8 | +0.20%, +0.30%, +0.40% | +0.30% | 0.06% | 0.25% | MISSED | +0.30% | 0.06% |" in text
    assert "| nvfp4 | +0.20%, +0.30%, +0.40% | +0.30% | 0.06% | 1.00% | within the bar |" in text
    assert "| fp8_block | +0.00%, +1.00% | +0.50% | 0.50% | 0.25% | not resolved |" in text, "a run is unfinished"


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ((0.0,), "not resolved"),
        ((0.002, 0.001), "within the bar"),
        ((0.004, 0.0), "not resolved"),
        ((0.004, 0.003), "MISSED"),
        ((0.02, 0.01, 0.013), "MISSED"),
        ((0.02, 0.0, 0.013), "not resolved"),
    ],
    ids=["one seed", "small", "wide", "resolved", "wide and far beyond", "too wide"],
)
def test_what_is_far_beyond_the_bar_has_missed_it_however_wide(differences, said):
    assert str(Verdict("mxfp8", Difference(differences), Difference(differences))) == said


def test_the_picture_shows_what_the_table_says(tmp_path):
    study = Study(tmp_path, ("bf16", "mxfp8"), (0, 1), 1, ())
    for seed in range(2):
        finish(study, "bf16", seed, 2.0)
        finish(study, "mxfp8", seed, 2.0 * (1.01 + 0.02 * seed))
    (axes,) = quality_study.draw(study).axes
    mean, _ = axes.lines
    assert mean.get_ydata() == pytest.approx([2.0] * 10) and axes.get_ylim() == pytest.approx((-3, 3))
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().intervaly == pytest.approx([1, 3]), "one standard error of 1 % and 3 %"


@pytest.mark.parametrize("name", quality_study.VARIANTS)
def test_a_variant_differs_from_its_recipe_and_fits_the_config(name, tmp_path):
    study, recipe = Study(tmp_path, (name,), (0,), 1, ()), name.partition("-")[0]
    config = load("quality", study.arguments(name, 0)[1:])
    assert config.groups != load("quality", study.arguments(recipe, 0)[1:]).groups
    none = Difference((0.0,))
    assert Verdict(name, none, none).bar == Verdict(recipe, none, none).bar


@pytest.mark.ranks(1)
def test_a_small_study_runs_resumes_and_reports(ranks, tmp_path, capsys):
    trained: list[str] = []

    def train(number: int, arguments: Sequence[str]) -> int:
        trained.append(
            "-".join(arguments[i + 1] for i, each in enumerate(arguments) if each in ("--recipe", "--train.seed"))
        )
        ranks(1).run(training.run, load(arguments[0], arguments[1:]))
        return 0

    study = [str(tmp_path), "--recipes", "nvfp4", "--seeds", "2", "--megabytes", "0.5", *SMALL]
    assert main([*study, "--only", "nvfp4,1"], train) == 0 and trained == ["nvfp4-1"]
    assert "no bf16 yet" in capsys.readouterr().out
    assert main(study, train) == 0
    assert trained == ["nvfp4-1", "bf16-0", "nvfp4-0", "bf16-1"], "a finished run is not repeated"
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.endswith(text) and "bf16: 2 seeds, loss " in text and "| nvfp4 | " in text
    assert text.startswith("sha256 ") and "torch " in (tmp_path / "data.txt").read_text()
    plan = (tmp_path / "runs" / "nvfp4-0" / "plan.txt").read_text()
    assert plan.count(" nvfp4 ") and "edges (recipe)" in plan, "its last block stays in bf16"
    assert final(tmp_path / "runs" / "bf16-0") is not None
    capsys.readouterr()
    assert main([*study, "--train.steps=6"], lambda number, arguments: 0) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path}/runs/bf16-0: finished with other settings, changed since then: train.steps was 4, now 6; choose another "
        f"folder for this study, or remove the run\n"
    )
    assert main([str(tmp_path / "other"), "--megabytes", "0.1", *SMALL], lambda number, arguments: 3) == 1
    assert "the run ended early, with code 3; the same command resumes it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipes", "nvfp4", "nope"], "argument --recipes: invalid choice: 'nope'"),
        (["--seeds", "0"], "argument --seeds: expected an integer >= 1, got '0'"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_is_made(arguments, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "study"), *arguments, *SMALL], lambda number, arguments: pytest.fail("trained"))
    assert left.value.code == 2 and says in capsys.readouterr().err and not (tmp_path / "study").exists()


def test_the_data_is_a_sample_of_sources_the_same_every_time():
    few = sources(0.5)
    assert list(few) == sorted(few) == list(sources(0.5)) and all(name.endswith(".py") for name in few)
    assert 0.5e6 <= sum(path.stat().st_size for path in few.values()) < 3e6
