"""Ranks that share one GPU, for tests of mapped memory on a machine with a single GPU (`--device cuda --share-gpu`).

torch's symmetric memory can be configured to let ranks share a device; NCCL does not support this. gloo supports CUDA
tensors in collectives, but not in sends and receives, so tensors that are sent are copied through host memory. Processes use
the GPU in turns, so times are meaningless: a kernel that waits for another rank uses up the time slice of its process,
while a stream that waits for an event does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_batched = dist.batch_isend_irecv


def prepare() -> None:
    """Let this rank share its GPU, and send tensors to other ranks through host memory. Call this before the first
    process group is created."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    dist.batch_isend_irecv = staged


def staged(transfers: Sequence[dist.P2POp]) -> list[Any]:
    """`batch_isend_irecv` with copies through host memory."""
    return [Staged(transfer) for transfer in transfers]


class Staged:
    def __init__(self, transfer: dist.P2POp) -> None:
        self._transfer, self._host = transfer, transfer.tensor.to("cpu", copy=True)
        sent = dist.P2POp(transfer.op, self._host, group=transfer.group, group_peer=transfer.group_peer)
        (self._work,) = _batched([sent])

    def wait(self) -> None:
        self._work.wait()
        if self._transfer.op is dist.irecv:
            self._transfer.tensor.copy_(self._host)
