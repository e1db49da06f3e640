"""fused against serial, through mapped memory: GEMMs that wait inside for the rows of other ranks have the bits of one that
begins when all are here, and those that store rows in the memory of other ranks give the sum of what would be sent. On the CPU
the device is played, with a lane in time and with one that is late."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from dlp.comm import observer, transport
from dlp.comm.mesh import ParallelDims
from dlp.comm.slots import CudaSlot
from dlp.kernels import gemm_sm90
from dlp.parallel import overlap as overlaps
from dlp.parallel.transfer import WIRES
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import load
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.multigpu.test_programs import device, moved_by
from tests.twins import of_any_size, programs, values, without_programs

K, N, ROWS = 512, 256, gemm_sm90.PAIR[0]  # features, and the fewest rows of a rank that are whole tiles
Ran = tuple[list[Tensor], Counter[str], int]


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Our own GEMM runs; those are counted that wait inside, and those that send."""
    counts = Counter[str]()

    def counted(name: str, run: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return run(*arguments, **options)

        return call

    with of_any_size(), ExitStack() as patches:
        for name, kernel in (("waits", "_product_arriving"), ("sends", "_product_sent")):
            patches.enter_context(patch.object(gemm_sm90, kernel, counted(name, getattr(gemm_sm90, kernel))))
        yield counts


def ran(kind: str, overlap: str, rows: int, late: float, captured: bool, recipe: str = "fp8_block") -> Ran:
    """y, dx and dw of a layer over tp ranks in four steps, in which one rank falls behind; how its GEMMs ran, and how many
    directions were captured."""
    world = dist.get_world_size()
    mesh, mine, results = worker.mesh(tp=world)["tp"], random.Random(dist.get_rank()), list[Tensor]()
    off = nullcontext() if captured else without_programs()
    with device(), off, moved_by(mesh.get_group(), True, late), watched() as counts:  # type: ignore[attr-defined]
        torch.manual_seed(0)
        made = dlp.RowParallelLinear if kind == "row" else dlp.ColumnParallelLinear
        layer = made(world * K, (world * N, world * K) if kind == "siblings" else world * N, dtype=torch.bfloat16, tp=mesh,
                     recipe=recipe, sequence_parallel=True, overlap=overlap).to(worker.device())  # fmt: skip
        shape = (world * rows, K) if kind == "row" else (rows, world * K)
        for seed in range(4):
            x = values(10 * seed + dist.get_rank(), *shape).to(worker.device()).requires_grad_()
            time.sleep(mine.random() / 50)
            ys = layer(x) if kind == "siblings" else (layer(x),)
            time.sleep(mine.random() / 50)
            dys = [values(100 + 10 * seed + dist.get_rank(), *y.shape).to(worker.device()) for y in ys]
            torch.autograd.backward(ys, dys)
            results += [*(y.detach() for y in ys), x.grad]  # type: ignore[list-item]
            results += [weight.grad._local_tensor.clone() for weight in layer.parameters()]  # type: ignore[union-attr]
            layer.zero_grad()
        if worker.device().type == "cuda":
            torch.cuda.synchronize()
        found = [made for way in programs(layer).values() for made in way if not isinstance(made, str)]
    return results, counts, len(found)


def compared(kind: str, rows: int, late: float = 0.0, recipe: str = "fp8_block") -> tuple[Ran, Ran, Ran]:
    """fused, launched and captured, beside serial."""
    run = partial(ran, kind, rows=rows, late=late, recipe=recipe)
    return run("fused", captured=False), run("fused", captured=True), run("serial", captured=False)


def check_bits(found: Sequence[tuple[Ran, Ran, Ran]], gathers: int, sums: int) -> None:
    """`gathers` and `sums`: GEMMs of a step that wait for rows, and that send them."""
    for launched, captured, serial in found:
        assert launched[1] == Counter(waits=4 * gathers, sends=4 * sums) and not serial[1]
        assert captured[2] > 0 and not launched[2]
        for made in (launched, captured):
            for result, expected in zip(made[0], serial[0], strict=True):
                assert_bit_equal(result, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "late"), [("column", 0.0), ("row", 0.005), ("siblings", 0.005), ("row", 0.0)])
def test_a_gemm_that_waits_or_sends_inside_has_the_bits_of_one_that_does_not(ranks, kind: str, late: float):
    """The dgrads of siblings are added up by the GEMM that sends."""
    check_bits(ranks(2).run(compared, kind, ROWS, late), 2 if kind == "siblings" else 1, 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "late"), [("column", 0.005), ("row", 0.0)])
def test_four_ranks_send_to_each_other(ranks, kind: str, late: float):
    check_bits(ranks(4).run(compared, kind, ROWS, late), 1, 1)


