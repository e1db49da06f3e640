"""The store of ranks that torchrun may have restarted.

torchrun's agents keep one store for all attempts, and torch writes the same keys in each attempt: ranks of a second attempt
would read the addresses of the first attempt, and wait half an hour for an answer. Each agent counts restarts separately, so
that no number given to the ranks identifies an attempt. The ranks therefore agree on a new name, which becomes the prefix of
the group's keys:

    rank 0     session = S, a new random name
    rank r     reads S, and writes joined/r = S and a new random name; again whenever it reads another S
    rank 0     once every joined/r begins with S: confirmed/S = the names of all ranks
    rank r     S belongs to this attempt if confirmed/S contains this rank's name
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = 600.0  # seconds between the starts of the first and the last rank
LOOK = 0.02  # seconds between two reads


def store_of_attempt() -> dist.Store | None:
    """Store for the keys of this attempt's group, if torchrun's agents keep one store for all attempts. None elsewhere: torch
    then finds the store. Raises TimeoutError that names the missing rank."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=distributed_c10d.default_pg_timeout)
    return dist.PrefixStore(agreed(dist.PrefixStore("rejoin", store), rank, world), store)


def agreed(store: dist.Store, rank: int, world: int, patience: float = PATIENCE) -> str:
    """Return the name of this attempt, equal on all ranks and different from the names of other attempts.

    Raises TimeoutError after `patience` seconds."""
    mine = uuid.uuid4().hex
    if rank:
        return _until(_Told(store, rank, mine), patience, "not all ranks have joined")
    store.set("session", mine)

    def joined(other: int) -> str:
        read, _, name = _value(store, f"joined/{other}").partition(" ")
        return name if read == mine else ""

    names = [_until(partial(joined, other), patience, f"rank {other} has not joined") for other in range(1, world)]
    store.set(f"confirmed/{mine}", " ".join(names))
    return mine


class _Told:
    """Callable for ranks other than 0: return the session that lists this rank's name, or "" if there is none yet."""

    def __init__(self, store: dist.Store, rank: int, mine: str) -> None:
        self.store, self.rank, self.mine, self.read = store, rank, mine, ""

    def __call__(self) -> str:
        session = _value(self.store, "session")
        if session != self.read:
            self.store.set(f"joined/{self.rank}", f"{session} {self.mine}")
            self.read = session
        return session if self.mine in _value(self.store, f"confirmed/{session}").split() else ""


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
