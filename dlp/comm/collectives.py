"""Collectives of several tensors ("parts") at once, over a group of R ranks. Each collective returns a `Pending`.

    all_gather       part i of every rank [m, ...]   -> [R*m, ...]   along dimension dims[i]; None: not gathered
    all_to_all       part i [R, ...]                 -> [R, ...]     chunk j goes to rank j; received chunk j is from rank j
    reduce_scatter   x [R*m, ...]                    -> [m, ...]     this rank's rows, summed over ranks
    all_reduce       x [...]                         -> [...]        the sum over ranks

Sums do not depend on the order of arrival: each rank receives all contributions to its rows (all-to-all), sums them in fp32 in
rank order, and rounds once. The reductions of NCCL and gloo round the running sum of a bf16 tensor at every hop, and do not sum
in rank order. A `ReduceCodec` defines how contributions are encoded for the transfer. Tensors are sent as bytes: gloo has no
FP8 dtype, and a grouped gather of several dtypes would silently promote all tensors to one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, _coalescing_manager

from dlp.comm.observer import UNCOUNTED, counting, default_precision
from dlp.kernels.cuda_codes import place_rows, side_by_side
from dlp.kernels.launches import call, is_recording
from dlp.kernels.ops import sum_in_order

T = TypeVar("T")
Parts = tuple[Tensor, ...]
FIELD = 256  # alignment in bytes of the parts in a record (`fields`)

# torch 2.13 renamed this function: there the old name warns, and older versions lack the new name
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Options for methods of a ProcessGroup. This file calls these methods without the wrappers in `torch.distributed`, because the
# wrappers make many checks in every call.
_GATHER, _EXCHANGE = AllgatherOptions(), AllToAllOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = True


class Pending(Generic[T]):
    """Result of a transfer in flight. `wait()` makes the current stream wait for the transfer and returns the result. `wait`
    can be called any number of times."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        self._works = works
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._finish = None
        return self._result


def done(result: T) -> Pending[T]:
    """Return a Pending whose result is complete already."""
    return Pending((), lambda: result)


Kinds = tuple[list[tuple[int, ...]], list[torch.dtype]]  # shapes and dtypes of parts


Own = tuple[int, Parts]  # a rank, and the contribution of this rank


class Total(Protocol):
    def __call__(self, parts: Parts, dtype: torch.dtype, own: Own | None = None) -> Tensor: ...


def _in_order(parts: Parts, dtype: torch.dtype, own: Own | None = None) -> Tensor:
    return sum_in_order(parts[0], dtype, None if own is None else (own[0], own[1][0]))


class ReduceCodec(NamedTuple):
    """Encoding of the contributions to a sum over R ranks.

    pack    encodes chunks [R, ...], one for each rank, as parts whose first dimension is R
    total   sums the parts of all ranks in rank order, and rounds the sum once to `dtype`; `own`: this rank and its parts, if
            they are not among the received parts
    kinds   returns shapes and dtypes of the encoded parts for shape and dtype of the chunks
    """

    pack: Callable[[Tensor], Parts]
    total: Total
    kinds: Callable[[tuple[int, ...], torch.dtype], Kinds]


AS_IT_IS = ReduceCodec(
    pack=lambda chunks: (chunks,),
    total=_in_order,
    kinds=lambda shape, dtype: ([shape], [dtype]),
)


# Gathers


def room(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dims: Sequence[int | None], group: ProcessGroup,
    device: torch.device,
) -> tuple[list[Tensor | None], Parts]:  # fmt: skip
    """Allocate uninitialised storage for a gather: [R, *shape] for each part.

    The storage of a part with dim None, which is equal on all ranks, is None. Returns the storage, and for each part the
    tensor to which this rank writes the part: this rank's segment of the storage, or a separate tensor for dim None. Parts that
    are written to these segments are gathered in place."""
    storage: list[Tensor | None] = []
    mine: list[Tensor] = []
    for shape, dtype, dim in zip(shapes, dtypes, dims, strict=True):
        whole = None if dim is None else torch.empty((group.size(), *shape), dtype=dtype, device=device)
        storage.append(whole)
        mine.append(torch.empty(shape, dtype=dtype, device=device) if whole is None else whole[group.rank()])
    return storage, tuple(mine)


