"""Transfers and agreements through mapped memory: simulated on CPU ranks, by copy engines on GPUs.

Received tensors are compared with the tensors that the other ranks sent, which every rank can compute from a seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from dlp.comm import slots, transport
from dlp.comm.mapped import Transport
from dlp.comm.slots import CudaSlot, Wait
from dlp.comm.transfers import WHOLE, Gathering
from dlp.comm.wire_checks import WireChecks
from dlp.kernels import ops
from dlp.kernels.launches import Lane, recording
from dlp.runtime import capture as captured
from tests import pool as worker
from tests import simulated_transport
from tests.cases import nightly
from tests.emulated import emulation
from tests.refusals import may_raise
from tests.shared_slot import SharedSlot
from tests.simulated_transport import SimulatedLane, SimulatedSlot

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def make_transport() -> Transport:
    device = worker.device()
    if device.type == "cpu":
        return Transport(dist.group.WORLD, device, SharedSlot)
    return Transport(dist.group.WORLD, device, CudaSlot, Lane(device))


def exchange(moves: Transport, part: Tensor, cut: int = 0) -> Tensor:
    """Send chunk r of `part` [R, ...] (R ranks) to rank r, in two pieces if `cut`; return the received chunks."""
    opened = moves.open([part.shape], [part.dtype])
    for to in range(moves.world) if cut else ():
        opened.send([part[to, :cut]], to)
        opened.send([part[to, cut:]], to, cut)
    (arrived,) = (opened.sent() if cut else opened.send_all([part])).wait()
    return arrived


def content(seed: int, shape: tuple[int, ...], dtype: torch.dtype, *who: int) -> Tensor:
    """Return random values that depend only on the seed and on `who`, for example the sending and the receiving rank."""
    draw = torch.Generator().manual_seed(hash((seed, *who)) % (1 << 31))
    return torch.randint(0, 200, shape, generator=draw).to(dtype).to(worker.device())


Kinds = list[tuple[tuple[int, ...], torch.dtype, int | None]]


def lease(moves: Transport, seed: int, kinds: Kinds) -> Gathering:
    """Lease an output buffer, and write this rank's parts to it. Parts without a gather dimension are equal on all
    ranks."""
    shapes, dtypes, dims = zip(*kinds, strict=True)
    made = moves.lease(shapes, dtypes, dims)
    for i, (mine, (shape, dtype, dim)) in enumerate(zip(made.mine, kinds, strict=True)):
        mine.copy_(content(seed, shape, dtype, i, 0 if dim is None else moves.rank))
    return made


def gathered(moves: Transport, seed: int, kinds: Kinds) -> list[Tensor]:
    found = []
    for i, (shape, dtype, dim) in enumerate(kinds):
        parts = [content(seed, shape, dtype, i, rank) for rank in range(moves.world)]
        found.append(parts[0] if dim is None else torch.cat(parts, dim))
    return found


def outgoing(moves: Transport, seed: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Return the tensor [R, *shape] of which `rank` sends chunk r to rank r."""
    return torch.stack([content(seed, shape, dtype, rank, to) for to in range(moves.world)])


def random_operations(seed: int, count: int) -> int:
    """Run random passes of two kinds over two transports; return the number of errors.

    Each pass has one to three operations: gathers and exchanges, in one or two pieces, and agreements. Output buffers
    of gathers may be taken before another gather starts, and single ranks are delayed at random.
    """
    both, draw, mine = (
        [make_transport(), make_transport()],
        random.Random(seed),
        random.Random(seed + dist.get_rank() + 1),
    )
    wrong = 0
    for turn in range(0, 10 * count, 10):
        moves = draw.choice(both)
        moves.start(draw.choice(["column", "row"]))
        leased = []
        for step in range(draw.randint(1, 3)):
            falls_behind(mine)
            name, now = draw.choice(["gather", "pieces", "exchange", "agree"]), turn + step
            shape, dtype = (draw.randint(1, 40), draw.randint(1, 40)), draw.choice(DTYPES)
            if name == "agree":
                values = [content(now, size, torch.float32, moves.rank) for size in ((), shape[:1])]
                largest = moves.agree(values)
                for size, one in zip(((), shape[:1]), largest, strict=True):
                    every = [content(now, size, torch.float32, rank) for rank in range(moves.world)]
                    wrong += not torch.equal(one, torch.stack(every).amax(0))
            elif name == "exchange":
                arrived = exchange(moves, outgoing(moves, now, shape, dtype, moves.rank), draw.randrange(shape[0]))
                falls_behind(mine)
                expected = [content(now, shape, dtype, rank, moves.rank) for rank in range(moves.world)]
                wrong += not torch.equal(arrived, torch.stack(expected))
            elif name == "pieces":
                made, cut = lease(moves, now, [(shape, dtype, 0)]), draw.randint(0, shape[0])
                made.send(((0, cut), (cut, shape[0])))
                (expected,) = gathered(moves, now, [(shape, dtype, 0)])
                (first,) = made.others(0)
                rows = [
                    rank * shape[0] + row for rank in range(moves.world) if rank != moves.rank for row in range(cut)
                ]
                wrong += not torch.equal(first[rows], expected[rows])
                wrong += not torch.equal(made.all_parts()[0], expected)
            else:
                kinds: Kinds = [(shape, dtype, draw.choice([0, 1])), ((draw.randint(1, 9),), torch.float32, 0),
                                ((), torch.float32, None)]  # fmt: skip
                leased.append((lease(moves, now, kinds), gathered(moves, now, kinds)))
            while leased and draw.random() < 0.6:
                wrong += arrives(*leased.pop(0), mine)
        wrong += sum(arrives(*each, mine) for each in leased)
        moves.finish()
    return wrong


