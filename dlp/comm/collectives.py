"""Collectives over tuples of parts, each one transfer; all return a Pending.

    all_gather       x_shard [m, ...]          -> x [R*m, ...]      every part along its own dimension, or left as it is
    reduce_scatter   y_partial [R*m, ...]      -> y_shard [m, ...]
    all_reduce       y_partial [...]           -> y [...]

Sums never depend on arrival: the shards of one destination are exchanged (all-to-all), summed there in fp32 in rank
order and rounded once. NCCL's and gloo's own reductions round the running sum of a bf16 tensor at every hop, and in an
order of their own. Whatever is gathered travels as bytes: gloo carries no FP8 type, and a grouped gather of several
dtypes would be promoted to one of them there, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager

T = TypeVar("T")

# renamed in torch 2.13; the old names warn there and the new ones do not exist before
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Generic[T]):
    """A result in flight. `wait()` orders the current stream after it and returns it; any number of times."""

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
    """A result that is already here."""
    return Pending((), lambda: result)


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat: a view of bytes needs a last stride of 1, which [n, 1] may lack."""
    return x.view(-1).view(torch.uint8)


def all_gather(parts: Sequence[Tensor], dims: Sequence[int | None], group: ProcessGroup) -> Pending[tuple[Tensor, ...]]:
    """Gather part i of every rank of `group` along dimension dims[i]; a part whose dim is None is equal on all ranks
    and stays. One launch for all parts. A part gathered along another dimension than 0 is rearranged on arrival."""
    world = group.size()
    moving = [i for i, dim in enumerate(dims) if dim is not None]
    if world == 1 or not moving:
        return done(tuple(parts))
    sources = [parts[i].contiguous() for i in moving]
    arrived = [torch.empty((world * s.shape[0], *s.shape[1:]), dtype=s.dtype, device=s.device) for s in sources]
    works = _gather_coalesced(arrived, sources, group)

    def finish() -> tuple[Tensor, ...]:
        whole = list(parts)
        for i, source, gathered in zip(moving, sources, arrived, strict=True):
            dim = dims[i]
            assert dim is not None
            whole[i] = gathered if dim == 0 else _concatenate_along(gathered, world, source.shape, dim)
        return tuple(whole)

    return Pending(works, finish)


def _gather_coalesced(arrived: list[Tensor], sources: list[Tensor], group: ProcessGroup) -> list[Any]:
    """Start one grouped all-gather."""
    if len(sources) == 1:
        return [_all_gather(_as_bytes(arrived[0]), _as_bytes(sources[0]), group=group, async_op=True)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for gathered, source in zip(arrived, sources, strict=True):
            _all_gather(_as_bytes(gathered), _as_bytes(source), group=group)
    return [manager]


def _concatenate_along(gathered: Tensor, world: int, shape: torch.Size, dim: int) -> Tensor:
    """[R*s0, ...] as it arrived -> the R pieces of `shape` concatenated along `dim`."""
    joined = gathered.view(world, *shape).movedim(0, dim)
    return joined.reshape(*shape[:dim], world * shape[dim], *shape[dim + 1 :])


def _exchange(chunks: Tensor, group: ProcessGroup) -> tuple[Any, Tensor]:
    """All-to-all of chunks [R, ...]: chunk j goes to rank j; arrived[j] came from rank j."""
    arrived = torch.empty_like(chunks)
    all_to_all = getattr(dist, "all_to_all_single")  # noqa: B009  (the 2.13 stubs lack it)
    return all_to_all(arrived, chunks, group=group, async_op=True), arrived


def sum_in_rank_order(contributions: Tensor) -> Tensor:
    """[R, ...] -> [...]: fp32 sum over ranks 0, 1, ..., rounded once to the dtype of the contributions."""
    total = contributions[0].float()
    for contribution in contributions[1:]:
        total = total + contribution
    return total.to(contributions.dtype)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """x [R*m, ...], this rank's contribution to all -> [m, ...], the sum over ranks of this rank's rows.

    Raises ValueError when the rows do not divide by the size of the group.
    """
    world = group.size()
    if x.shape[0] % world:
        raise ValueError(
            f"reduce_scatter needs a number of rows divisible by the group's {world} ranks; got {x.shape[0]}"
        )
    if world == 1:
        return done(x)
    work, arrived = _exchange(x.contiguous().view(world, x.shape[0] // world, *x.shape[1:]), group)
    return Pending([work], lambda: sum_in_rank_order(arrived))


def all_reduce(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """x of any shape -> the sum over ranks, equal on all of them: a reduce-scatter and a gather of the flat tensor."""
    world = group.size()
    if world == 1:
        return done(x)
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % world))
    work, arrived = _exchange(padded.view(world, -1), group)

    def finish() -> Tensor:
        (whole,) = all_gather((sum_in_rank_order(arrived),), (0,), group).wait()
        return whole[: flat.numel()].view(x.shape)

    return Pending([work], finish)
