"""`dlp.prove` without ranks: names of meshes, shards of tensors, bounds, reports, and shrunk configs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dlp
from dlp.proof.bounds import Gemm, allowed, cast_variance, is_computed, is_weight, measure
from dlp.proof.cases import MeshCase, Place, tokens_of
from dlp.proof.diagnose import KINDS, Guess
from dlp.proof.record import Key
from dlp.proof.report import Finding, MeshResult, Report, places
from dlp.quant import recipe as recipes
from launch import prove
from launch.config.run_config import load
from tests.cases import RECIPES
from tests.pool import start_forked


def test_meshes_have_names():
    assert MeshCase.parse("tp2xdp4+sp+accumulate3") == MeshCase("tp2xdp4+sp+accumulate3", 1, 4, 2, True, 3)
    assert MeshCase.parse("hsdp2x3xtp4").ranks == 24
    assert MeshCase.parse("cp2xtp2+sp") == MeshCase("cp2xtp2+sp", tp=2, sequence_parallel=True, cp=2)
    assert MeshCase.parse("cp3xdp2").ranks == 6
    for wrong in ("", "tp", "tp2x", "tp2tp4", "tp2xtp4", "tp0", "ep2", "tp2 sp"):
        with pytest.raises(ValueError, match="expected tpN"):
            MeshCase.parse(wrong)


def test_a_rank_has_its_part_of_a_tensor():
    case = MeshCase("", dp_shard=2, tp=2, accumulate=2)
    x = torch.arange(8 * 3 * 4.0).view(8, 3, 4)  # [B, S, F]
    place = Place(case, tp=1, dp=1).at(0)
    mine = x[2:4]  # the rows of data-parallel rank 1
    assert torch.equal(place.part(x, torch.Size([2, 3, 4])), mine)
    assert torch.equal(place.part(x, torch.Size([2, 3, 2])), mine[..., 2:])
    assert torch.equal(place.part(x, torch.Size([3, 4])), mine.reshape(6, 4)[3:])
    assert torch.equal(place.part(x, torch.Size([6, 2])), mine.reshape(6, 4)[:, 2:])
    assert place.part(x, torch.Size([5, 4])) is None


@pytest.mark.parametrize("flat", [False, True], ids=["sequences", "tokens"])
def test_a_rank_of_cp_has_its_chunks_of_each_sequence(flat: bool):
    """Rank 1 of cp = 2 has chunks 1 and 2 of the four chunks of a sequence. The tokens or the features of
    these two chunks are sharded over tp."""
    case = MeshCase("", dp_shard=2, cp=2, tp=2, sequences=4)
    x = torch.arange(4 * 8 * 4.0).view(4, 8, 4)  # [B, S, F]
    place = Place(case, tp=1, dp=1, cp=1).at(0)
    mine, given = x[2:4, 2:6], x.flatten(0, 1) if flat else x
    assert place.name == "tp rank 1, cp rank 1, dp rank 1" and place.shard == 3
    for shape, expected in {
        (8, 4): mine.reshape(8, 4), (8, 2): mine.reshape(8, 4)[:, 2:], (4, 4): mine.reshape(8, 4)[4:],
    }.items():  # fmt: skip
        part = place.part(given, torch.Size(shape))
        assert part is not None and torch.equal(part, expected)
    assert place.part(given, torch.Size([6, 4])) is None
    outer = Place(case, tp=0, dp=0, cp=0).at(0)
    tokens = torch.arange(32).view(4, 8)
    assert torch.equal(outer.part(tokens, torch.Size([2, 4])), tokens[:2, [0, 1, 6, 7]])  # type: ignore[arg-type]
    assert tokens_of(case, 32, 1, 1, 1).tolist() == tokens[2:4, 2:6].flatten().tolist()[4:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_variance_of_a_cast_bounds_its_error(recipe):
    """The mean squared error of a cast is at most 1.1 times the estimated variance (compared for formats without a
    transform, delayed scales and clipping). The variance is below 0.06 of the mean square of the values, so that a sum
    without half of its terms (0.5 of the mean square) exceeds the bound for two casts."""
    for operand in ("x", "w", "dy"):
        quantizer = getattr(recipes.load(recipe), operand).rowwise
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(256, 256, generator=generator)
        variance = cast_variance(values, quantizer)
        if variance is None:
            continue
        fmt = quantizer.format
        if not fmt.basis and dlp.proof.bounds.caps_of(quantizer).slot is None and not fmt.clips:
            at = dlp.testing._cast(quantizer, values)
            found = (at.dequantize(torch.float32) - values).square().mean()
            assert found <= 1.1 * variance.mean(), (recipe, operand)
        assert variance.mean() < 0.06 * values.square().mean()


@pytest.mark.parametrize("tensor", ["x", "x1", "y", "y12", "dx", "dx1", "dy", "dw", "db"])
def test_further_inputs_and_outputs_are_computed_too(tensor):
    assert is_computed(Key(0, "up", tensor)) and not is_weight(Key(0, "up", tensor))
    assert is_weight(Key(0, "up", "w")) and is_weight(Key(0, "up", "x_proj"))


def test_a_difference_is_measured_where_it_is():
    a, b = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), torch.ones(16, 32)
    c = Gemm(a, b).product()
    var = torch.full_like(c, 1e-4)
    noisy = c + 0.01 * torch.randn(c.shape, generator=torch.Generator().manual_seed(1))
    assert 0.3 < measure(noisy, c, var).ratio <= 1
    assert measure(c.clone(), c, var).equal
    noisy[5] += 0.05
    found = measure(noisy, c, var)
    assert found.rows == [5] and found.ratio > 1
    noisy[7, 3] = torch.nan
    assert measure(noisy, c, var).ratio == float("inf")
    assert allowed(1) == 8


def test_a_report_is_a_table_and_a_sentence():
    good = MeshResult("dp2", 2, 10, 5, 0.5, Key(0, "a", "y"))
    assert "PROVED: dp2 computes what one rank computes." in str(Report(2, False, [good]))
    assert str(Report(1, True, [good])).startswith("compared with one rank over 1 step, bit for bit")
    finding = Finding(Key(1, "a", "dw"), 3.0, 0.5, (0,), 2, "rows 1-2 of 8", Guess("missing sum", "over tp"))
    bad = MeshResult("tp2", 2, 10, 5, 3.0, finding.key, [finding])
    report = Report(2, False, [good, bad])
    assert not report.ok and report.first is finding and finding.pass_name == "backward"
    assert "FIRST DIFFERENCE on tp2: dw of a in backward of step 1" in report.sentence()
    stopped = Report(2, False, [MeshResult("tp2", 2, error="RuntimeError: no")])
    assert "NOT PROVED" in str(stopped) and not stopped.ok
    assert places([0, 1, 2, 5], 8, "rows") == "rows 0-2, 5 of 8" and places([0, 1], 2, "rows") == "all rows"


def test_a_config_is_shrunk_with_the_same_divisibility():
    config, remarks = prove.provable(load("llama3_70b"), prove.Size())
    model = config.model
    assert (model.layers, model.hidden, model.kv_heads) == (4, 256, 8)
    assert model.heads % model.kv_heads == 0 and model.ffn % 256 == 0 and model.vocab % 16 == 0
    assert not config.train.compile and config.train.optimizer == "adamw"
    assert any("optimizer" in remark for remark in remarks) and any("compile" in remark for remark in remarks)
    with pytest.raises(
        ValueError, match="'tp16': .*tp: expected a divisor of \\[model\\] heads = 8, got 16; choose other meshes"
    ):
        list(prove.fitting(["tp16"], config))
    with pytest.raises(
        ValueError, match="'cp3': .*cp: expected a divisor of half of \\[train\\] sequence = 64, .*, got 3;"
    ):
        list(prove.fitting(["cp3"], config))


def test_a_config_keeps_as_many_blocks_as_its_groups_need():
    """Block 0 and the last four blocks are in bf16, so the model needs six blocks to have one block in nvfp4."""
    config, remarks = prove.provable(load("llama3_8b_nvfp4"), prove.Size())
    assert config.model.layers == 6 and any("layers = 6," in remark for remark in remarks)
    config, _ = prove.provable(load("tiny", ["--groups.edges.match", '["layers.-40:.**"]']), prove.Size(2, 128))
    assert config.model.layers == 2, "no number of blocks would do; the proof says why"


def test_what_cannot_travel_to_ranks_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="Define the functions at the top level"):
        dlp.prove(lambda mesh, case: None, torch.zeros(2), lambda model, batch: None, meshes=["accumulate2"])
    with pytest.raises(ValueError, match="expected mean or sum"):
        dlp.prove(print, torch.zeros(2), print, meshes=["tp2"], reduction="max")


@pytest.mark.parametrize(
    ("mesh", "code"), [(MeshResult("tp2", 2), 0), (MeshResult("tp2", 2, error="ValueError: no"), 1)]
)
def test_the_exit_code_says_whether_every_mesh_is_proved(monkeypatch, capsys, mesh, code):
    monkeypatch.setattr(prove, "prove_config", lambda config, meshes, **_: Report(2, False, [mesh]))
    assert prove.main(["tiny", "--layers", "2", "--width", "128", "--meshes", "tp2"]) == code
    said = capsys.readouterr().out
    assert (
        said.startswith("[model] layers = 2, hidden = 128, ")
        and "vocab = 384: shrunk by --layers and --width\n" in said
    )


@pytest.mark.slow
def test_a_refusal_on_a_started_rank_is_raised_here(monkeypatch):
    """An error of a started rank is raised in the process that started the rank. In this config the layer group
    `edges` matches all layers, so the group `default` has no effect for any number of layers."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_forked)
    edges = ["--groups.edges.match", '["layers.**"]']
    config, _ = prove.provable(load("llama3_1b", edges), prove.Size(2, 128))
    with pytest.raises(ValueError, match="^group 'default' has no effect") as error:
        prove.prove_config(config, ["accumulate2"], steps=1)
    assert "make_plan" in error.value.__notes__[0]


