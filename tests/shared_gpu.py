"""Ranks that share one GPU: how what needs mapped memory is tested where there is a single one (`--device cuda --share-gpu`).

torch's symmetric memory lets ranks share a device if it is told to, NCCL does not, and gloo sends CUDA tensors in collectives
but not from one rank to another: those are staged here. The driver gives each process the GPU in turns, so nothing about speed
can be learned: a kernel that waits uses up its turn, a stream that waits does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_batched = dist.batch_isend_irecv


def prepare() -> None:
    """In a rank, before its first process group."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    dist.batch_isend_irecv = staged


def staged(transfers: Sequence[dist.P2POp]) -> list[Any]:
    """`batch_isend_irecv` through memory of the host."""
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