def arrives(made: Gathering, expected: list[Tensor], mine: random.Random) -> int:
    arrived = made.gather().wait()
    falls_behind(mine)  # so that other ranks may start the next transfer before this rank reads
    return sum(not torch.equal(there, here) for there, here in zip(arrived, expected, strict=True))


def falls_behind(mine: random.Random) -> None:
    if mine.random() < 0.03:
        time.sleep(mine.random() / 50)


def checked_operations(seed: int, count: int) -> tuple[int, list[int], int]:
    """Run random operations with checksums at sender and receiver, and then some without. Return the number of errors; the
    number of checked transfers, counted after the first and after the second group of operations; and the number of
    transfers whose checksums differ."""
    transfers = []
    with WireChecks() as checks:
        wrong = random_operations(seed, count)
    transfers.append(len(checks._transfers[dist.group.WORLD]))
    wrong += random_operations(seed, 5)
    transfers.append(len(checks._transfers[dist.group.WORLD]))
    return wrong, transfers, len(checks.damaged())


@pytest.mark.ranks(2)
def test_sums_of_random_transfers_agree(ranks):
    for wrong, transfers, damaged in ranks(2).run(checked_operations, 2, 40):
        assert (wrong, damaged) == (0, 0)
        assert transfers[0] == transfers[1] >= 40, "outside of the context no transfer is summed"


@pytest.mark.parametrize(("world", "count"), [(2, 250), nightly(2, 500), nightly(4, 125)])
def test_random_transfers_arrive(ranks, device_type, share_gpu, world, count):
    """On separate GPUs, ten times as many passes run."""
    times = count if device_type == "cpu" or share_gpu else 10 * count
    assert ranks(world).run(random_operations, 1, times, timeout=600.0) == [0] * world


def freed_unread(slot: SimulatedSlot) -> None:
    CudaSlot.wait(slot)
    CudaSlot.release(slot)


CARELESS = {  # Faults. SharedSlot: ranks do not wait for readers. SimulatedSlot: ranks release a slot before they read it
    SharedSlot: patch.object(SharedSlot, "begin", lambda slot, use: None),
    SimulatedSlot: patch.multiple(SimulatedSlot, wait=freed_unread, release=lambda slot: None),
}


def a_late_reader(kind: Any, careful: bool) -> int:
    """Let rank 1 read each exchange late, while rank 0 starts the next exchange; return the number of wrong results.
    `careful` = False: plant the fault in CARELESS."""
    wrong, simulated = 0, kind is SimulatedSlot
    with emulation() if simulated else nullcontext(), nullcontext() if careful else CARELESS[kind]:
        lane = SimulatedLane() if simulated else None
        moves = make_transport() if kind is CudaSlot else Transport(dist.group.WORLD, worker.device(), kind, lane)
        for turn in range(10):
            moves.start()
            arrived = exchange(moves, outgoing(moves, turn, (8,), torch.float32, moves.rank))
            if moves.rank == 1:
                time.sleep(0.01)
            expected = [content(turn, (8,), torch.float32, rank, moves.rank) for rank in range(moves.world)]
            wrong += not torch.equal(arrived, torch.stack(expected))
            moves.finish()
        dist.barrier()
    return wrong


