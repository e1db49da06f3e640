"""`chunked` compared with `serial`: the same layer, for every style and recipe, on 2 and 4 ranks.

On `lattice` data products and sums are exact, so bits are equal in every order. On `gauss` data a GEMM over fewer rows
may sum in another order, so results agree within a few roundings, or within the error of the recipe where such a
rounding changes a code of the next operand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlp.comm import observer, transport
from dlp.comm.mapped import Transport
from dlp.comm.mesh import ParallelDims
from dlp.comm.transport import agree
from dlp.parallel import casts
from dlp.parallel import overlap as overlaps
from dlp.parallel.casts import ROWWISE
from dlp.parallel.linear import quantize as operands
from dlp.parallel.linear.modules import ColumnParallelLinear
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.linear.spec import Overlaps
from dlp.parallel.overlap import Overlap
from dlp.parallel.overlap.chunked import pieces
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import KeepHighPrecision
from tests import pool as worker
from tests.cases import (
    EPSILON,
    IN_STYLES,
    STYLE_KEYS,
    LinearCase,
    few,
    in_styles,
    linear_cases,
    matrix,
    nightly,
    style_id,
)
from tests.metrics import relative_error
from tests.multigpu.test_linear import Full, build, cut, make_full, run, whole_partials
from tests.shared_slot import SharedSlot


def strategy(name: str) -> Overlap:
    """Load a strategy by its name in this file: "mapped" is `chunked` and "mapped serial" is `serial`, both through
    mapped memory."""
    return overlaps.load({"mapped serial": "serial"}.get(name, name.replace("mapped", "chunked")))


@contextmanager
def memory(group: dist.ProcessGroup, *names: str) -> Iterator[None]:
    """Provide mapped memory for strategies whose names begin with "mapped". Other strategies send by NCCL or gloo."""
    mapped = any(name.startswith("mapped") for name in names)
    if mapped and worker.device().type == "cuda":
        transport.ask_for(group, "cuda")
    elif mapped:
        transport.use(group, Transport(group, worker.device(), SharedSlot))
    try:
        yield
    finally:
        transport.destroy()


def results(case: LinearCase, full: Full, fprop: str, dgrad: str, wgrad: str, wire: str = "hp") -> dict[str, Tensor]:
    """Return y, dx, dw and db of this rank, with these strategies."""
    mesh = worker.mesh(tp=dist.get_world_size())["tp"]
    layer = build(case, mesh, full)
    spec = layer.core.spec
    chosen = Overlaps(*(strategy(name) for name in (fprop, dgrad, wgrad)))
    options = {gemm: replace(getattr(spec.recipe, gemm), wire=wire) for gemm in ("fprop", "dgrad")}
    layer.core.set_spec(replace(spec, overlap=chosen, recipe=replace(spec.recipe, **options)))
    x = cut(full.x, case.style.cut_x, mesh.size())
    x = x if case.style.cut_x == 0 else x.view(case.batch, case.sequence, -1)
    with memory(mesh.get_group(), fprop, dgrad, wgrad):
        return whole_partials(layer, run(layer, x, [cut(dy, case.style.cut_dy, mesh.size()) for dy in full.dys]))


Compared = list[dict[str, tuple[bool, float, float]]]


def compare(cases: list[LinearCase], wire: str, *chosen: tuple[str, str, str]) -> list[Compared]:
    """Compare each choice of strategies (fprop, dgrad, wgrad) with `serial`. Return, for each choice, case and result:
    whether bits are equal, and the sums of squares of the difference and of the result of `serial`."""
    found: list[Compared] = [[] for _ in chosen]
    for case in cases:
        full = make_full(case)
        expected = results(case, full, "serial", "serial", "serial", wire)
        for names, compared in zip(chosen, found, strict=True):
            actual = results(case, full, *names, wire)
            assert actual.keys() == expected.keys()
            compared.append({
                name: (torch.equal(value, expected[name]), *(
                    t.double().square().sum().item() for t in (value.double() - expected[name].double(), expected[name])))
                for name, value in actual.items()
            })  # fmt: skip
    return found


def fewer(style_key: tuple[str, bool], recipe: str) -> list[LinearCase]:
    """Return three of the five cases. They contain every value of each option (dtype, bias, siblings, odd token counts,
    data)."""
    return list(linear_cases(style_key, recipe))[::2]


def bound(case: LinearCase, device_type: str) -> float:
    """Bound on the difference relative to `serial`. It is larger for quantized recipes on GPUs, whose FP8 units keep
    about 14 bits of a sum, which makes the order of a sum visible."""
    native = device_type == "cuda" and case.recipe != "bf16"
    return max(EPSILON[case.dtype], 2.0**-10 if native else 0.0)


def check(cases: list[LinearCase], of_ranks: list[list[Compared]], device_type: str) -> None:
    """Check the first choice of strategies: `lattice` data has equal bits, other data is within the bound of each case."""
    for case, *ranks_of_case in zip(cases, *(chosen[0] for chosen in of_ranks), strict=True):
        for name in ranks_of_case[0]:
            equal, squared, norm = zip(*(found[name] for found in ranks_of_case), strict=True)
            if case.data == "lattice":
                assert all(equal), f"{case} {name}: bits differ"
            error = math.sqrt(sum(squared) / sum(norm))
            assert error <= bound(case, device_type), f"{case} {name}: {error:.2e}"


@pytest.mark.parametrize(
    ("world", "recipe", "style_key"), in_styles(cell for cell in IN_STYLES if cell[2][0] != "local"), ids=style_id
)
def test_chunked_is_serial(ranks, device_type, world, recipe, style_key):
    """`chunked` with complete shards, and in three pieces, gives the results of `serial`."""
    cases = fewer(style_key, recipe)
    check(cases, ranks(world).run(compare, cases, "hp", ("chunked:3", "chunked", "chunked:3")), device_type)


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((4096, 1, 1, 7168, 132), [4096]),
        ((4096, 2, 1), [2048, 4096]),
        # With 132 SMs, 14 x 28 tiles fill almost three waves; an equal split (16 x 28 tiles) would fill 3.4 waves
        ((4096, 2, 1, 7168, 132), [1792, 4096]),
        ((4096, 4, 1, 4096, 132), [1024, 2048, 3072, 4096]),  # a piece has 8 x 16 tiles, one wave
        ((1000, 3, 32), [384, 768, 1000]),
        ((96, 4, 32), [32, 64, 96]),
        ((5, 2, 1), [3, 5]),
        ((3, 8, 16), [3]),
        ((0, 2, 1), [0]),
    ],
)
def test_pieces_end_between_blocks_tiles_and_waves(sizes: tuple[int, ...], cuts: list[int]):
    assert [stop for _, stop in pieces(*sizes)] == cuts
    assert [start for start, _ in pieces(*sizes)] == [0, *cuts[:-1]]


class Noted:
    """Simulated peer buffer. It appends the calls of its methods to `log`."""

    def __init__(
        self, log: list[Any], tags: Iterator[int], nbytes: int, group: Any, device: Any, named: Any, lane: Any
    ) -> None:
        self.payload, self._log, self._tag = torch.zeros(nbytes, dtype=torch.uint8), log, next(tags)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._log.append((name, self._tag, *(args[2:] if name == "push" else ())))


def test_each_piece_is_awaited_by_itself_and_once():
    log: list[Any] = []
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    moves = Transport(group, torch.device("cpu"), partial(Noted, log, count()))
    moves.start()
    gathering = moves.gathering((torch.ones(6, 4),), (0,)).send(((0, 2), (2, 4), (4, 6)))
    pushes = [place.offset for name, _, *rest in log if name == "push" for place in rest]
    assert pushes == [0, 32, 64], "of 16 bytes a row"
    names = [name for name, *_ in log]
    assert "follow" in names[: names.index("push")], "what is sent has been written"
    assert [entry for entry in log if entry[0] in ("begin", "meet")] == [
        ("begin", 0), ("begin", 1), ("begin", 2), ("meet", 1), ("meet", 2), ("meet", 0),
    ]  # fmt: skip
    log.clear()
    for piece in (0, 0, 1):
        gathering.others(piece)
    assert log == [("wait", 1), ("wait", 2)]
    gathering.all_parts()
    gathering.others(1)
    assert [entry for entry in log if entry[0] == "wait"] == [("wait", 1), ("wait", 2), ("wait", 0)]
    moves.finish()
    assert [entry for entry in log if entry[0] == "release"] == [("release", tag) for tag in (0, 1, 2)]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("chunks", "unknown overlap strategy 'chunks': the strategies are chunked, serial"),
        ("fused", "unknown overlap strategy 'fused': the strategies are chunked, serial"),
        ("serial:2", "overlap strategy 'serial:2': serial does not work in chunks; set 'serial'"),
        ("chunked:0", "overlap strategy 'chunked:0': expected a number of chunks >= 1 after chunked:, got '0'"),
    ],
)
def test_a_strategy_that_there_is_not(chosen: str, said: str):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        overlaps.load(chosen)


SEQUENCE_PARALLEL = [("column", True), ("row", True)]


@pytest.mark.parametrize(
    ("world", "recipe"),
    few([(2, "bf16"), (2, "fp8_current"), (2, "fp8_block"), (2, "nvfp4"), nightly(4, "fp8_block")], ("fp8_block",)),
)
def test_memory_that_ranks_map_is_serial(ranks, device_type, world, recipe):
    """`chunked` and `serial` through mapped memory give the results of collectives; `serial` has equal bits."""
    cases = [case for key in STYLE_KEYS if key[0] != "local" for case in fewer(key, recipe)]
    found = ranks(world).run(compare, cases, "hp", ("mapped", "mapped:2", "mapped"), ("mapped serial",) * 3)
    check(cases, found, device_type)
    for _, serial in found:
        assert all(equal for results_of in serial for equal, _, _ in results_of.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "names", [("chunked", "serial", "serial"), ("serial", "chunked", "serial"), ("serial", "serial", "chunked")]
)
def test_each_gemm_has_a_strategy_of_its_own(ranks, device_type, names):
    cases = [case for key in SEQUENCE_PARALLEL for case in fewer(key, "fp8_block")]
    check(cases, ranks(2).run(compare, cases, "hp", names), device_type)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wire", ["hp", "fp8"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "nvfp4"])
def test_rows_that_do_not_divide_over_ranks_are_summed_too(ranks, device_type, world, wire, recipe):
    """With 15 or 3 tokens, some ranks have fewer rows of the sum, or none."""
    keys, shapes = (("column", False), ("row", False)), ((3, 5), (1, 3))
    cases = [LinearCase(key, recipe, batch=b, sequence=s) for key in keys for b, s in shapes]
    if wire == "hp":
        check(cases, ranks(world).run(compare, cases, wire, ("chunked", "chunked", "chunked")), device_type)
        return
    for (found,) in ranks(world).run(compare, cases, wire, ("chunked", "chunked", "chunked")):
        # Codes differ, because one strategy divides rows into blocks of 128 elements, and the other divides the flat result
        for case, errors in zip(cases, found, strict=True):
            assert all(math.sqrt(squared / norm) < 0.06 for _, squared, norm in errors.values()), case


def gathered_error(strategy_name: str, axis: str) -> float:
    """Return the error of x that is gathered over tp, with amaxes agreed over `axis`. Ranks along dp_shard have the
    same shard of x, so that an agreement over dp_shard changes nothing."""
    mesh = worker.mesh(dp_shard=2, tp=2)
    options: dict[str, Any] = {"tp": mesh["tp"], "sequence_parallel": True, "device": worker.device()}
    bound = ColumnParallelLinear(64, 64, recipe="fp8_current", **options).core.bound
    full = matrix("gauss", 128, 64, 3).to(worker.device())
    mine = full.chunk(2)[mesh["tp"].get_local_rank()]
    with patch.object(casts, "agree", lambda observed, group: agree(observed, mesh[axis].get_group())):
        (made,) = operands.quantize(bound, "x", [mine], ROWWISE)
    whole = strategy(strategy_name).gather(made.at(columnwise=False), 0, bound.spec.tp_group).whole()
    return relative_error(whole.dequantize(), full)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["serial", "chunked"])
def test_scales_agreed_over_the_wrong_group_are_noticed(ranks, name):
    right, wrong = (ranks(4).run(gathered_error, name, axis) for axis in ("tp", "dp_shard"))
    assert max(right) < 0.05 and max(wrong) > 0.5, (right, wrong)


REDUCTIONS = [("scatter", 16), ("all", 16), ("all", 13)]


def said_and_sent() -> dict[tuple[str, str, str, int], tuple[int, int]]:
    """Return (predicted bytes, counted bytes) of a reduction, by strategy, wire format, kind of reduction and
    number of rows."""
    mesh, found = worker.mesh(tp=dist.get_world_size()), {}
    device, group, quantizer = worker.device(), mesh["tp"].get_group(), KeepHighPrecision()
    w = quantizer.cast(torch.ones(24, 8, device=device), None)
    for name in ("serial", "chunked", "mapped serial", "mapped:3"):
        for carried in WIRES:
            for reduce, rows in REDUCTIONS:
                chosen, a = strategy(name), quantizer.cast(torch.ones(rows, 8, device=device), None)
                how: dict[str, Any] = {"reduce": reduce, "codec": WIRES[carried]}

                def total(chosen: Any = chosen, a: Any = a, how: dict[str, Any] = how) -> Tensor:
                    with transport.in_pass(group):
                        gemm = Gemm("fprop", w, torch.float32)
                        return chosen.gemm_reduce(a, gemm, group, dtype=torch.bfloat16, **how).wait()

                with memory(group, name):
                    total()  # the first use of mapped memory allocates it
                    with observer.Observer(ParallelDims.from_mesh(mesh).group_names()) as seen:
                        total()
                y = torch.empty((rows, 24), dtype=torch.bfloat16, device="meta")
                said = chosen.sent(y, group.size(), **how)
                found[name, carried, reduce, rows] = (sum(n for _, n in said), sum(seen.sent.values()))
    return found


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_strategies_say_what_their_reductions_send(ranks, world):
    for of_rank in ranks(world).run(said_and_sent):
        assert len(of_rank) == 36 and not {k: v for k, v in of_rank.items() if not v[0] == v[1] > 0}
