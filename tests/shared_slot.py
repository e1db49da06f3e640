"""Stand-in for peer buffers of GPUs (`dlp.comm.slots`) between ranks on CPUs: files that the processes of one machine
map."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import slots
from dlp.comm.slots import HEADER, MAXIMA, RANKS, Named, Place, Wait, too_long


class SharedSlot:
    """Stand-in for a slot: each process maps the files of all ranks. Every call takes effect immediately."""

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device, named: Named, lane: None = None) -> None:
        self._rank, self._world, self._named, self._use, self._uses = group.rank(), group.size(), named, 0, 0
        self._ranks = dist.get_process_group_ranks(group)
        names = [tempfile.mktemp(prefix="dlp-slot-", dir="/dev/shm") if self._rank == 0 else ""]
        dist.broadcast_object_list(names, group=group, group_src=0)
        files = [f"{names[0]}-{rank}" for rank in range(self._world)]
        self.memory = [torch.from_file(file, shared=True, size=HEADER + nbytes, dtype=torch.uint8) for file in files]
        words = [whole[:HEADER].view(torch.int32) for whole in self.memory]
        self._released, self._met = [w[:RANKS] for w in words], [w[RANKS:] for w in words]
        self._payloads = [whole[HEADER:] for whole in self.memory]
        self.payload = self._payloads[self._rank]
        dist.barrier(group)
        if self._rank == 0:
            for file in files:
                os.unlink(file)

    def begin(self, use: int) -> None:
        self._use = use
        self._await(self._released[self._rank], 0)

    def follow(self) -> None:
        pass

    def push(self, part: Tensor, to: int, place: Place) -> None:
        offset, width, height, pitch = place
        rows = self._payloads[to][offset:].as_strided((height, width), (pitch, 1))
        rows.copy_(part.view(-1).view(torch.uint8).view(height, width))

    def keep(self, part: Tensor, place: Place) -> None:
        self.push(part, self._rank, place)

    def meet(self) -> None:
        self._uses += 1
        self._tell(self._met)
        self._await(self._met[self._rank], 1)

    def wait(self) -> None:
        pass

    def copied(self, part: Tensor) -> Tensor:
        return part.clone()

    def release(self) -> None:
        self._tell(self._released)

    def agree(self, observed: Sequence[Tensor], largest: Sequence[Tensor], use: int) -> None:
        mine = torch.cat([value.reshape(-1) for value in observed]).view(torch.int32)
        self.begin(use)
        for peer in self._peers():
            self.push(mine, peer, Place(4 * MAXIMA * self._rank, mine.nbytes, 1, mine.nbytes))
        self.meet()
        theirs = [self.payload[4 * MAXIMA * peer :][: mine.nbytes].view(torch.int32) for peer in self._peers()]
        # Maxima are computed from the bits, so that NaN is the largest value
        found = torch.stack([mine, *theirs]).amax(0).view(torch.float32)
        self.release()
        for to, piece in zip(largest, found.split([value.numel() for value in observed]), strict=True):
            to.copy_(piece.view(to.shape))

    def spans(self) -> list[Tensor]:
        return [self.payload]

    def complaint(self) -> tuple[Wait, int, int] | None:
        """Return None, because waits raise errors directly."""
        return None

    def waits(self) -> list[Wait]:
        return []

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _tell(self, words: Sequence[Tensor]) -> None:
        for peer in self._peers():
            words[peer][self._rank] = self._uses

    def _await(self, words: Tensor, what: int) -> None:
        deadline = time.monotonic() + slots.PATIENCE
        for peer in self._peers():
            while (seen := int(words[peer])) < self._uses:
                if time.monotonic() > deadline:
                    wait = Wait(self._rank, peer, what, self._use)
                    raise RuntimeError(too_long(wait, self._uses, seen, self._named(self._use), self._ranks))
                time.sleep(1e-4)
