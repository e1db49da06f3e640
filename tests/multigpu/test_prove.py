"""`dlp.prove` reports nothing if there is no fault, and names the layer, tensor and kind of each planted fault. Other
tests check its reports on configs and its refusals."""

from __future__ import annotations

import functools
import re
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dlp
from dlp.comm.mesh import ParallelDims
from dlp.parallel.weight.fsdp2 import set_grad_wire
from dlp.proof import cases, run
from dlp.proof.cases import MeshCase
from dlp.proof.report import Finding, MeshResult
from launch import prove as launched
from launch.config.run_config import Config, load
from tests import pool as worker
from tests.cases import nightly
from tests.planted import FAULTS, Fault, built, loss, tokens

pytestmark = pytest.mark.slow

# (kind of model, ranks, meshes). fp8 runs on every mesh of 2 ranks and fp32 on meshes of 4; other kinds (tied weights,
# dropout, delayed scales) run on the axes that affect their features. Without `--all-cases` only fp8 runs, with tp and cp;
# another test has dp.
MESHES = [
    ("fp8", 2, ("tp2+sp+accumulate2", "cp2")),
    nightly("fp8", 2, ("tp2", "tp2+sp", "dp2", "accumulate2")),
    nightly("tied", 2, ("dp2", "tp2+sp+accumulate2")),
    nightly("dropout", 2, ("tp2", "dp2", "tp2+sp+accumulate2")),
    nightly("fp32", 4, ("tp2xdp2", "hsdp2x2", "cp2xtp2+sp", "cp2xdp2")),
    nightly("delayed", 4, ("tp2xdp2+sp+accumulate2",)),
]


@functools.cache
def mesh_of(axes: tuple[str, ...], sizes: tuple[int, ...], device: str) -> DeviceMesh:
    return init_device_mesh(device, sizes, mesh_dim_names=("copies", *axes))[axes]


