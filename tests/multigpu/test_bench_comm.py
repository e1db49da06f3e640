"""The benchmark of collectives runs, and what it says of bytes is what a gather moves."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bench import collectives as bench_collectives
from bench.collectives import KINDS, Bench, Line, column, gathered, received
from launch import stop
from tests import pool as worker
from tests.cases import RECIPES

pytestmark = pytest.mark.slow

# of bf16, with 8192 features
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
    """For each recipe: the bytes that are said to come from the other rank, and those that are gathered there."""
    here, found = bench(), []
    for recipe in RECIPES:
        spec = column(here, recipe, 256)
        spec.session.begin_forward(spec, True)
        operand = gathered(spec, here.inputs(64, 256)())
        gathers = [dim is not None for dim in operand.format.moves_along(0)]
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
    assert {line.name for line in lines if line.kind == "gather"} == {"torch bf16", *RECIPES}


def test_one_rank_is_refused_before_anything_runs(monkeypatch, capsys):
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(stop, "leave", leave)
    monkeypatch.setattr(bench_collectives, "init_process_group", lambda kind: pytest.fail("a group was made"))
    with pytest.raises(SystemExit) as left:
        bench_collectives.main([])
    said = "1 rank has nothing to gather or to sum; start 2 or more, as torchrun --nproc-per-node 2 does\n"
    assert left.value.code == 2 and capsys.readouterr().err == said
