"""The benchmarks of collectives, of overlapped operators and of tensor-parallel layers run, and the benchmark of
collectives reports the number of bytes that a gather moves."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bench import collectives as bench_collectives
from bench import operators, tensor_parallel
from bench.collectives import KINDS, Bench, Line, bench_reductions, column, gathered, received, summed
from bench.host_parallel import PLAIN
from bench.parallel_subjects import shape_of, subject
from dlp.comm import transport
from dlp.comm.collectives import reduce_scatter
from dlp.comm.mapped import Transport
from dlp.parallel import tune
from dlp.parallel.linear.plan import WIRES
from dlp.quant import recipe as recipes
from launch.ranks import process_exit
from tests import pool as worker
from tests.cases import RECIPES
from tests.metrics import relative_error
from tests.shared_slot import SharedSlot

pytestmark = pytest.mark.slow

# Largest gathered bytes, relative to bf16, with 8192 features
MOST = {
    "fp8_current": 0.501,
    "fp8_delayed": 0.501,
    "fp8_rowwise": 0.501,
    "fp8_block": 0.52,
    "mxfp8": 0.52,
    "nvfp4": 0.285,
}


def bench() -> Bench:
    return Bench(worker.mesh(tp=dist.get_world_size())["tp"], worker.device(), calls=1)


def shares() -> dict[str, float]:
    here, plain = bench(), 2.0 * 1024 * 8192 * (dist.get_world_size() - 1)
    return {recipe: received(here, column(here, recipe, 8192), (1024, 8192)) / plain for recipe in RECIPES}


@pytest.mark.ranks(2)
def test_a_quantized_gather_moves_the_promised_share_of_bf16(ranks):
    for found in ranks(2).run(shares):
        assert found["bf16"] == 1
        for recipe, most in MOST.items():
            assert found[recipe] <= most, f"{recipe}: {found[recipe]}"


def moved() -> list[tuple[float, int]]:
    """Return, for each recipe, the bytes that the benchmark reports as received from the other rank, and the bytes of
    the other rank's parts of the gathered operand."""
    here, found = bench(), []
    for recipe in RECIPES:
        spec = column(here, recipe, 256)
        spec.session.begin_forward(spec.spec, True)
        operand = gathered(spec, here.inputs(64, 256)())
        gathers = [dim is not None for dim in operand.format.moves[0]]
        nbytes = sum(part.nbytes for part, moves in zip(operand.parts, gathers, strict=True) if moves)
        found.append((received(here, spec, (64, 256)), nbytes - nbytes // here.world))
    return found


@pytest.mark.ranks(2)
def test_bytes_are_those_of_what_arrives(ranks):
    for found in ranks(2).run(moved):
        for said, arrived in found:
            assert said == arrived


def every_kind() -> list[Line]:
    return [line for kind in KINDS.values() for line in kind(bench(), 64, 128)]


@pytest.mark.ranks(2)
def test_every_kind_runs(ranks):
    (lines, _) = ranks(2).run(every_kind)
    assert {line.kind for line in lines} == set(KINDS)
    assert {line.name for line in lines if line.kind == "gather"} == {"torch bf16", *recipes.names()}


def sums_through_memory() -> list[Line]:
    """Check that sums through mapped memory have the bits of collectives in each wire format; return the lines of the
    benchmark that measures both."""
    here = bench()
    group = here.mesh.get_group()
    if worker.device().type == "cpu":
        transport.use(group, Transport(group, worker.device(), SharedSlot))
    else:
        transport.ask_for(group, "cuda")
    try:
        y, moves = here.inputs(64, 256)(), transport.transport_of(group)
        assert moves is not None
        for wire in WIRES.values():
            expected = reduce_scatter(y, group, wire).wait()
            assert torch.equal(summed(moves, y, wire), expected)
        with patch.object(bench_collectives, "REPETITIONS", 1):
            return bench_reductions(here, 64, 256)
    finally:
        transport.use(group, None)


@pytest.mark.ranks(2)
def test_sums_are_measured_through_memory_that_ranks_map(ranks):
    (lines, _) = ranks(2).run(sums_through_memory)
    assert [line.name for line in lines] == ["torch bf16", *WIRES, *(f"mapped {name}" for name in WIRES)]
    assert all(line.microseconds > 0 for line in lines)


def every_operator() -> tuple[list[operators.Line], int, int]:
    """Run the benchmark of operators; return the lines of the output, the number of timed repetitions, and the number
    that `operators.repetitions` predicts."""
    once, timed = Bench.once, list[Any]()

    def counted(here: Bench, run: Any, calls: int) -> float:
        timed.append(run)
        return once(here, run, calls)

    with patch.object(bench_collectives, "REPETITIONS", 1), patch.object(Bench, "once", counted):
        lines = operators.measure(bench(), "fp8_block", (64, 128, 128), ["serial", "chunked"])
        return lines, len(timed), operators.repetitions(1, 1, 2)


@pytest.mark.ranks(2)
def test_every_operator_runs(ranks):
    ((lines, timed, predicted), _) = ranks(2).run(every_operator)
    assert timed == predicted
    named = [(line.operator, line.strategy) for line in lines]
    assert named == [(operator, name) for operator in ("gather", "sum") for name in ("serial", "chunked")]
    assert all(min(line.microseconds, line.gemm, line.transfer, line.sequential) > 0 for line in lines)


ONCE = tensor_parallel.Asked(count=1)


def pair_and_layer() -> list[tensor_parallel.Line]:
    subjects, mesh = [(PLAIN, ""), ("fp8_current", "serial"), ("fp8_current", "auto")], worker.mesh(tp=2)
    found = []
    with patch.object(tensor_parallel, "ROUNDS", 1), patch.object(tune, "COUNT", 1), patch.object(tune, "WARM", 1):
        for text in ("64x128", "64x128x4x2"):
            found += tensor_parallel.measure(shape_of(text), 64, subjects, mesh, None, ONCE)
    return found


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_pair_and_a_layer_run_beside_plain_torch(ranks):
    (lines, _) = ranks(2).run(pair_and_layer)
    assert [line.subject for line in lines] == [PLAIN, "fp8_current serial", "fp8_current auto"] * 2
    assert all(min(line.alone, line.queued, line.host) > 0 for line in lines) and lines[-1].of_serial is not None


def test_graphs_and_peers_have_their_columns(capsys):
    calls = {
        (PLAIN, ""): [10.0, 9.0, 1.0], ("fp8_delayed", "serial"): [8.0, 7.0, 1.0], ("fp8_delayed", "auto"): [9.0, 7.0, 1.0],
        ("te delayed", ""): [9.0, 8.0, 3.0], ("te delayed userbuffers", ""): [8.5, 8.0, 3.0],
    }  # fmt: skip
    graphs = {key: [0.5 * time for time in times] for key, times in calls.items() if "userbuffers" not in key[0]}
    lines = tensor_parallel.lines_of("4096x14336", calls, graphs)
    plain, _, auto, _, overlapped = lines
    assert plain.graph_alone_share == 1.0 and (auto.graph_alone, auto.graph_alone_share) == (4.5, 0.9)
    assert auto.of_serial == (1.125, 1.0, 1.125, 1.0) and overlapped.graph_alone is None
    assert list(tensor_parallel.beside_peers(lines)) == [
        "best of fp8_delayed / best of te delayed: alone 4.000 / 4.500 = 0.889 (fp8_delayed serial / te delayed); "
        "queued 3.500 / 4.000 = 0.875 (fp8_delayed serial / te delayed)"
    ]
    tensor_parallel.show(lines, 8192)
    assert capsys.readouterr().out.count("\n") == 4 + len(lines) + 1
    without = tensor_parallel.lines_of(
        "4096x14336", calls, {key: times for key, times in graphs.items() if key[0] != PLAIN}
    )
    assert without[0].graph_alone is None and (without[2].graph_alone, without[2].graph_alone_share) == (4.5, None)


def plain_and_ours() -> tuple[float, float]:
    """Relative difference between the outputs of dlp's bf16 layer and of the plain layer with the same weights; and the
    relative difference between input and output of the plain layer, which must be much larger."""
    mesh, shape, tokens = worker.mesh(tp=2), shape_of("64x128x4x2"), 32
    plain, ours = (subject(name, how, shape, tokens, mesh, None) for name, how in ((PLAIN, ""), ("bf16", "serial")))
    renamed = {re.sub(r"\.(norm|linear)\.", ".", name): value for name, value in plain.named_parameters()}
    with torch.no_grad():
        for name, mine in ours.named_parameters():
            mine.to_local().copy_(renamed[name].mul_(1.0 if "norm" in name else 5.0))
    x = (
        torch.randn(tokens // 2, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        .to(worker.device())
        .bfloat16()
    )
    y = plain(x)
    return relative_error(ours(x), y), relative_error(x, y)


@pytest.mark.ranks(2)
def test_a_plain_layer_computes_what_ours_does(ranks):
    for error, changed in ranks(2).run(plain_and_ours):
        assert error < 0.02 and changed > 0.1


def test_one_rank_is_refused_before_anything_runs(monkeypatch, capsys):
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process_exit, "leave", leave)
    monkeypatch.setattr(bench_collectives, "init_process_group", lambda kind: pytest.fail("a group was made"))
    with pytest.raises(SystemExit) as left:
        bench_collectives.main([])
    said = (
        "one rank has nothing to gather or to sum; start 2 or more ranks, for example by torchrun --nproc-per-node 2\n"
    )
    assert left.value.code == 2 and capsys.readouterr().err == said
