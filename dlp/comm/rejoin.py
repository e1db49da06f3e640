"""Key-value store (`dist.Store`) for the process group of ranks that torchrun may have restarted.

torchrun's agents use one store for all attempts, and torch writes the same keys in each attempt: ranks of a second attempt
would read the addresses of the first attempt, and wait half an hour for an answer. Each agent counts restarts separately:
torchrun gives the ranks no number that identifies an attempt. The ranks therefore agree on a new name S, which becomes
the prefix of the group's keys:

    rank 0     sets session = S, a new random name
    rank r     reads S, and sets joined/r = "S N", where N is a random name of this process; repeats this if session changes
    rank 0     sets confirmed/S = the names N of all other ranks, as soon as every joined/r begins with S
    rank r     uses S if confirmed/S contains its N
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = 600.0  # seconds that a rank waits for the other ranks to start
LOOK = 0.02  # seconds between two reads of a key


def store_of_attempt() -> dist.Store | None:
    """Return the store for the process group of this attempt if torchrun's agents use one store for all attempts.

    Returns None in all other cases, in which torch creates the store. Raises TimeoutError if a rank does not join."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=distributed_c10d.default_pg_timeout)
    return dist.PrefixStore(agreed(dist.PrefixStore("rejoin", store), rank, world), store)


def agreed(store: dist.Store, rank: int, world: int, patience: float = PATIENCE) -> str:
    """Return the name of this attempt, equal on all ranks and different from the names of other attempts.

    Raises TimeoutError if a rank has not joined after `patience` seconds."""
    mine = uuid.uuid4().hex
    if rank:
        read = ""

        def confirmed() -> str:
            """Return the name of the attempt, or "" if rank 0 has not confirmed this rank."""
            nonlocal read
            session = _value(store, "session")
            if session != read:
                store.set(f"joined/{rank}", f"{session} {mine}")
                read = session
            return session if mine in _value(store, f"confirmed/{session}").split() else ""

        return _until(confirmed, patience, "not all ranks have joined")
    store.set("session", mine)

    def joined(other: int) -> str:
        read, _, name = _value(store, f"joined/{other}").partition(" ")
        return name if read == mine else ""

    names = [_until(partial(joined, other), patience, f"rank {other} has not joined") for other in range(1, world)]
    store.set(f"confirmed/{mine}", " ".join(names))
    return mine


def _value(store: dist.Store, key: str) -> str:
    """Value of a key; "" if the key does not exist."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _until(found: Callable[[], str], patience: float, missing: str) -> str:
    end = time.monotonic() + patience
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(
                f"{missing} within {patience:g} s; start torchrun on every host, and read the output of "
                f"the hosts that fail"
            )
        time.sleep(LOOK)
    return value
