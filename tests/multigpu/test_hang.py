"""A hanging rank ends the run, with a message that names the step and layer of each rank. A rank that is slow but makes
progress does not end the run."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlp.comm import transport
from dlp.comm.mapped import Transport
from dlp.comm.watch import READING, within
from launch.ranks.hang_watch import HangWatch, Place
from launch.ranks.process_exit import StopFlag
from tests import pool as worker
from tests.emulated import emulation
from tests.simulated_transport import SimulatedLane, SimulatedSlot

pytestmark = pytest.mark.slow

AFTER = 0.5  # seconds


def watched(name: str, works: bool) -> list[str] | None:
    """Let rank 0 wait in a barrier for rank 1, which hangs in one step or, if `works`, is slow but reports new steps;
    return the report of the hang watch on rank 0, or None if there is none."""
    told: list[list[str]] = []
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store().clone())
    places = iter(range(10**6))
    leader = dist.get_rank() == 0
    watch = HangWatch(
        store,
        AFTER,
        lambda: Place(f"step {next(places) if works and not leader else 3}, last layer up", slow=False),
        told.append,
        lambda: ["transfer 1 of row: rank 0 waits for rank 1"],
    )
    watch.look()
    dist.barrier()
    if leader:
        watch.start()
    end = time.monotonic() + 4 * AFTER
    while not leader and time.monotonic() < end:
        time.sleep(0.05)
        if works:
            watch.look()
    dist.barrier()
    if leader:
        watch.stop()
        assert not watch._thread.is_alive(), "it would be in the store while the interpreter ends"
    return told[0] if told else None


@pytest.mark.ranks(2)
def test_a_hanging_rank_is_noticed_with_the_place_of_each(ranks, tmp_path):
    said, _ = ranks(2).run(watched, f"hangs {tmp_path}", False)
    assert len(said) == 2
    assert said[0].startswith("rank 0: step 3, last layer up, in ") and said[1].startswith(
        "rank 1: step 3, last layer up, in"
    )
    assert "barrier (distributed_c10d.py" in said[0] and said[0].endswith(
        ", for 1 s; transfer 1 of row: rank 0 waits for rank 1"
    )


def broken() -> list[str]:
    raise RuntimeError("CUDA error: an illegal access\nand more")


def test_reading_what_hangs_does_not_hang():
    assert within(1.0, lambda: ["rank 0 waits"]) == ["rank 0 waits"]
    assert within(1.0, broken) == ["the waits of the GPUs cannot be read: CUDA error: an illegal access"]
    (said,) = within(0.05, lambda: [str(time.sleep(0.3))])
    assert said == "the waits of the GPUs could not be read within 0.05 s"


@pytest.mark.ranks(2)
def test_waiting_for_a_rank_that_works_is_no_hang(ranks, tmp_path):
    assert ranks(2).run(watched, f"works {tmp_path}", True)[0] is None


def killed_inside(file: Path) -> None:
    """Kill rank 1 within a transfer. Rank 0 waits for rank 1 until the test sends SIGTERM, as torchrun would, and writes its
    error output to `file`."""
    with emulation():
        moves = Transport(dist.group.WORLD, worker.device(), SimulatedSlot, SimulatedLane())
        transport.use(dist.group.WORLD, moves)
        StopFlag(0.5, partial(within, READING, transport.waits)).watch()
        moves.start("row", ("down", "forward"))
        leased = moves.lease([(4, 4)], [torch.float32], [0])
        if moves.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with file.open("w") as sys.stderr:
            leased.send().others()


def test_who_waits_for_a_rank_that_was_killed_says_so_and_ends(tmp_path, device_type):
    if device_type == "cuda":
        pytest.skip("emulated on CPU ranks")
    pool, file = worker.Pool(2), tmp_path / "said"
    pool._start()
    survivor, victim = pool._workers
    for rank in (survivor, victim):
        rank.jobs.send_bytes(pickle.dumps((killed_inside, (file,))))
    victim.process.join(30)
    while not file.exists():
        time.sleep(0.01)
    os.kill(survivor.process.pid or 0, signal.SIGTERM)
    survivor.process.join(10)
    assert (survivor.process.exitcode, victim.process.exitcode) == (128 + signal.SIGTERM, -signal.SIGKILL)
    awaited = (
        "transfer 1 of down in forward, a slot of 65536 bytes: rank 0 waits for rank 1, which has not sent its part"
    )
    assert file.read_text().startswith(
        f"no step boundary within 0.5 s of SIGTERM, for example because a peer has exited; {awaited}; "
    )
    pool.kill()