@pytest.mark.ranks(2)
def test_what_cannot_wait_inside_runs_as_others_do(ranks):
    """Rows that are no whole tiles at once, a recipe whose GEMM is another kernel shard by shard."""
    for rows, recipe in ((ROWS // 2, "fp8_block"), (ROWS, "fp8_current")):
        for launched, captured, serial in ranks(2).run(compared, "column", rows, 0.0, recipe):
            assert not launched[1] and not captured[1]
            for result, expected in zip([*launched[0], *captured[0]], 2 * serial[0], strict=True):
                if recipe == "fp8_block":
                    assert_bit_equal(result, expected)
                torch.testing.assert_close(result, expected, rtol=2**-6, atol=0.05)


def of_operands_that_exist() -> tuple[list[tuple[Tensor, Tensor]], int, list[str]]:
    """Operands that were not cast where they are gathered, twice each: the GEMM beside that of `serial`; and what is logged."""
    mesh, recipe, found = worker.mesh(tp=dist.get_world_size())["tp"], load("fp8_block"), list[tuple[Tensor, Tensor]]()
    group, w = mesh.get_group(), values(0, N, K).to(worker.device())
    module, said = sys.modules[type(overlaps.load("fused")).__module__], list[str]()
    log = patch.object(module, "LOG", Mock(warning=lambda form, text: said.append(form % text)))
    module._warn.cache_clear()
    with device(), moved_by(group, True), watched() as counts, log:  # type: ignore[attr-defined]
        gemm = Gemm("fprop", recipe.w.rowwise.cast(w, None), torch.bfloat16)
        for seed in range(2):
            a = recipe.x.rowwise.cast(values(10 * seed + dist.get_rank(), ROWS, K).to(worker.device()), None)
            made = []
            for name in ("fused", "serial"):
                transport.start(group)
                made.append(overlaps.load(name).gather(a, 0, group).gemm(gemm).clone())
                transport.finish(group)
            found.append((made[0], made[1]))
    return found, counts["waits"], said


@pytest.mark.ranks(2)
def test_operands_that_exist_are_gathered_beside_this_ranks_own(ranks):
    for pairs, waits, said in ranks(2).run(of_operands_that_exist):
        assert waits == 2
        (told,) = said  # once, whoever chose the strategy
        assert "not between GPUs yet" in told and told.endswith("or choose 'serial' or 'chunked'")
        for result, expected in pairs:
            assert_bit_equal(result, expected)


class Sum(NamedTuple):
    """A GEMM whose result is summed over ranks; `rows`: of each."""

    reduce: str = "scatter"
    wire: str = "hp"
    rows: int = ROWS
    out: torch.dtype = torch.bfloat16  # of the GEMM
    dtype: torch.dtype = torch.bfloat16  # of the sum


SUMS = {
    Sum(): True, Sum("all"): True, Sum(wire="bf16", rows=2 * ROWS): True, Sum(out=torch.float32): True,
    Sum("all", "bf16", out=torch.float32, dtype=torch.float32): True,
    Sum(out=torch.float32, dtype=torch.float32): False, Sum(wire="fp8"): False, Sum("all", "fp8"): False,
    Sum(rows=ROWS // 2): False, Sum("all", rows=ROWS - 1): False,
}  # fmt: skip


def summed() -> dict[Sum, Any]:
    """Of each: the sum, that of `serial`, how many GEMMs sent, the bytes that `fused` says it sends, and those that went."""
    mesh, found = worker.mesh(tp=dist.get_world_size()), {}
    group, w = mesh["tp"].get_group(), values(0, N, K).to(worker.device())
    with device(), moved_by(group, True), watched() as counts:  # type: ignore[attr-defined]
        for case in SUMS:
            recipe, made, total = (
                load("fp8_block"),
                [],
                group.size() * case.rows - (case.reduce == "all" and case.rows % 2),
            )
            x = values(dist.get_rank(), total, K).to(worker.device())
            a, gemm = recipe.x.rowwise.cast(x, None), Gemm("fprop", recipe.w.rowwise.cast(w, None), case.out)
            how: dict[str, Any] = {"reduce": case.reduce, "dtype": case.dtype, "codec": WIRES[case.wire]}
            before = counts["sends"]
            for name in ("serial", "fused"):
                with observer.Observer(ParallelDims.from_mesh(mesh).group_names()) as seen:
                    transport.start(group)
                    pending = overlaps.load(name).gemm_reduce(a, gemm, group, **how)
                    made.append(pending.wait().clone())
                    transport.finish(group)
            found[case] = made[1], made[0], counts["sends"] - before, total, sum(seen.sent.values())
    return {
        case: (*results, said_by(case, total, group.size()), sent) for case, (*results, total, sent) in found.items()
    }


def said_by(case: Sum, rows: int, ranks: int) -> int:
    """The bytes that `fused` says a rank sends in a sum of so many rows."""
    y = torch.empty((rows, N), dtype=case.dtype, device="meta")
    said = overlaps.load("fused").sent(y, ranks, reduce=case.reduce, codec=WIRES[case.wire])
    return sum(count for _, count in said)


@pytest.mark.parametrize("world", [2, 4])
def test_sums_are_sent_inside_where_they_are_carried_as_the_gemm_stores_them(ranks, world: int):
    for found in ranks(world).run(summed):
        for case, (made, expected, sends, said, sent) in found.items():
            assert sends == SUMS[case] and said == sent > 0, case
            if case.wire != "fp8":
                assert_bit_equal(made, expected, str(case))
            torch.testing.assert_close(made, expected, rtol=2**-4, atol=1.0)


def never_forgotten() -> str:
    def release(slot: CudaSlot) -> None:
        slot._told = False
        _RELEASE(slot)

    with patch.object(CudaSlot, "release", release):
        try:
            ran("column", "fused", ROWS, 0.0, False)
        except AssertionError as error:
            return str(error)
    return ""


_RELEASE = CudaSlot.release


@pytest.mark.ranks(2)
def test_what_was_sent_is_forgotten_before_a_slot_is_used_again(ranks, device_type):
    if device_type == "cuda":
        pytest.skip("the played transport looks")
    for rank, said in enumerate(ranks(2).run(never_forgotten)):
        assert f"what rank {rank} sent before" in said, said