@pytest.mark.ranks(2)
def test_a_slot_is_not_written_before_its_readers_are_done(ranks, device_type):
    for kind in CARELESS if device_type == "cpu" else (CudaSlot,):
        assert ranks(2).run(a_late_reader, kind, True) == [0, 0]
        if device_type == "cpu":
            assert ranks(2).run(a_late_reader, kind, False)[1] > 0, "a late reader would see what comes next"


def told(ended: bool) -> str | None:
    """Return the result of `transport.complaint`. `ended`: pretend that a kernel has given up waiting in a slot."""
    moves = make_transport()
    moves.start("row", ("down", "backward"))
    moves.agree([torch.ones((), device=worker.device())])
    transport.use(dist.group.WORLD, moves)
    (slot,) = moves.slots
    found = (Wait(1, 0, 2, moves._number(0)), 7, 6) if ended else None
    with patch.object(type(slot), "complaint", lambda slot: found):
        said = transport.complaint()
    transport.destroy()
    return said


@pytest.mark.ranks(2)
def test_a_complaint_is_found_in_whatever_slot_it_is(ranks):
    said = "rank 1 has waited 600 s for rank 0, which has not agreed (an agreement of down in backward, use 7, "
    for each in ranks(2).run(told, True):
        assert each.startswith(f"{said}last seen 6)")
    assert ranks(2).run(told, False) == [None] * 2


def who_waits(others: bool) -> list[list[str]]:
    """Return the descriptions of waits that both ranks read after each action: while rank 0 sends a transfer in two
    pieces and rank 1 is late or (`others`) runs another layer, and after both have read and signalled."""
    on_cpu = worker.device().type == "cpu"
    lane = SimulatedLane(0.001)
    with emulation() if on_cpu else nullcontext():
        moves = Transport(dist.group.WORLD, worker.device(), SimulatedSlot, lane) if on_cpu else make_transport()
        transport.use(dist.group.WORLD, moves)
        cuts, parts = ((0, 2), (2, 4)), [((4,), torch.float32, 0)]
        moves.start("row")
        lease(moves, 0, parts).send(cuts).others()  # all ranks allocate slots at once
        moves.finish()
        dist.barrier()
        moves.start("row", ("up" if others and moves.rank else "down", "forward"))
        leased, found = lease(moves, 1, parts), []

        def look() -> None:
            if on_cpu:
                lane.stands()
            else:
                time.sleep(0.05)
            dist.barrier()
            found.append(transport.waits())
            assert moves.waits(own=True) == [said for said in found[-1] if f"bytes: rank {moves.rank} waits" in said]
            dist.barrier()

        if moves.rank == 0:
            leased.send(cuts)
        look()
        if moves.rank == 1:
            leased.send(cuts)
        leased.others()
        look()
        moves.finish()
        look()
        transport.destroy()
        lane.end()
    return found


@pytest.mark.ranks(2)
def test_who_waits_for_whom_is_read_while_they_wait(ranks):
    """The descriptions of waits name layer, pass, transfer and piece."""
    slot = "{} of down in forward, a slot of 65536 bytes: rank {} waits for rank {}, which {}"
    found = ranks(2).run(who_waits, False)
    piece, whole = "piece 1 of transfer 1", "transfer 1"
    assert slot.format(piece, 0, 1, "has not sent its part") in found[0][0]
    assert any(said.startswith("a transfer that rank 1 has not run yet (") for said in found[1][0]), (
        "it has not come to pieces"
    )
    for _, unread, nobody in found:
        assert set(unread) == {
            slot.format(what, a, 1 - a, "has not read the previous transfer") for what in (piece, whole) for a in (0, 1)
        }
        assert nobody == []


@pytest.mark.ranks(2)
def test_ranks_in_different_layers_are_told(ranks):
    (late, *_), (seen_by_other, *_) = ranks(2).run(who_waits, True)
    assert any(
        "transfer 1 of down in forward, a slot of" in said
        and "and is at a transfer that rank 0 has not run yet (" in said
        for said in late
    )
    assert any("transfer 1 of up in forward, a slot" in said for said in seen_by_other)


