"""Checksums of transfers between ranks, which detect bits that changed in a transfer.

    with WireChecks() as checks:      a torch dispatch mode, as the observer is
        ...                           transfers in forward, backward and FSDP
    checks.damaged()                  returns the chunks that arrived with other bits than were sent; all ranks call this
                                      method together

The sender computes a checksum of each chunk before the transfer, and the receiver a checksum of each chunk that arrived
(`dlp.kernels.ops.checksums`), both by a separate read of the chunk. `damaged` compares the checksums by one gather for each
group. The checksums are computed as follows:

    all-gathers and all-to-alls of NCCL and gloo      in the dispatch mode, which waits for these collectives
    mapped memory; sends and receives of the          by the code that issues the transfer: `sends` before the transfer, and
    overlap strategy `chunked`                        `Transfer.wait` after the chunks arrived and before their memory is reused

Reductions inside NCCL or gloo, amax agreements, and sends and receives of user code are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dlp.comm import collectives, observer
from dlp.comm.observer import Label, Observer
from dlp.kernels.ops import checksums

# op -> names of the output argument and of the input argument; both arguments are a tensor or a list of tensors
_CHECKED = {
    "c10d::_allgather_base_": ("output_tensor", "input_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("outputs", "inputs"),
    "c10d::alltoall_base_": ("output", "input"),
}
# rank in the group -> the parts that are sent to this rank, or received from it; all ranks have the same number of parts
Chunks = Mapping[int, Sequence[Tensor]]


def unobserved_checksums(*tensors: Tensor) -> Tensor:
    """Return `dlp.kernels.ops.checksums` of the tensors, computed without dispatch modes, because each operation of torch is
    several times slower under a dispatch mode."""
    with _disable_current_modes():
        return checksums(*tensors)


class Transfer:
    """Checksums of one transfer of a group. The constructor computes the checksums of the chunks that this rank sends.

    label      label of the transfer (`dlp.comm.observer.label`)
    sent       int64 [parts, R]: checksum of each part that this rank sends to each rank
    arrived    int64 [parts, R]: checksum of each part that arrived from each rank; empty before `wait`
    """

    def __init__(self, group: ProcessGroup, outgoing: Chunks | Sequence[Tensor], arriving: Chunks) -> None:
        self.label, self._group = observer._LABEL.get(), group
        self._arriving: Chunks = arriving
        self.sent, self.arrived = self._sums(outgoing), torch.empty(0)

    def _sums(self, chunks: Chunks | Sequence[Tensor]) -> Tensor:
        ranks = self._group.size()
        if not isinstance(chunks, Mapping):
            return unobserved_checksums(*chunks)[:, None].expand(-1, ranks)
        some = next(iter(chunks.values()))
        nothing = [part.new_empty(0) for part in some]
        flat = unobserved_checksums(*(part for rank in range(ranks) for part in chunks.get(rank, nothing)))
        return flat.view(-1, len(some)).t()

    def wait(self) -> None:
        """Compute the checksums of the received chunks. The current stream must wait for the transfer before this call."""
        self.arrived, self._arriving = self._sums(self._arriving), {}  # drops the references to the received memory


class Damaged(NamedTuple):
    """A chunk that arrived at this rank with other bits than were sent.

    label     label of the transfer
    sender    global rank of the sender
    """

    label: Label
    sender: int

    def __str__(self) -> str:
        layer, purpose = self.label.layer or "no single layer", self.label.purpose or "weights or gradients"
        return f"{purpose} of {layer} from rank {self.sender}"


class WireChecks(Observer):
    """Context manager that computes checksums of transfers on sender and receiver.

    active    the entered WireChecks, for code that issues transfers; None if transfers are not checked now
    """

    active: ClassVar[WireChecks | None] = None  # not a context variable, because backward runs in other threads

    def __init__(self) -> None:
        super().__init__({})
        self._transfers: dict[ProcessGroup, list[Transfer]] = {}

    def __enter__(self) -> WireChecks:
        WireChecks.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        WireChecks.active = None
        super().__exit__(*error)

    def sends(self, group: ProcessGroup, outgoing: Chunks | Sequence[Tensor], arriving: Chunks) -> Transfer:
        """Return the `Transfer` of chunks that this rank is about to send.

        The caller must call `wait` of the result after the chunks have arrived, and before their memory is reused.

        outgoing   parts for each rank, or a sequence of parts that are sent to all ranks
        arriving   memory of the parts that arrive from each rank"""
        transfer = Transfer(group, outgoing, arriving)
        self._transfers.setdefault(group, []).append(transfer)
        return transfer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        received, source = _CHECKED.get(func._schema.name, ("", ""))
        if not received:
            return super().__torch_dispatch__(func, types, args, kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        group = ProcessGroup.unbox(given["process_group"])
        # Chunks of different sizes are not checked; dlp issues no such transfers
        if group.size() == 1 or given.get("input_split_sizes"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        ranks = group.size()
        outgoing = _by_rank(given[source], ranks) if received == "output" else tree_leaves(given[source])
        transfer = self.sends(group, outgoing, _by_rank(given[received], ranks))
        # Every transfer is made asynchronous, then awaited: for a synchronous transfer NCCL returns no work, and torch 2.11
        # crashes when Python waits for the missing work
        waited = next(name for name in names if name in ("async_op", "asyncOp"))
        result = super().__torch_dispatch__(func, types, (), {**given, waited: True})
        work = result[-1] if isinstance(result, tuple | list) else result
        work.wait()
        for tensor in tree_leaves(given[received]):
            self.arrived(tensor)
        transfer.wait()
        return result

    def arrived(self, tensor: Tensor) -> None:
        """Called for each tensor that a collective received, before its checksum is computed. Tests override this method."""

    def damaged(self) -> list[Damaged]:
        """Return the chunks whose checksums on the sender and on this rank differ. All ranks must call this method together;
        the method waits for the device."""
        found = []
        for group, transfers in self._transfers.items():
            labels = [each.label for each in transfers for _ in each.sent]
            sent, arrived = (torch.cat([getattr(each, end) for each in transfers]) for end in ("sent", "arrived"))
            (of_all,) = collectives.all_gather((sent,), (0,), group).wait()
            of_all = of_all.unflatten(0, (group.size(), len(sent)))  # [sender, parts of transfers, receiver]
            wrong = (of_all[:, :, group.rank()].t() != arrived).nonzero().tolist()
            ranks = dist.get_process_group_ranks(group)
            found += [Damaged(labels[i], ranks[sender]) for i, sender in wrong]
        return found


def _by_rank(tensors: Tensor | Sequence[Tensor], ranks: int) -> Chunks:
    """Split each tensor into `ranks` equal chunks. Return rank -> views of chunk number `rank` of all tensors."""
    parts = [tensor.view(ranks, tensor.numel() // ranks) for tensor in tree_leaves(tensors)]
    return {rank: [part[rank] for part in parts] for rank in range(ranks)}