def all_gather(
    parts: Sequence[Tensor],
    dims: Sequence[int | None],
    group: ProcessGroup,
    into: Sequence[Tensor | None] | None = None,
) -> Pending[Parts]:
    """Gather part i of every rank of `group` along dimension dims[i]. A part whose dim is None is equal on all ranks and is not
    sent. NCCL gathers all parts in one launch.

    `into`: storage allocated by `room`; parts that are this rank's segments of the storage are not copied. Parts arrive as
    [R, *shape]. Dimension 0 needs no copy; for another dimension the result is a copy, since no kernel of dlp reads an operand
    whose contraction is stored in pieces.
    """
    if group.size() == 1:
        return done(tuple(parts))
    storage, tensors = [], []
    for i, (part, dim) in enumerate(zip(parts, dims, strict=True)):
        if into is not None:
            whole = into[i]
        else:
            whole = None if dim is None else part.new_empty((group.size(), *part.shape))
        storage.append(whole)
        if whole is not None:  # send flat bytes: viewing [n, 1] as bytes may fail, because its last stride may not be 1
            tensors += [whole.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8)]
    with default_precision(parts[0].dtype) if counting() else UNCOUNTED:
        works = call(partial(_start_gathers, group), *tensors)
    return Pending(works, partial(join, storage, parts, dims))


def join(storage: Sequence[Tensor | None], parts: Sequence[Tensor], dims: Sequence[int | None]) -> Parts:
    """Return all parts of a gather: the gathered parts in `storage`, which `room` allocated, and the parts with dim None."""
    joined = []
    for whole, part, dim in zip(storage, parts, dims, strict=True):
        if whole is None or dim is None:
            joined.append(part)
        else:  # [R, *shape] -> the R pieces concatenated along `dim`: a view for dim 0, a copy for other dims
            moves = dim > 0 and whole.numel() > 0 and is_recording()
            joined.append(side_by_side(whole, dim) if moves else whole.movedim(0, dim).flatten(dim, dim + 1))
    return tuple(joined)


def _start_gathers(group: ProcessGroup, *tensors: Tensor) -> list[Any]:
    """Start one all-gather for each pair of the tensors (storage, part, storage, part, ...), which are viewed as bytes.

    NCCL runs the all-gathers as one group. gloo runs them one by one, because two grouped all-gathers of gloo in flight
    corrupt the heap (pytorch#65231)."""
    places, first = range(0, len(tensors), 2), tensors[0]
    if len(tensors) <= 2 or not (first.is_cuda and group._get_backend(first.device).supports_coalescing):
        works = []
        for i in places:
            works.append(group._allgather_base(tensors[i], tensors[i + 1], _GATHER))
        return works
    with _coalescing_manager(group, async_ops=True) as manager:
        for i in places:
            _all_gather(tensors[i], tensors[i + 1], group=group)
    return [manager]


# Records: the bytes of several parts in one row of a tensor


