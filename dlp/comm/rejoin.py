"""The store of ranks that torchrun may have started anew.

torchrun's agents keep one store for all attempts, and torch writes the same keys into it each time: ranks of a second attempt
would read where those of the first have listened, and wait half an hour for them. How often ranks were started is counted
by each agent for itself, so no number that they are given tells attempts apart. So they agree on a name that is new, and the
group's keys stand under it:

    rank 0     session = S, a name that it has just made
    rank r     reads S, and writes joined/r = S and a name that it has just made; again whenever it reads another S
    rank 0     once every joined/r begins with S: confirmed/S = the names of all
    rank r     S is of this attempt if its own name is among them
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = 600.0  # seconds that ranks may start apart
LOOK = 0.02  # seconds between two looks


def store_of_attempt() -> dist.Store | None:
    """Where the keys of this attempt's group stand, if agents of torchrun keep one store for all attempts; None elsewhere:
    torch finds the store then. TimeoutError naming who has not come."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=distributed_c10d.default_pg_timeout)
    return dist.PrefixStore(agreed(dist.PrefixStore("rejoin", store), rank, world), store)


def agreed(store: dist.Store, rank: int, world: int, patience: float = PATIENCE) -> str:
    """The name of this attempt, equal on all its ranks and on those of no other attempt. TimeoutError after so many
    seconds."""
    mine = uuid.uuid4().hex
    if rank:
        return _until(_Told(store, rank, mine), patience, "not all ranks have come")
    store.set("session", mine)

    def joined(other: int) -> str:
        read, _, name = _value(store, f"joined/{other}").partition(" ")
        return name if read == mine else ""

    names = [_until(partial(joined, other), patience, f"rank {other} has not come") for other in range(1, world)]
    store.set(f"confirmed/{mine}", " ".join(names))
    return mine


class _Told:
    """On another rank than 0: the session that knows its name, or none yet."""

    def __init__(self, store: dist.Store, rank: int, mine: str) -> None:
        self.store, self.rank, self.mine, self.read = store, rank, mine, ""

    def __call__(self) -> str:
        session = _value(self.store, "session")
        if session != self.read:
            self.store.set(f"joined/{self.rank}", f"{session} {self.mine}")
            self.read = session
        return session if self.mine in _value(self.store, f"confirmed/{session}").split() else ""


def _value(store: dist.Store, key: str) -> str:
    """What stands there; empty where nothing does."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _until(found: Callable[[], str], patience: float, missing: str) -> str:
    end = time.monotonic() + patience
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"{missing} within {patience:g} s; start every host, or read what their torchrun says")
        time.sleep(LOOK)
    return value
