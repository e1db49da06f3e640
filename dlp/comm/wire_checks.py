"""Checksums of transfers between ranks, which detect transfers that arrive with other bits, and name both ranks.

    with WireChecks() as checks:      a torch dispatch mode, as the observer is
        ...                           transfers in forward, backward and FSDP
    checks.damaged()                  the transfers that arrived with other bits than were sent; all ranks call this method
                                      together

A sender sums the bits of each chunk before the transfer, and a receiver sums the bits of each chunk that arrived
(`dlp.kernels.ops.checksums`), both in a separate read of the chunk; the sums are compared after the context, by one gather for
each group.

    all-gathers and all-to-alls of NCCL and gloo      in the dispatch mode, which waits for them
    mapped memory; sends and receives of `chunked`    where dlp issues the transfer (`sends`) and no longer needs the received
                                                      chunks (`Transfer.wait`)

Not checked are reductions inside NCCL or gloo, amax agreements, and sends and receives that dlp does not issue.
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

# op -> the arguments that are received and sent, each a tensor or a list of tensors
_CHECKED = {
    "c10d::_allgather_base_": ("output_tensor", "input_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("outputs", "inputs"),
    "c10d::alltoall_base_": ("output", "input"),
}
# by rank: the parts for the rank, or from the rank; the same number for each rank
Chunks = Mapping[int, Sequence[Tensor]]


def unobserved_checksums(*tensors: Tensor) -> Tensor:
    """`dlp.kernels.ops.checksums` outside of dispatch modes, in which each operation of torch takes several times as long."""
    with _disable_current_modes():
        return checksums(*tensors)


class Transfer:
    """A transfer of a group, which this rank sends now.

    sent, arrived    checksums by part and by receiver or sender, int64 [parts, R]
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
        """Sum the received chunks, which the current stream may read."""
        self.arrived, self._arriving = self._sums(self._arriving), {}  # the memory is not kept


class Damaged(NamedTuple):
    """A chunk that arrived at this rank with other bits than were sent; `sender`: a global rank."""

    label: Label
    sender: int

    def __str__(self) -> str:
        layer, purpose = self.label.layer or "no single layer", self.label.purpose or "weights or gradients"
        return f"{purpose} of {layer} from rank {self.sender}"


class WireChecks(Observer):
    """A context that sums the bits of transfers on both ends.

    active    checks of the current pass, for code that issues transfers; None: no pass is checked
    """

    active: ClassVar[WireChecks | None] = None  # not a context variable: backward runs in other threads

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
        """Sum the chunks that this rank sends in a transfer: to each rank, or the same parts to all ranks.

        arriving   memory of the chunks that arrive from each rank; when they have arrived, and before the memory is used again,
                   the caller calls `wait` of the result"""
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
        # Chunks of different sizes, which no transfer of dlp has
        if group.size() == 1 or given.get("input_split_sizes"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        ranks = group.size()
        outgoing = _by_rank(given[source], ranks) if received == "output" else tree_leaves(given[source])
        transfer = self.sends(group, outgoing, _by_rank(given[received], ranks))
        # NCCL returns no work for a synchronous transfer, and torch 2.11 ends the process where Python waits for it
        waited = next(name for name in names if name in ("async_op", "asyncOp"))
        result = super().__torch_dispatch__(func, types, (), {**given, waited: True})
        work = result[-1] if isinstance(result, tuple | list) else result
        work.wait()
        for tensor in tree_leaves(given[received]):
            self.arrived(tensor)
        transfer.wait()
        return result

    def arrived(self, tensor: Tensor) -> None:
        """A received tensor, when the transfer is complete and before it is summed; for tests."""

    def damaged(self) -> list[Damaged]:
        """Return the chunks whose checksums differ between sender and this rank. All ranks call this method together; waits
        for the device."""
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
    """The equal chunks of the memory of each tensor."""
    parts = [tensor.view(ranks, tensor.numel() // ranks) for tensor in tree_leaves(tensors)]
    return {rank: [part[rank] for part in parts] for rank in range(ranks)}
