"""Gradient fidelity with a small model: the program that compares the gradients of recipes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gradient_fidelity import (
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
from dlp.quant.gemm import DEVICES
from dlp.quant.quantizer import ScaleSlot
from dlp.quant.recipe import load as load_recipe
from tests import training
from tests.cases import RECIPES, matrix

pytestmark = pytest.mark.slow


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
    assert missed(blind)[0].endswith(
        "1.00% of the error apart from the fake quantization: the control was not detected"
    )
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
    with pytest.raises(ValueError, match=r"this model is fused; set --model.fused=false"):
        measure(config, 1)
    monkeypatch.setattr("bench.gradient_fidelity.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"needs one rank; got 2"):
        measure(config, 1)
