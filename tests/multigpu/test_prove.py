"""`dlp.prove`: no alarm without a fault, planted faults named by layer, tensor and kind, and what bounds and reports say."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from dlp.proof import run
from dlp.proof.cases import MeshCase
from dlp.proof.report import MeshResult
from tests import planted
from tests import pool as worker
from tests.planted import BATCH, FAULTS, MODELS, STEPS, Fault, built, loss, tokens

MESHES = {
    2: ("tp2", "tp2+sp", "dp2", "accumulate2", "tp2+sp+accumulate2"),
    4: ("tp2xdp2", "hsdp2x2", "tp2xdp2+sp+accumulate2"),
}


def program(kind: str, fault: Fault | None = None, stack: ExitStack | None = None) -> run.Program:
    build = partial(built, kind=kind, plant=None if fault is None else fault.plant, stack=stack)
    return run.Program(build, tokens, loss, STEPS, False, "mean", worker.device().type)


def results(kind: str, meshes: tuple[str, ...]) -> list[MeshResult]:
    """In a worker: the meshes without a fault."""
    bounds = run.Bounds(run.one_rank(program(kind)))
    return [run.on_mesh(program(kind), bounds, MeshCase.parse(name)) for name in meshes]


def found(kind: str, names: list[str]) -> list[MeshResult]:
    """In a worker: the faults of these names, one by one, in one model."""
    bounds = run.Bounds(run.one_rank(program(kind)))
    every = []
    for fault in (fault for fault in FAULTS if fault.name in names):
        with ExitStack() as stack:
            every.append(run.on_mesh(program(kind, fault, stack), bounds, MeshCase.parse(fault.mesh)))
    return every


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_no_alarm_without_a_fault(ranks, kind, world):
    for result in ranks(world).run(results, kind, MESHES[world])[0]:
        assert result.ok, run.Report(STEPS, False, [result])
        assert result.equal > 0.4 * result.compared > 0
