"""Calibration: scales that are equal on two ranks, scales of outputs and of siblings, statistics, and observers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from dlp.flows import calibrate
from dlp.parallel.model.session import session_of
from dlp.quant.fp8 import DelayedScaling
from tests import pool as worker
from tests.net import Net, batch, gradients, net

MESHES = {"tp": {"tp": 2}, "dp": {"dp_shard": 2}}
OBSERVERS: dict[str, Any] = {"max": "max", "average": "average", "mse": "mse", "callable": partial(torch.amin, dim=0)}
DOWN = "blocks.1.down"


def x_of_first(step: int) -> Tensor:
    """Return x of gate and up in the first block, for the batch of all ranks in a step."""
    return nn.LayerNorm(64).to(worker.device())(batch(step, worker.mesh(tp=2))[0])


def scales(model: Net, observer: Any, steps: int = 3) -> dict[str, float]:
    with torch.no_grad(), dlp.calibrate(model, "**", observer) as linears:
        for step in range(steps):
            model(batch(step, model.mesh)[0])
    return {name: layer.x_scale.item() for name, layer in linears.items()}


@torch.no_grad()
def observed() -> dict[str, dict[str, dict[str, float]]]:
    """Return the scale of each linear, by mesh and observer; under the key "x", the scale that each observer except mse
    should choose for x of the first block, computed from the amaxes of three steps."""
    found: dict[str, Any] = {}
    for mesh, sizes in MESHES.items():
        model = net("bf16", worker.mesh(**sizes))
        model.mesh = worker.mesh(**sizes)
        found[mesh] = {name: scales(model, observer) for name, observer in OBSERVERS.items()}
    amaxes = torch.stack([x_of_first(step).abs().amax() for step in range(3)])
    wanted = {"max": amaxes.amax(), "average": amaxes.mean(), "callable": amaxes.amin()}
    found["x"] = {name: 448 / amax.item() for name, amax in wanted.items()}
    return found


@pytest.mark.ranks(2)
def test_ranks_agree_on_what_each_observer_finds(ranks):
    first, second = ranks(2).run(observed)
    assert first == second, "scales differ between ranks"
    for observer, expected in first["x"].items():
        for mesh in MESHES:
            assert first[mesh][observer]["blocks.0.gate"] == pytest.approx(expected), (mesh, observer)
        assert first["tp"][observer] == pytest.approx(first["dp"][observer], rel=1e-4), "meshes differ"
    for mesh in MESHES:
        largest, best = first[mesh]["max"], first[mesh]["mse"]
        assert all(largest[name] <= best[name] <= 2 * largest[name] for name in largest)
        assert best != largest, "the smallest mean squared error needs clipping in some layer"


def delayed(role: str) -> DelayedScaling:
    return DelayedScaling()


def of_results() -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Run one calibration step. Return (found, wanted, stats): the calibrated scales, the scales computed from the amaxes
    of y, and the statistics of the step."""
    mesh = worker.mesh(tp=2)
    model = net(dlp.CustomRecipe(delayed, name="all delayed"), mesh)
    dlp.record_stats(model, "**")
    amaxes: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("gate", "up", "down")):
            module.register_forward_hook(
                lambda _, inputs, y, name=name: amaxes.update({f"{name}.y": y.detach().abs().amax()})
            )
    with dlp.autocast(enabled=False, calibrating=True):
        gradients(model, *batch(0, mesh))
    dlp.end_step(model)
    for amax in amaxes.values():
        dist.all_reduce(amax, dist.ReduceOp.MAX)
    table = session_of(model).scaling.table.state_dict()
    wanted = {name: 448 / amax.item() for name, amax in amaxes.items()}
    return {name: slot["scale"].item() for name, slot in table.items()}, wanted, dlp.read_stats(model)


@pytest.mark.ranks(2)
def test_results_and_siblings_are_calibrated(ranks):
    found, wanted, stats = ranks(2).run(of_results)[0]
    assert {f"blocks.{i}.{name}.y" for i in (0, 1) for name in ("gate", "up", "down")} == wanted.keys()
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert {f"blocks.{i}.{name}.dx" for i in (0, 1) for name in ("gate", "down")} <= found.keys()
    assert [name for name, scale in found.items() if scale == 1.0] == [], "tensors without a recorded amax"
    assert 448 / stats[f"{DOWN}.x"]["amax"] == pytest.approx(found[f"{DOWN}.x"])
    assert stats[f"{DOWN}.x"]["sqnr_db"] is None, "nothing is cast"


@torch.no_grad()
def of_static() -> list[dict[str, Any]]:
    """Return three statistics: of the calibration step, of the frozen model on the same batch, and of the frozen model
    on larger inputs, which saturate."""
    mesh = worker.mesh(tp=2)
    model, found = net("bf16", mesh), []
    model.mesh = mesh
    dlp.record_stats(model, "**")
    scales(model, "max", 1)
    dlp.end_step(model)
    found.append(dlp.read_stats(model))
    dlp.freeze(model, "**", "fp8_current", "static")
    for factor in (1, 3):
        for block in model.blocks:
            block.norm.weight.mul_(factor)
        model(batch(0, mesh)[0])
        dlp.end_step(model)
        found.append(dlp.read_stats(model))
    return found


@pytest.mark.ranks(2)
def test_statistics_show_what_static_scales_cut_off(ranks):
    calibrating, same, larger = (stats[f"{DOWN}.x"] for stats in ranks(2).run(of_static)[0])
    assert calibrating["sqnr_db"] is None and calibrating["amax"] == pytest.approx(same["amax"], rel=0.1)
    assert same["saturation"] < 1e-3 and same["sqnr_db"] > 25
    assert same["scale_inv"] == larger["scale_inv"] == pytest.approx(calibrating["amax"] / 448)
    assert larger["saturation"] > 0.01 and larger["sqnr_db"] < same["sqnr_db"]


def test_scale_and_range_are_of_the_same_last_batches(monkeypatch):
    """BATCHES is 2, so the first of three batches, which has the largest values, affects neither the scale nor the range."""
    monkeypatch.setattr(calibrate, "BATCHES", 2)
    model = nn.Sequential(nn.Linear(8, 8))
    for observer in ("max", "minmax", "average", "callable"):
        with torch.no_grad(), dlp.calibrate(model, "**", OBSERVERS.get(observer, observer)):
            for largest in (9.0, 2.0, 3.0):
                model(torch.tensor([[largest, -1.0, *[0.5] * 6]]))
        amax = {"max": 3.0, "minmax": 3.0, "average": 2.5, "callable": 2.0}[observer]
        assert model[0].x_scale == torch.tensor(448.0) / torch.tensor(amax), observer
        assert model[0].x_range.tolist() == [-1.0 if observer == "minmax" else -amax, amax]


def test_scales_are_fp32_whatever_an_observer_returns_and_none_is_stored_after_an_error():
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad(), dlp.calibrate(model, "**", lambda window: window.double().amax(0)):
        model(torch.ones(1, 8))
    assert model[0].x_scale.dtype == model[0].x_range.dtype == torch.float32

    def only_of_x(window: Tensor) -> Tensor:
        return window.amax(0) if float(window.max()) == 1 else window.amax(0) * torch.nan

    fresh = nn.Sequential(nn.Linear(8, 8))
    nn.init.constant_(fresh[0].weight, 1.0)
    with pytest.raises(ValueError, match="an amax of nan for 0"), torch.no_grad():
        with dlp.calibrate(fresh, "**", only_of_x, tensors=("x", "y")):
            fresh(torch.ones(1, 8))
    assert not dict(fresh.named_buffers())