def cached_mesh(case: MeshCase, device: str) -> DeviceMesh:
    """Replacement for `run.mesh_of` that caches meshes by shape, so that DTensor can reuse its cached sharding of
    operations."""
    sizes = ParallelDims(case.dp_replicate, case.dp_shard, case.tp, case.cp).sizes
    return mesh_of(tuple(sizes), (dist.get_world_size() // case.ranks, *sizes.values()), device)


def program(kind: str, fault: Fault | None = None, stack: ExitStack | None = None, steps: int = 2) -> run.Program:
    build = partial(built, kind=kind, plant=None if fault is None else fault.plant, stack=stack)
    return run.Program(build, tokens, loss, steps, False, "mean", worker.device().type)


def results(kind: str, meshes: tuple[str, ...]) -> list[MeshResult]:
    """Compare each mesh with one rank, without a fault, and return the results. Runs in a worker."""
    with patch.object(run, "mesh_of", cached_mesh):
        bounds = run.Bounds(run.one_rank(program(kind)))
        return [run.on_mesh(program(kind), bounds, MeshCase.parse(name)) for name in meshes]


def found(kind: str, names: list[str]) -> list[MeshResult]:
    """Plant each fault with one of these names in a separate run, and return the results. Runs in a worker."""
    faults = [fault for fault in FAULTS if fault.name in names]
    every = []
    with patch.object(run, "mesh_of", cached_mesh):
        bounds = {
            steps: run.Bounds(run.one_rank(program(kind, steps=steps))) for steps in {fault.steps for fault in faults}
        }
        for fault in faults:
            with ExitStack() as stack:
                given = program(kind, fault, stack, fault.steps)
                every.append(run.on_mesh(given, bounds[fault.steps], MeshCase.parse(fault.mesh)))
    return every


def names(finding: Finding | None, fault: Fault) -> bool:
    """Return whether the first reported difference has the layer, tensor and kind of the fault."""
    if finding is None:
        return False
    return (
        finding.layer.endswith(fault.layer)
        and finding.key.tensor.startswith(fault.tensor)
        and finding.kind == fault.kind
    )


@pytest.mark.parametrize(("kind", "world", "meshes"), MESHES, ids=str)
def test_no_alarm_without_a_fault(ranks, kind, world, meshes):
    for result in ranks(world).run(results, kind, meshes)[0]:
        assert result.ok, str(run.Report(2, False, [result]))
        assert result.equal > 0.5 * result.compared > 0


# Kinds of faults that `prove` detects by different checks; without `--all-cases` one fault of each of these kinds is
# planted
OFTEN = (
    "missing sum",
    "divided twice",
    "stale weight",
    "another scale",
    "another rank's part",
    "missing microbatch",
    "not finite",
)
FIRST = {fault.kind: fault for fault in reversed(FAULTS)}  # one fault of each kind
PARTS = {
    "often": [FIRST[kind] for kind in OFTEN],
    "other kinds": [fault for kind, fault in FIRST.items() if kind not in OFTEN],
    "the others": [fault for fault in FAULTS if fault not in FIRST.values()],
}


@pytest.mark.parametrize(
    ("world", "part"),
    [(2, "often"), *(nightly(world, part) for part in ("other kinds", "the others") for world in (2, 4))],
)
def test_planted_faults_are_named(ranks, world, part):
    mine = [fault for fault in PARTS[part] if (MeshCase.parse(fault.mesh).ranks == 4) == (world == 4)]
    assert mine
    missed = []
    for kind in dict.fromkeys(fault.model for fault in mine):
        faults = [fault for fault in mine if fault.model == kind]
        every = ranks(world).run(found, kind, [fault.name for fault in faults])
        for fault, result in zip(faults, every[0], strict=True):
            first = result.findings[0] if result.findings else None
            missed += [f"{fault.name}: {first or result.error or 'nothing'}"] if not names(first, fault) else []
    assert not missed, "\n".join(missed)
    assert len(FAULTS) >= 30


@pytest.mark.ranks(2)
def test_a_missing_sum_over_cp_is_named(ranks):
    (fault,) = (fault for fault in FAULTS if "over cp" in fault.name)
    (result,) = ranks(2).run(found, fault.model, [fault.name])[0]
    assert names(result.findings[0], fault)
    sentence = run.Report(1, False, [result]).sentence()
    assert "on ranks 0, 1 of 2" in sentence and "missing sum (over cp)" in sentence


def of_config(mesh: str, wire: str) -> run.Report:
    """Prove a shrunk config on a mesh on which FSDP sends gradients with `wire` instead of the wire of the config. Runs in
    a worker."""
    config, _ = launched.provable(load("tiny"), launched.Size(1, 64))
    build = launched.model_on

    def other_wire(config: Config, mesh: Any, case: MeshCase) -> Any:
        model, optimizer = build(config, mesh, case)
        if case.dp > 1 and wire != "fp32":
            set_grad_wire(model, wire)
        return model, optimizer

    with patch.object(launched, "model_on", other_wire):
        return launched.prove_config(config, [mesh])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["dp2", nightly("cp2")])
def test_a_config_is_proved_and_its_bytes_are_counted(ranks, mesh):
    report = ranks(2).run(of_config, mesh, "fp32")[0]
    assert f"PROVED: {mesh} computes what one rank computes." in str(report)
    assert re.search(rf"{mesh}: each rank sent [\d,]+ bytes in step 2, as planned", str(report))


@pytest.mark.ranks(2)
def test_bytes_of_another_wire_than_planned_are_a_finding(ranks):
    report = ranks(2).run(of_config, "dp2", "fp8")[0]
    wires = [finding for finding in report.meshes[0].findings if finding.kind == "wire"]
    assert len(wires) == 1 and "planned" in wires[0].guess.detail and "counted" in wires[0].guess.detail


SHIPPED = [path.stem for path in Path(launched.__file__).parent.joinpath("configs").glob("*.toml")]
SHIPPED.remove("transformers")  # the model of this config is a folder of the user


def of_shipped(name: str, meshes: tuple[str, ...]) -> run.Report:
    """Prove a shipped config, shrunk, on meshes. Runs in a worker."""
    config, _ = launched.provable(load(name), launched.Size(3, 128))
    with patch.object(run, "mesh_of", cached_mesh):
        return launched.prove_config(config, meshes, steps=2)


@pytest.mark.full  # the kinds of models in MESHES represent these configs
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_no_alarm_on_a_shipped_config(ranks, name, world):
    meshes = tuple(mesh for mesh in cases.MESHES if (MeshCase.parse(mesh).ranks == 4) == (world == 4))
    report = ranks(world).run(of_shipped, name, meshes)[0]
    assert report.ok, str(report)


def refused(meshes: list[str]) -> str:
    """Return the message of `dlp.prove` about meshes that do not fit. Runs in a worker."""
    with pytest.raises(ValueError, match="mesh") as error:
        dlp.prove(partial(built, kind="fp32"), tokens, loss, meshes=meshes)
    return str(error.value)


def uneven() -> str:
    """Return the error about a batch that cannot be divided into 4 pieces. Runs in a worker."""
    given = program("fp32")._replace(batch=lambda step: tokens(step)[:6])
    return run.prove_here(given, [MeshCase.parse("accumulate4")]).meshes[0].error


def exact(kind: str, mesh: str) -> run.Report:
    return run.prove_here(program(kind)._replace(exact=True), [MeshCase.parse(mesh)])


def no_result_of_other_ranks() -> tuple[str, list[str]]:
    """Return the error of a rank that stops while other ranks do not arrive, and the messages logged before the timeout.
    Runs in a worker."""
    logged: list[str] = []
    stops = program("fp32")._replace(build=Mock(side_effect=ValueError("out of range")))

    def times_out(*_: Any) -> None:
        time.sleep(0.2)
        raise RuntimeError("timed out")

    with (
        patch.object(run, "PATIENCE", 0.05),
        patch.object(run.LOG, "error", logged.append),
        patch.object(dist, "all_gather_object", times_out),
        pytest.raises(RuntimeError) as error,
    ):
        run.on_mesh(stops, Mock(), MeshCase.parse("accumulate4"))
    return str(error.value), logged


@pytest.mark.ranks(1)
def test_the_error_of_one_rank_is_told_while_others_wait(ranks):
    message, logged = ranks(1).run(no_result_of_other_ranks)[0]
    stopped = "rank 0 stopped, and results of other ranks did not arrive: ValueError: out of range"
    assert message == f"prove, mesh 'accumulate4': {stopped}"
    assert logged == [message]


@pytest.mark.ranks(2)
def test_what_is_refused_and_what_exact_says(ranks, device_type):
    assert "do not divide the 2 ranks" in ranks(2).run(refused, ["tp4"])[0]
    assert "expected tpN" in ranks(2).run(refused, ["pp2"])[0]
    assert "cuts a batch of 6 sequences into 4 pieces, which do not divide the batch" in ranks(2).run(uneven)[0]
    report = ranks(2).run(exact, "fp32", "tp2")[0]
    assert not report.ok
    # On GPUs cuBLAS decides whether the sum of the two halves of o_proj has other bits than the whole sum
    first = report.first.layer if device_type == "cuda" else "model.layers.0.self_attn.o_proj"
    assert report.first.pass_name == "forward" and report.first.layer == first
    assert first.startswith("model.layers.0.") and f"FIRST DIFFERENCE on tp2: y of {first}" in str(report)