def refused_on_rank_1(mesh: Any, case: Any) -> Any:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has another file")
    return torch.nn.Linear(4, 4)


def nothing(model: Any, batch: Any, mesh: Any) -> Any:
    return model(batch).sum()


@pytest.mark.slow
def test_a_refusal_on_one_rank_is_raised_here(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_forked)
    with pytest.raises(ValueError, match="^rank 1 has another file\n"):
        dlp.prove(refused_on_rank_1, torch.ones(2, 4), nothing, meshes=["dp2"], steps=1)


def test_help_names_meshes_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        prove.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "tpN, dpN, cpN, hsdpNxM, accumulateN and sp, joined by x or +" in said
    assert "The exit code is 0 if all tensors agree, else 1." in said


def test_the_page_shows_the_sentences_and_kinds_of_reports():
    page = " ".join((Path(__file__).parents[1] / "docs" / "prove.md").read_text().split())
    key = Key(0, "model.norm", "dw")
    finding = Finding(key, 2.45e5, 0.73, (0, 1), 2, "all rows, all columns", Guess("missing sum", "over tp"))
    assert Report(2, False, [MeshResult("tp2+sp", 2, findings=[finding])]).sentence() in page
    table = page.partition("| kind | difference |")[2].partition("## How tensors")[0]
    assert not [kind for kind in KINDS if kind not in table]
