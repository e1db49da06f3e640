"""The search for races (tests/order.py) finds what is missing between launches that are in order as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dlp.comm.mapped import Transport
from dlp.kernels import cuda_codes, gemm_sm90, gemms
from dlp.kernels.gemms import Scales
from tests import order
from tests import pool as worker
from tests.emulated import emulation
from tests.played_transport import PlayedLane, PlayedSlot
from tests.touched import Launch, take


def moved() -> list[Launch]:
    """A gather in two pieces and an agreement, then sums, one in each direction, of what kernels made, which read what came: no
    other transfer orders the uses of the slot of sums."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), PlayedSlot, PlayedLane())
        x = torch.ones(moves.world, 64)
        with take(moves) as taken:
            moves.start()
            leased = moves.lease([(2 * len(x), 64)], [torch.float32], [0])
            cuda_codes.place_rows(torch.cat([x, x]), leased.mine[0])
            moves.kept(leased.send(((0, 2), (2, 4))).all_parts())
            amax = cuda_codes.copied_rows(x[:1, :1])
            cuda_codes.copied_rows(moves.agree([amax])[0])
            moves.finish()
            for _ in range(3):
                moves.start()
                sent = cuda_codes.copied_rows(x)
                (arrived,) = moves.open([sent.shape], [sent.dtype]).send_all([sent]).wait()
                cuda_codes.sum_in_order(arrived, x[0])
                moves.finish()
        return taken.named_alike()


def awaited_inside() -> list[Launch]:
    """Gathers whose rows a GEMM awaits itself, one after the other through one slot; nobody reads what came second."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), PlayedSlot, PlayedLane())
        rows, codes = gemm_sm90.PAIR[0], torch.float8_e4m3fn
        w, w_scale = torch.ones(8, 512).to(codes), torch.ones(1, 4)
        x = torch.zeros(rows, 512, dtype=torch.uint8), torch.ones(rows, 4)
        with take(moves) as taken:
            for turn in range(3):
                moves.start()
                leased = moves.lease([part.shape for part in x], [torch.uint8, torch.float32], [0, 0])
                for part, value in zip(leased.mine, x, strict=True):
                    cuda_codes.place_rows(value, part)
                a, scales = leased.send(in_turn=True).coming()
                run = gemm_sm90.while_arriving(a.view(codes), w, rows, torch.bfloat16, (scales, w_scale))
                assert run is not None
                if turn != 1:
                    run(leased.slot.arriving(rows))
                moves.finish()
        return taken.named_alike()


def sent_inside() -> list[Launch]:
    """Sums whose contributions a GEMM stores itself, one after the other through one slot, beside a gather on the lane; in the
    third one what is stored is pushed, as `chunked` does, into the same slot."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), PlayedSlot, PlayedLane())
        rows, codes, world = gemm_sm90.PAIR[0], torch.float8_e4m3fn, moves.world
        a, w = (torch.ones(count, 128).to(codes) for count in (world * rows, 8))
        scales = Scales(torch.ones(1, world * rows).t(), torch.ones(1, 4), gemms.BLOCK_1D, gemms.BLOCK_2D)
        x = torch.ones(world, rows, 8).bfloat16()
        with take(moves) as taken:
            for turn in range(4):
                moves.start()
                gathering = moves.gathering([cuda_codes.copied_rows(torch.ones(1, 64))], [0]).gather()
                exchange = moves.open([x.shape], [x.dtype], on_lane=turn == 2)
                if turn == 2:
                    arriving = exchange.send_all([cuda_codes.copied_rows(x.flatten(1)).view(x.shape)])
                else:
                    run = gemm_sm90.sending(a, w, rows, torch.bfloat16, scales)
                    assert run is not None
                    run(exchange.sending())
                    arriving = exchange.stored()
                gathering.wait()
                (arrived,) = arriving.wait()
                cuda_codes.sum_in_order(arrived, torch.empty_like(x[0]))
                moves.finish()
        return taken.named_alike()


def without(name: str, lane: bool) -> Callable[[list[Launch]], list[Launch]]:
    return lambda launches: [each for each in launches if (each.name, each.stream > 0) != (name, lane)]


def early(name: str) -> Callable[[list[Launch]], list[Launch]]:
    """Those of a name directly behind what their stream has awaited last."""

    def moved(launches: list[Launch]) -> list[Launch]:
        found: list[Launch] = []
        for each in launches:
            awaited = [i for i, other in enumerate(found) if other[:2] == ("await_mark", each.stream)]
            found.insert(awaited[-1] + 1 if each.name == name else len(found), each)
        return found

    return moved


def behind(name: str, other: str) -> Callable[[list[Launch]], list[Launch]]:
    """Those of a name behind the next ones of another."""

    def moved(launches: list[Launch]) -> list[Launch]:
        found, held = list[Launch](), list[Launch]()
        for each in launches:
            if each.name == name:
                held.append(each)
                continue
            found.append(each)
            if each.name == other:
                found, held = [*found, *held], []
        return found

    return moved


def renamed(name: str) -> Callable[[list[Launch]], list[Launch]]:
    """What waits by its name does not."""
    return lambda launches: [each._replace(name="reads") if each.name == name else each for each in launches]


MUTATIONS = {
    moved: {
        "pushed before it is written": without("await_mark", True), "read before it has come": without("await_mark", False),
        "peers not awaited": without("met", True), "readers not awaited": without("begin_use", True),
        "an agreement not awaited": renamed("agreed"), "told before it is sent": early("meet"),
        "freed before it is read": early("release_use"),
    },
    awaited_inside: {
        "rows not awaited": renamed("gemm_fp8_arriving"), "told before it is sent": early("tell"),
        "nobody told": without("tell", True), "not forgotten": without("forget_sent", False),
        "forgotten before all have told": without("await_sent", True),
        "forgotten before the lane has seen it": without("await_mark", False),
        "forgotten behind the release": behind("forget_sent", "release_use"),
        "freed before it is read": early("release_use"), "readers not awaited": without("begin_use", True),
        "pushed before it is written": without("await_mark", True),
    },
    sent_inside: {
        "told before it is stored": behind("gemm_fp8_sending", "meet"), "readers not awaited": without("begin_use", False),
        "readers awaited behind": behind("begin_use", "gemm_fp8_sending"),
        "peers not awaited": without("met", True), "read before it has come": without("await_mark", False),
        "freed before it is read": early("release_use"), "told before the kernel ends": without("await_mark", True),
    },
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("made", MUTATIONS, ids=lambda made: made.__name__)
def test_what_is_missing_is_found(ranks, device_type, made):
    if device_type == "cuda":
        pytest.skip("played on CPU ranks")
    taken = ranks(2).run(made)
    assert order.disorder(taken) == []
    for name, mutate in MUTATIONS[made].items():
        assert order.disorder([mutate(launches) for launches in taken]), name
