"""Checksums of transfers between ranks, which detect transfers that arrive with other bits, and name both ranks.

    with WireChecks() as checks:      a torch dispatch mode, as the observer is
        ...                           all-gathers and all-to-alls, in forward, backward and FSDP
    checks.damaged()                  the transfers that arrived with other bits than were sent; all ranks call this method
                                      together

A sender sums the bits of each chunk before the transfer, a receiver the bits of each chunk that arrived, both in a separate
read of the chunk; the sums are compared after the context, by one gather for each group. Reductions inside NCCL or gloo, and
copies into memory of a peer, are not checked.

    checksum = sum_p (2 p + 1) s_p  modulo 2^64,     s_p: sum of the bits of piece p of PIECES equal pieces, as 64-bit integers

As in Fletcher's checksum, the position has a weight: pieces that arrive in another order change the sum. Weights are odd, so
that any single flipped bit changes the sum. Changes inside one piece that add up to 0 do not. The number of pieces divides the
number of integers, so a tensor with an odd number is a single piece.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives, observer
from dlp.comm.observer import Label, Observer

# op -> the arguments that are received and sent
_CHECKED = {
    "c10d::_allgather_base_": ("output_tensor", "input_tensor"),
    "c10d::alltoall_base_": ("output", "input"),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECES = 1024  # at most; the number of pieces divides the number of integers


def piece_sums(tensor: Tensor, chunks: int = 1) -> Tensor:
    """Return the sums of the bits of equal pieces of each of a number of equal chunks of the memory of a tensor, int64
    [chunks, pieces].

    Bits are added as 64-bit integers, which a reduction reads without a copy, or as integers of the size of an element if the
    bytes of a chunk are no multiple of 8."""
    values = tensor.detach().contiguous().view(-1)
    itemsize = values.dtype.itemsize
    width = itemsize if values.numel() // chunks * itemsize % 8 else 8
    if values.storage_offset() * itemsize % width:
        values = values.clone()
    bits = values.view(_BITS[width]).view(chunks, -1 if values.numel() else 0)
    pieces = gcd(bits.shape[1], PIECES)
    return bits.view(chunks, pieces, bits.shape[1] // pieces).sum(2, dtype=torch.int64)


def checksums(tensor: Tensor, chunks: int = 1) -> Tensor:
    """Return the checksum of each of a number of equal chunks of the memory of a tensor, int64 [chunks]."""
    sums = piece_sums(tensor, chunks)
    return (sums * _weights(sums.shape[1], sums.device)).sum(1)


@functools.cache
def _weights(pieces: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * pieces, 2, device=device)


class Transfer(NamedTuple):
    """A transfer of a group. sent: checksums by receiver; arrived: checksums by sender; int64 [R]."""

    label: Label
    sent: Tensor
    arrived: Tensor


class Damaged(NamedTuple):
    """A chunk that arrived at this rank with other bits than were sent; `sender`: a global rank."""

    label: Label
    sender: int

    def __str__(self) -> str:
        layer, direction = self.label.layer or "no single layer", self.label.direction or "weights or gradients"
        return f"{direction} of {layer} from rank {self.sender}"


class WireChecks(Observer):
    """A context that sums the bits of transfers on both ends."""

    def __init__(self) -> None:
        super().__init__({})
        self._transfers: dict[ProcessGroup, list[Transfer]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        received, source = _CHECKED.get(func._schema.name, ("", ""))
        if not received:
            return super().__torch_dispatch__(func, types, args, kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        group = ProcessGroup.unbox(given["process_group"])
        # Chunks of different sizes, which no transfer of dlp has
        if group.size() == 1 or given.get("input_split_sizes"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        to_each = received == "output"  # each rank gets a separate chunk
        sent = checksums(given[source], group.size()) if to_each else checksums(given[source]).expand(group.size())
        # NCCL returns no work for a synchronous transfer, and torch 2.11 ends the process where Python waits for it
        waited = next(name for name in names if name in ("async_op", "asyncOp"))
        result = super().__torch_dispatch__(func, types, (), {**given, waited: True})
        work = result[-1] if isinstance(result, tuple | list) else result
        work.wait()
        arrived = checksums(self.arrived(given[received]), group.size())
        self._transfers.setdefault(group, []).append(Transfer(observer._LABEL.get(), sent, arrived))
        return result

    def arrived(self, tensor: Tensor) -> Tensor:
        """The received tensor, when the transfer is complete."""
        return tensor

    def damaged(self) -> list[Damaged]:
        """Return the chunks whose checksums differ between sender and this rank. All ranks call this method together; waits
        for the device."""
        found = []
        for group, transfers in self._transfers.items():
            sent = torch.stack([each.sent for each in transfers])  # [transfers, receiver]
            (of_all,) = collectives.all_gather((sent,), (0,), group).wait()
            of_all = of_all.unflatten(0, (group.size(), len(sent)))  # [sender, transfers, receiver]
            arrived = torch.stack([each.arrived for each in transfers], 1)  # [sender, transfers]
            wrong = (of_all[:, :, group.rank()] != arrived).t().nonzero().tolist()
            ranks = dist.get_process_group_ranks(group)
            found += [Damaged(transfers[i].label, ranks[sender]) for i, sender in wrong]
        return found
