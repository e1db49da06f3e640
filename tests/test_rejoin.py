"""Ranks that torchrun restarts find each other, and ignore keys of an earlier attempt in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dlp.comm.rejoin import agreed


def attempt(store: dist.Store, order: list[int]) -> set[str]:
    """Start ranks in the given order; return the names on which they agree."""

    def come(place: int) -> str:
        time.sleep(0.1 * place)
        return agreed(store, order[place], len(order), patience=20)

    with ThreadPoolExecutor(len(order)) as ranks:
        return set(ranks.map(come, range(len(order))))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["rank 0 first", "rank 0 last"])
def test_each_attempt_agrees_on_a_name_of_its_own(order):
    """If a rank starts before rank 0, the store has only the keys of the earlier attempt, which may have had another
    number of ranks. The rank must wait for the keys of the new attempt."""
    store = dist.HashStore()
    names = [attempt(store, ranks) for ranks in ([0, 1], order, order, [1, 0])]
    assert [len(each) for each in names] == [1, 1, 1, 1] and len(set.union(*names)) == 4


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    attempt(store, [0, 1])
    with pytest.raises(
        TimeoutError,
        match=r"^rank 1 has not joined within 0\.1 s; start torchrun on every host, and read the output of the hosts "
        r"that fail$",
    ):
        agreed(store, 0, 2, patience=0.1)
    with pytest.raises(TimeoutError, match=r"^not all ranks have joined within 0\.1 s; start torchrun on every host"):
        agreed(store, 1, 3, patience=0.1)
