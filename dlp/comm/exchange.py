"""Exchange by sends and receives of NCCL or gloo: each rank sends parts to every other rank, to one rank in each round.

    round j (1 ... R-1)    this rank sends to rank + j and receives from rank - j, modulo the number of ranks R

Round j may start while the parts of later rounds are still being computed, and the parts of each rank can be used as soon as
they have arrived. All ranks must start the same rounds of the same exchanges in the same order.

Each round is a call between launches (`dlp.kernels.launches.call`), so that a pass with an exchange can be captured. If ranks
map each other's memory, `dlp.comm.transfers` is used in place of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Parts
from dlp.comm.wire_checks import WireChecks
from dlp.kernels.launches import call


def by_distance(group: ProcessGroup) -> Iterator[tuple[int, int, int]]:
    """Return (distance, rank to send to, rank to receive from) for each round. The ranks are indices in the group."""
    rank, world = group.rank(), group.size()
    return ((j, (rank + j) % world, (rank - j) % world) for j in range(1, world))


class DirectExchange:
    """Exchange by `batch_isend_irecv`.

    sets        number of sets of outgoing parts: 1 if all ranks receive the same parts, or R, with set i for rank i
    outgoing    memory of the sets, which the caller writes before a round. The set for this rank (with one set, the only set)
                is a view of `arrived`
    arrived     [R, *shape] for each part; row i is from rank i
    """

    def __init__(
        self, group: ProcessGroup, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], sets: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.group = group
        parts = list(zip(shapes, dtypes, strict=True))
        self.arrived = tuple(torch.empty((group.size(), *s), dtype=dtype, device=device) for s, dtype in parts)
        own = tuple(part[group.rank()] for part in self.arrived)
        self.outgoing: list[Parts] = [
            own if i == group.rank() % sets else tuple(torch.empty(s, dtype=dtype, device=device) for s, dtype in parts)
            for i in range(sets)
        ]
        self._works: dict[int, list[Any]] = {}

    def start_round(self, distance: int) -> None:
        """Start round `distance`, after the caller has written the parts to send. Every rank starts all rounds in order."""
        to, source = ((self.group.rank() + sign * distance) % self.group.size() for sign in (1, -1))
        sent = [part for part in self.outgoing[to % len(self.outgoing)] if part.numel()]
        received = [part[source] for part in self.arrived if part[source].numel()]
        if sent:
            works = call(partial(_start_round, self.group, to, source), *sent, *received)
            if WireChecks.active is not None:
                works = [*works, WireChecks.active.sends(self.group, {to: sent}, {source: received})]
            self._works[source] = works

    def wait(self, source: int) -> None:
        """Make the current stream wait for the parts from rank `source`. Must be called for every other rank."""
        for work in self._works.pop(source, []):
            work.wait()


def _start_round(group: ProcessGroup, to: int, source: int, *tensors: Tensor) -> list[Any]:
    """Send the first half of the tensors to rank `to`, receive the second half from rank `source`, and return the works."""
    half = len(tensors) // 2
    sends = [dist.P2POp(dist.isend, part, group=group, group_peer=to) for part in tensors[:half]]
    receives = [dist.P2POp(dist.irecv, part, group=group, group_peer=source) for part in tensors[half:]]
    return dist.batch_isend_irecv(sends + receives)
