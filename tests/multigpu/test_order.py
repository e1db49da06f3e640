"""The search for races (tests/launch_order.py) finds nothing in the launches of a correct pass, and reports a race if a
wait is removed from the launches or a launch is moved forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dlp.comm.mapped import Transport
from dlp.kernels import cuda_codes
from tests import launch_order
from tests import pool as worker
from tests.emulated import emulation
from tests.launch_trace import Launch, take
from tests.simulated_transport import SimulatedLane, SimulatedSlot


def moved() -> list[Launch]:
    """Run a pass with a gather in two pieces and an agreement, then three passes with a sum over ranks, and return the
    launches. Each of the last three passes has only one transfer, so only the waits of this transfer order the uses of
    its slot."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), SimulatedSlot, SimulatedLane())
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


def without(name: str, lane: bool) -> Callable[[list[Launch]], list[Launch]]:
    return lambda launches: [each for each in launches if (each.name, each.stream > 0) != (name, lane)]


def early(name: str) -> Callable[[list[Launch]], list[Launch]]:
    """Return a function that moves the launches with this name forward in their stream, to the position after the last wait
    for an event."""

    def moved(launches: list[Launch]) -> list[Launch]:
        found: list[Launch] = []
        for each in launches:
            awaited = [i for i, other in enumerate(found) if other[:2] == ("await_mark", each.stream)]
            found.insert(awaited[-1] + 1 if each.name == name else len(found), each)
        return found

    return moved


def renamed(name: str) -> Callable[[list[Launch]], list[Launch]]:
    """Return a function that replaces waiting launches with this name by launches that read the same bytes without waiting."""
    return lambda launches: [each._replace(name="reads") if each.name == name else each for each in launches]


MUTATIONS = {
    "pushed before it is written": without("await_mark", True), "read before it has come": without("await_mark", False),
    "peers not awaited": without("met", True), "readers not awaited": without("begin_use", True),
    "an agreement not awaited": renamed("agreed"), "told before it is sent": early("meet"),
    "freed before it is read": early("release_use"),
}  # fmt: skip


@pytest.mark.ranks(2)
def test_what_is_missing_is_found(ranks, device_type):
    if device_type == "cuda":
        pytest.skip("emulated on CPU ranks")
    taken = ranks(2).run(moved)
    assert launch_order.disorder(taken) == []
    for name, mutate in MUTATIONS.items():
        assert launch_order.disorder([mutate(launches) for launches in taken]), name