def fields(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Return the offset in bytes of each part in a record of these parts, and the size of the record in bytes."""
    starts, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        starts.append(end)
        end += -(-prod(shape) * dtype.itemsize // FIELD) * FIELD
    return starts, end


def parts_of(records: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> Parts:
    """View R records, a uint8 tensor [R, bytes of a record], as parts [R, *shape]."""
    starts, _ = fields(shapes, dtypes)
    return tuple(_part_of(records, *field) for field in zip(starts, shapes, dtypes, strict=True))


def _part_of(records: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = prod(shape)
    if size == 0:  # there are no tokens; an empty uint8 tensor cannot be viewed as another dtype
        return records.new_empty((len(records), *shape), dtype=dtype)
    part = records[:, start : start + size * dtype.itemsize].view(dtype)
    return part.unflatten(1, tuple(shape)) if shape else part[:, 0]


def put(part: Tensor, into: Tensor) -> None:
    """Copy `part` [rows, ...] into a tensor of the same shape and dtype whose rows may have any stride. While launches are
    recorded, a kernel of dlp makes the copy."""
    if is_recording() and part.is_contiguous() and part.nbytes:
        place_rows(part, into)
    else:
        into.copy_(part)


# Exchanges and sums


def record(parts: Sequence[Tensor]) -> int:
    """Return the number of bytes that an `all_to_all` of these parts [R, ...] sends to each other rank."""
    if len(parts) == 1:
        return parts[0].nbytes // parts[0].shape[0]
    return fields([part.shape[1:] for part in parts], [part.dtype for part in parts])[1]


def all_to_all(parts: Sequence[Tensor], group: ProcessGroup) -> Pending[Parts]:
    """Send chunk j of each part [R, ...] to rank j. In the result [R, ...], chunk j came from rank j.

    The exchange is one launch: several parts are first copied into one record per rank, and the results are views of the
    received records."""
    if group.size() == 1:
        return done(tuple(parts))
    return Pending(*_exchanged(parts, group))


def _exchanged(parts: Sequence[Tensor], group: ProcessGroup) -> tuple[list[Any], Callable[[], Parts]]:
    """Start an `all_to_all` over several ranks. Returns the works, and a function that returns the result after the works are
    done."""
    first = parts[0]
    chunks = first.contiguous().view(-1).view(torch.uint8) if len(parts) == 1 else _records(parts)
    arrived = torch.empty_like(chunks)  # R chunks of equal size
    with default_precision(first.dtype) if counting() else UNCOUNTED:
        works = call(partial(_start_exchange, group), arrived, chunks)
    if len(parts) == 1:
        return works, lambda: (arrived.view(first.dtype).view(first.shape),)
    shapes, dtypes = [part.shape[1:] for part in parts], [part.dtype for part in parts]
    return works, lambda: parts_of(arrived, shapes, dtypes)


def _records(parts: Sequence[Tensor]) -> Tensor:
    """Copy parts [R, ...] into R records, one per receiving rank: a uint8 tensor [R, bytes of a record]."""
    records = torch.empty((parts[0].shape[0], record(parts)), dtype=torch.uint8, device=parts[0].device)
    fields_of = parts_of(records, [part.shape[1:] for part in parts], [part.dtype for part in parts])
    for field, part in zip(fields_of, parts, strict=True):
        put(part, field)
    return records


def _start_exchange(group: ProcessGroup, arrived: Tensor, chunks: Tensor) -> list[Any]:
    return [group.alltoall_base(arrived, chunks, [], [], _EXCHANGE)]


def reduce_scatter(
    x: Tensor, group: ProcessGroup, codec: ReduceCodec = AS_IT_IS, dtype: torch.dtype | None = None
) -> Pending[Tensor]:
    """Sum x [R*m, ...] over ranks, and return this rank's rows [m, ...] of the sum, rounded once to `dtype` (None: dtype of x).

    Raises ValueError if the number of rows is not divisible by the size of the group.
    """
    world = group.size()
    if x.shape[0] % world:
        raise ValueError(
            f"reduce_scatter needs a number of rows divisible by the group's {world} ranks; got {x.shape[0]}"
        )
    if world == 1:
        return done(x if dtype is None else x.to(dtype))
    return Pending(*_summed(x.reshape(world, x.shape[0] // world, *x.shape[1:]), group, codec, dtype))


def _summed(
    chunks: Tensor, group: ProcessGroup, codec: ReduceCodec, dtype: torch.dtype | None = None
) -> tuple[list[Any], Callable[[], Tensor]]:
    """Start the exchange of chunks [R, ...]. Returns the works, and a function that returns, after the works are done, the sum
    in rank order of the chunks that all ranks have for this rank, rounded once to `dtype` (None: dtype of the chunks)."""
    works, arrived = _exchanged(codec.pack(chunks), group)
    return works, lambda: codec.total(arrived(), dtype or chunks.dtype)


def all_reduce(x: Tensor, group: ProcessGroup, codec: ReduceCodec = AS_IT_IS) -> Pending[Tensor]:
    """Return the sum over ranks of x, which may have any shape. The sum is bitwise equal on all ranks.

    The sum is computed by a reduce-scatter of the `shares` of x, which `codec` encodes, and an all-gather of the summed
    shares."""
    if group.size() == 1:
        return done(x)
    works, total = _summed(shares(x, group.size()), group, codec)

    def finish() -> Tensor:
        (whole,) = all_gather((total(),), (0,), group).wait()
        return whole.view(-1)[: x.numel()].view(x.shape)

    return Pending(works, finish)


def shares(part: Tensor, world: int) -> Tensor:
    """Split a tensor into `world` equal shares [world, ...].

    Shares consist of complete rows, so that a codec may scale along features. A 1-D tensor, and a tensor whose number of rows
    `world` does not divide, is flattened, zero-padded and split."""
    rows = part.reshape(-1, part.shape[-1]) if part.dim() > 1 and part.shape[-1] else part.reshape(-1)
    if rows.dim() == 1 or len(rows) % world:
        rows = F.pad(part.reshape(-1), (0, -part.numel() % world))
    return rows.unflatten(0, (world, len(rows) // world))