def test_an_agreement_waits_for_who_has_not_come():
    headers = [[0] * (slots.HEADER // 4) for _ in range(3)]
    for rank in (0, 1):  # ranks 0 and 1 have reached their third transfer, rank 2 has not
        headers[rank][slots.USES] = 2
        for peer in (0, 1, 2):
            headers[peer][slots.MET + rank] = 3
    for rank in (0, 1, 2):
        headers[rank][slots.MET + 2] = 2
    headers[2][slots.USES] = 2
    assert slots.waiting(headers) == [Wait(0, 2, 2, 3), Wait(1, 2, 2, 3)], "agreement 3"


def described() -> list[str]:
    transport.destroy()
    before = transport.describe("tp", dist.group.WORLD)
    transport.ask_for(dist.group.WORLD, worker.device().type)
    said = [before, transport.describe("tp", dist.group.WORLD)]
    transport.destroy()
    return said


@pytest.mark.ranks(2)
def test_a_group_says_how_it_sends_and_why(ranks, device_type):
    asked = (
        "gloo (the ranks are on CPUs)"
        if device_type == "cpu"
        else "mapped memory (both ranks on this host, peer access)"
    )
    for before, after in ranks(2).run(described):
        assert (
            "(transport = 'nccl', or the mesh was not made by dlp.build_mesh)" in before and after == f"tp 2: {asked}"
        )


@pytest.mark.parametrize(("backends", "said"), [("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo,cuda:gloo", "gloo")])
def test_it_says_who_carries_cuda_tensors(backends: str, said: str):
    group: Any = SimpleNamespace(group_name="", size=lambda: 4)
    with patch.object(dist, "get_backend_config", lambda group: backends):
        line = transport.describe("tp", group)
    assert line.startswith(f"tp 4: {said} (transport = 'nccl'")


def test_a_later_process_group_of_equal_name_has_no_transport_of_a_destroyed_one():
    found = []
    for earlier in (object(), None):
        group = dlp.build_mesh(device_type="cpu")["tp"].get_group()
        found.append((group.group_name, transport.transport_of(group)))
        transport.use(group, earlier)
        dist.destroy_process_group()
    transport.destroy()
    assert found[0] == found[1] and found[1][1] is None


def required() -> str:
    transport.destroy()
    try:
        return may_raise(ValueError, dlp.build_mesh, tp=2, device_type="cpu", transport="mapped")
    finally:
        transport.destroy()


@pytest.mark.ranks(2)
def test_mapped_memory_that_cannot_be_had_is_refused(ranks):
    expected = (
        "transport = 'mapped': the 2 ranks of a group cannot map each other's memory: the ranks are on CPUs; set transport = "
        "'auto' or 'nccl'"
    )
    assert ranks(2).run(required) == [expected] * 2


def nan_and_inf() -> list[Tensor]:
    moves = make_transport()
    mine = torch.tensor([[1.0, 2.0, float("nan"), 4.0], [3.0, float("inf"), 0.0, 4.0]])[moves.rank].to(worker.device())
    return moves.agree([mine, mine[1]])


@pytest.mark.ranks(2)
def test_an_agreement_is_the_largest_and_nan_is_larger_than_all(ranks):
    for all_of, one in ranks(2).run(nan_and_inf):
        assert all_of[:2].tolist() == [3.0, float("inf")] and bool(all_of[2].isnan()) and all_of[3] == 4.0
        assert one == float("inf")


def one_stays_away() -> str:
    with patch.object(slots, "PATIENCE", 0.3):
        moves = make_transport()
        moves.start("row")
        lease(moves, 1, [((4,), torch.float32, 0)]).gather().wait()
        moves.finish()
        moves.start("row", ("down", "forward"))
        if moves.rank == 1:
            return ""
        return may_raise(RuntimeError, lambda: lease(moves, 2, [((4,), torch.float32, 0)]).gather().wait())


@pytest.mark.ranks(2)
def test_a_rank_that_stays_away_is_named(ranks, device_type):
    if device_type == "cuda":
        pytest.skip("a wait that is too long ends the process: tests/gpu")
    said, _ = ranks(2).run(one_stays_away)
    assert (
        "rank 0 has waited 0.3 s for rank 1, which has not sent its part (transfer 1 of down in forward, use 2, last seen 1)"
        in said
    )


def sum_of(moves: Transport, x: Tensor) -> Tensor:
    """Reduce-scatter x [R, m, n] (R ranks) by launches that can be recorded: return the sum over ranks of the chunk
    [m, n] for this rank."""
    return ops.sum_in_order(exchange(moves, x), x.dtype)


def recorded_and_captured() -> list[bool]:
    """Record a reduce-scatter and an agreement as one call, and capture both in a CUDA graph; replay each on other
    values. Return whether each result is correct."""
    moves, found = make_transport(), []
    x, amax = torch.empty(moves.world, 64, 256, device="cuda"), torch.empty((), device="cuda")

    def run() -> list[Tensor]:
        moves.start()
        made = [sum_of(moves, x), *moves.agree([amax])]
        moves.finish()
        return made

    def refill(turn: int) -> list[Tensor]:
        every = [content(turn, tuple(x.shape), torch.float32, rank) for rank in range(moves.world)]
        x.copy_(every[moves.rank])
        amax.fill_(float(turn + moves.rank))
        return [
            torch.stack([one[moves.rank] for one in every]).sum(0),
            torch.tensor(float(turn + moves.world - 1), device="cuda"),
        ]

    def check(turn: int, run: Callable[[], Sequence[Tensor]]) -> None:
        expected = refill(turn)
        found.extend(map(torch.equal, run(), expected))

    for turn in range(3):
        check(turn, run)
    made = captured.record(run, [x, amax], moves.memory)
    for turn in range(10, 20):
        check(turn, lambda: made([x, amax]))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = made([x, amax])

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    for turn in range(30, 40):
        check(turn, replay)
        check(turn + 100, lambda: made([x, amax]))
    return found


@pytest.mark.ranks(2)
def test_transfers_are_recorded_and_captured(ranks, device_type):
    if device_type != "cuda":
        pytest.skip("needs GPUs: launches are recorded")
    for found in ranks(2).run(recorded_and_captured):
        assert found == [True] * 66


def taken_down() -> list[list[tuple[Any, ...]]]:
    """Record the launches of a pass before and after other passes have run; return both recordings without
    addresses."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), SimulatedSlot, SimulatedLane())
        x, amax, found = torch.ones(moves.world, 64), torch.ones(()), []

        def run() -> None:
            moves.start("row", ("down", "backward"))
            lease(moves, 1, [((4, 8), torch.float32, 0)]).send(((0, 2), (2, 4))).all_parts()
            exchange(moves, x)
            moves.agree([amax])
            moves.finish()

        for _ in range(2):
            for _ in range(3):
                run()
            with recording() as launched:
                run()
            found.append([(name, *without_addresses(arguments), lane) for name, arguments, lane in launched])
    return found


def without_addresses(arguments: Sequence[Any]) -> list[Any]:
    return [
        without_addresses(each) if isinstance(each, tuple) else "address" if each >= 1 << 32 else each
        for each in arguments
    ]


@pytest.mark.ranks(2)
def test_replays_need_no_number_of_the_host(ranks, device_type):
    """The recordings are equal: arguments of launches contain no counter of uses, so a captured pass or a CUDA graph
    can be replayed unchanged."""
    if device_type == "cuda":
        pytest.skip("emulated on CPU ranks; GPUs replay in test_transfers_are_recorded_and_captured")
    for first, again in ranks(2).run(taken_down):
        assert first == again and {"begin_use", "push_part", "meet", "agree", "release_use"} <= {
            name for name, *_ in first
        }


def mapped_memory() -> list[int]:
    """Return the bytes of mapped memory after passes with two transfers, the first of which is sent in one piece or in
    two."""
    moves = make_transport()
    for turn in range(30):
        moves.start()
        cuts = ((0, 500), (500, 1000)) if turn % 2 else WHOLE
        lease(moves, turn, [((1000,), torch.float32, 0)]).send(cuts).all_parts()
        exchange(moves, outgoing(moves, turn, (30000 + turn,), torch.float32, moves.rank))
        moves.finish()
    return [memory.nbytes for memory in moves.memory]


@pytest.mark.ranks(2)
def test_memory_does_not_grow_with_use(ranks):
    for sizes in ranks(2).run(mapped_memory):
        assert sizes == [1 << 16, 1 << 18, 1 << 16], "of transfers, and of a piece"


def test_a_flag_that_nobody_awaited_is_noticed_where_transfers_are_simulated():
    headers = torch.zeros(2, slots.HEADER // 4, dtype=torch.int32)
    mine, its = (header.data_ptr() for header in headers)
    words = (mine, its, *[0] * (slots.RANKS - 2), 0, 2)
    with pytest.raises(AssertionError, match="rank 0 releases what rank 1 has not begun"):
        simulated_transport.release_use(words, 0)
    headers[1, slots.SENT] = 5
    with pytest.raises(AssertionError, match="rank 1 did not await what rank 0 sent before"):
        simulated_transport.meet(words, 6, 0)
