"""Ranks that share scales have equal scales: a layer agrees on all amaxes in one reduction, `check_scales` compares
scales (also before checkpoints), and an agreement over the wrong group is detected. 2 and 4 ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import dlp
from dlp.comm import observer
from dlp.comm.mesh import ParallelDims
from dlp.parallel import casts
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests.refusals import may_raise

HIDDEN, TOKENS = 64, 128


def model(recipe: Any, *, sizes: dict[str, int], amax_group: Any = "auto") -> tuple[nn.Module, Any]:
    """Return an attached model of two sequence-parallel layers, COLUMN_SP and ROW_SP, and its mesh."""
    mesh = worker.mesh(**sizes)
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(HIDDEN, 128), nn.ReLU(), nn.Linear(128, HIDDEN)).to(worker.device())
    groups = [
        dlp.LayerGroup("up", "0", style="column", sequence_parallel=True, recipe=recipe),
        dlp.LayerGroup("down", "2", style="row", sequence_parallel=True, recipe=recipe),
    ]
    dlp.convert(made, groups, mesh, batch=(1, TOKENS), amax_group=amax_group)
    dlp.attach(made, torch.optim.SGD(made.parameters(), lr=0.1))
    return made, mesh


def step(made: nn.Module, mesh: Any) -> None:
    """Run a forward and backward in which the tokens of ranks have very different magnitudes."""
    tp = mesh["tp"]
    x = torch.randn(TOKENS // tp.size(), HIDDEN, device=worker.device()) * 4 ** tp.get_local_rank()
    made(x.requires_grad_()).square().mean().backward()


def watched(recipe: str, forget: bool) -> str:
    made, mesh = model(recipe, sizes={"tp": 2})
    own = patch.object(casts, "agree", lambda observed, group: list(observed)) if forget else nullcontext()

    def two_steps() -> None:
        with own, dlp.watch_scales(made):
            step(made, mesh)
            step(made, mesh)

    return may_raise(RuntimeError, two_steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "where"), [("fp8_current", "0 fprop"), ("fp8_rowwise", "2 wgrad"), ("nvfp4", "0 fprop")]
)
def test_a_forgotten_agreement_is_noticed_where_the_operand_is_gathered(ranks, recipe, where):
    assert ranks(2).run(watched, recipe, False) == ["", ""]
    first, second = ranks(2).run(watched, recipe, True)
    assert first == second
    assert f"scales differ between ranks that must share them, first {where} " in first


def wrong_group() -> str:
    """Let the layers agree over dp_shard instead of tp; return the error of `watch_scales`."""
    made, mesh = model("fp8_current", sizes={"tp": 2, "dp_shard": 2})
    agree, wrong = casts.agree, mesh["dp_shard"].get_group()
    try:
        with patch.object(casts, "agree", lambda observed, group: agree(observed, wrong)), dlp.watch_scales(made):
            step(made, mesh)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.ranks(4)
def test_a_wrong_group_is_noticed(ranks):
    assert all("the amax group lacks ranks" in message for message in ranks(4).run(wrong_group))


def kept(recipe: Any, amax_group: str, spoil: bool) -> tuple[int, str]:
    """Run two steps and check_scales. Return (number of compared scales, ""), or (0, error message) if check_scales raises;
    dlp.state_dict must then raise, too. `spoil`: change the scales of rank 1."""
    made, mesh = model(recipe, sizes={"tp": 2}, amax_group=amax_group)
    step(made, mesh)
    dlp.end_step(made)
    step(made, mesh)
    runtime = session_of(made)
    if spoil and mesh["tp"].get_local_rank() == 1:
        scales = [runtime.scaling.table.scale] if runtime.has_slots() else runtime.cores[0].weights.parts.parts[1:2]
        for scale in scales:
            scale.mul_(2)
    try:
        count = dlp.check_scales(made)
        dlp.state_dict(made)
        return count, ""
    except RuntimeError as error:
        with pytest.raises(RuntimeError):
            dlp.state_dict(made)
        return 0, str(error)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "group", "count"), [("fp8_delayed", "auto", 6), ("fp8_current", "world", 4), ("mxfp8", "auto", 0)]
)
def test_kept_scales_are_compared_at_checkpoints(ranks, recipe, group, count):
    assert ranks(2).run(kept, recipe, group, False) == [(count, "")] * 2
    if count:
        (_, first), (_, second) = ranks(2).run(kept, recipe, group, True)
        assert first == second and "scales differ between ranks that must share them, first 0." in first


def kept_over_shards(recipe: str, spoil: bool) -> tuple[int, str]:
    """Run check_scales for a weight that FSDP gathers. Return (number of compared scales, ""), or (0, error message).
    `spoil`: rank 1 has other scales."""
    mesh = worker.mesh(dp_shard=2)
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(HIDDEN, 128, bias=False)).to(worker.device())
    dlp.convert(made, [dlp.LayerGroup("all", "0", recipe=recipe)], mesh)
    dlp.fully_shard(made, mesh=mesh)
    dlp.attach(made, torch.optim.SGD(made.parameters(), lr=0.1))
    dlp.end_step(made)
    (weight,) = session_of(made).weights()
    if spoil and mesh["dp_shard"].get_local_rank() == 1:
        for operand in weight.own.values():
            operand.parts[-1].mul_(2)
    try:
        return dlp.check_scales(made), ""
    except RuntimeError as error:
        return 0, str(error)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "count"), [("fp8_current", 1), ("nvfp4", 1), ("mxfp8", 0)])
def test_scales_of_shards_that_are_gathered_are_compared(ranks, recipe, count):
    assert ranks(2).run(kept_over_shards, recipe, False) == [(count, "")] * 2
    if count:
        (_, first), (_, second) = ranks(2).run(kept_over_shards, recipe, True)
        assert first == second and "scales differ between ranks that must share them, first 0.w " in first


def agreements(recipe: str) -> dict[str, int]:
    """Return the number of launches of amax agreements in one forward and backward, by layer."""
    made, mesh = model(recipe, sizes={"tp": 2})
    step(made, mesh)
    with observer.Observer(ParallelDims.from_mesh(mesh).group_names()) as seen:
        step(made, mesh)
    return {key.layer: n for key, n in seen.launches.items() if key.purpose == "amax"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "nvfp4"])
def test_all_that_a_layer_observes_is_agreed_at_once(ranks, recipe):
    """Both amaxes of NVFP4, and the amax vectors of rowwise FP8, are sent together: once for x of the first layer, and
    once for dy of the second."""
    assert ranks(2).run(agreements, recipe) == [{"0": 1, "2": 1}] * 2
