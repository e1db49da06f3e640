"""Rendezvous backend of torchrun for one host, with a store that listens only on 127.0.0.1.

The stores of torchrun listen on every interface, even with --standalone: any process that reaches the port can read and write
the data that ranks exchange. After `meet_on_loopback()`, `--rdzv-backend=loopback` selects this backend.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND, HOST = "loopback", "127.0.0.1"


class Loopback(RendezvousHandler):
    """Rendezvous handler for a single torchrun agent. The agent hosts the store, and the ranks connect to it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listening = socket.create_server((HOST, 0))
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            HOST, self._port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listening.detach(),
        )  # fmt: skip

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(HOST, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def meet_on_loopback() -> None:
    """Register the backend in this process, and make gloo in the started ranks use the loopback interface unless
    GLOO_SOCKET_IFNAME is set."""
    rendezvous_handler_registry.register(BACKEND, _create)
    interfaces = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if interfaces:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[0])


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id or "run")
