"""The pool of ranks: results are returned in the order of ranks, an error has the traceback of the rank that failed,
and the job after a failure works."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import pool as worker
from tests import shared_gpu
from tests.pool import RankError


def rank_sum(extra: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + extra], device=worker.device())
    dist.all_reduce(total)
    return os.getpid(), total


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the number is 17")
    dist.barrier()


def one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_dies_after_the_other_raised() -> None:
    dist.barrier()  # so that rank 1 dies within the pool's grace of 0.5 s, also on a busy machine
    if dist.get_rank() == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConnectionError("closed by peer")


def one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def mesh_is_cached() -> bool:
    return worker.mesh(tp=2, dp_shard=1) is worker.mesh(dp_shard=1, tp=2)


def sent_through_the_host() -> list[float]:
    """Send two tensors to the next rank, and receive two from the previous rank, in host memory; return their means."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, came = [torch.full((3,), 10.0 * rank + i) for i in range(2)], [torch.zeros(3) for _ in range(2)]
    works = shared_gpu.staged([
        *(dist.P2POp(dist.isend, part, group=dist.group.WORLD, group_peer=(rank + 1) % world) for part in sent),
        *(dist.P2POp(dist.irecv, part, group=dist.group.WORLD, group_peer=(rank - 1) % world) for part in came),
    ])  # fmt: skip
    assert not any(part.any() for part in came), "it comes when it is awaited"
    for work in works:
        work.wait()
    return [part.mean().item() for part in came]


def random_and_threads() -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_answers_and_workers_are_kept(ranks, world):
    first, second = (ranks(world).run(rank_sum, 10) for _ in range(2))
    expected = world * (world - 1) // 2 + 10 * world
    assert [total.item() for _, total in first] == [expected] * world
    assert all(total.device.type == "cpu" for _, total in first)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == world


def state_of(pid: int) -> str:
    """State of a process in /proc: "T" if the process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.ranks(2)
def test_workers_are_stopped_between_jobs_and_replaced_when_they_have_many_threads(ranks, device_type):
    if device_type == "cuda":
        pytest.skip("threads of gloo poll on CPU ranks")
    pool = ranks(2)
    first = [pid for pid, _ in pool.run(rank_sum, 0)]
    deadline = time.monotonic() + 5  # a signal takes effect when the process is scheduled
    while (states := [state_of(pid) for pid in first]) != ["T", "T"]:
        assert time.monotonic() < deadline, states
    pool.refresh()
    assert [pid for pid, _ in pool.run(rank_sum, 0)] == first
    with patch.object(worker, "MANY_THREADS", 1):
        pool.refresh()
    assert not {pid for pid, _ in pool.run(rank_sum, 0)} & set(first)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("job", "timeout", "message"),
    [
        (
            one_raises,
            60,
            r"(?s)rank 1 of 2 raised:\nTrace.*in one_raises.*ValueError: the number is 17\nrank 0 was still",
        ),
        (one_dies, 60, r"rank 1 of 2 died:\nthe process ended with exit code -9\n"),
        (one_dies_after_the_other_raised, 60, r"rank 1 of 2 died:\n.*\nrank 0 raised: ConnectionError: closed by peer"),
        (one_sleeps, 1, r"(?s)ranks \[1\] of 2 did not answer within 1 s\nrank 1 is at:.*in one_sleeps"),
    ],
    ids=["raises", "dies", "dies-late", "hangs"],
)
def test_a_failed_job_is_reported_soon_and_the_next_one_works(ranks, job, timeout, message):
    before = ranks(2).run(rank_sum, 0)
    started = time.monotonic()
    with pytest.raises(RankError, match=message):
        ranks(2).run(job, timeout=timeout)
    assert time.monotonic() - started < 15
    after = ranks(2).run(rank_sum, 0)
    assert [total.item() for _, total in after] == [1, 1]
    assert not {pid for pid, _ in before} & {pid for pid, _ in after}


@pytest.mark.ranks(2)
def test_a_job_that_cannot_be_sent_leaves_the_pool_alone(ranks):
    before = ranks(2).run(rank_sum, 0)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        ranks(2).run(lambda: None)
    assert [pid for pid, _ in before] == [pid for pid, _ in ranks(2).run(rank_sum, 0)]


@pytest.mark.ranks(2)
def test_jobs_start_from_the_same_seed_on_one_thread(ranks):
    first, second = (ranks(2).run(random_and_threads) for _ in range(2))
    assert first == second == [first[0]] * 2
    assert first[0][1] == 1


@pytest.mark.ranks(2)
def test_meshes_are_cached_in_the_worker(ranks):
    assert ranks(2).run(mesh_is_cached) == [True, True]


@pytest.mark.ranks(2)
def test_what_gloo_does_not_send_from_gpus_goes_through_the_host(ranks):
    assert ranks(2).run(sent_through_the_host) == [[10.0, 11.0], [0.0, 1.0]]
