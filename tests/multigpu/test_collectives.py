"""Collectives over parts: a gather moves bytes unchanged, with NCCL all parts in one collective, and every sum is the
fp32 sum in rank order.

The tests run on 1, 2 and 4 ranks. The expected values are computed from the seeds of all ranks, without collectives.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlp.comm import collectives
from dlp.comm.transport import agree
from tests import pool as worker
from tests.metrics import assert_bit_equal, bit_difference
from tests.observe import Collectives
from tests.refusals import may_raise

GATHERED = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the input tensor of `rank`: random values, so that a byte in the wrong position is detected."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.itemsize == 1:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def mine(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return of_rank(dist.get_rank(), shape, dtype).to(worker.device())


def concatenated(world: int, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> Tensor:
    parts = [of_rank(rank, shape, dtype).view(torch.uint8 if dtype.itemsize == 1 else dtype) for rank in range(world)]
    return torch.cat(parts, dim).view(dtype)


def summed(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    total = of_rank(0, shape, dtype).float()
    for rank in range(1, world):
        total = total + of_rank(rank, shape, dtype).float()
    return total.to(dtype)


def gather(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], dims: list[int | None]
) -> tuple[tuple[Tensor, ...], list[str]]:
    parts = [mine(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with Collectives() as seen:
        whole = collectives.all_gather(parts, dims, dist.group.WORLD).wait()
    return tuple(part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in whole), seen.names


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", GATHERED, ids=str)
def test_one_part_is_gathered_along_a_dimension(ranks, world, dim, dtype):
    shape = (3, 5)
    for (whole,), names in ranks(world).run(gather, [shape], [dtype], [dim]):
        expected = concatenated(world, shape, dtype, dim)
        assert bit_difference(whole.view(dtype), expected) is None
        assert len(names) == (world > 1)


@pytest.mark.parametrize("world", [2, 4])
def test_several_parts_are_one_launch_and_shared_parts_stay(ranks, world, device_type):
    """NCCL gathers several parts in one collective. With gloo each part is a separate collective, because gloo's
    grouped all-gather corrupts the heap if two are in flight."""
    shapes, dims = [(4, 6), (), (4, 3), (6, 4), (7,), (2, 3, 2)], [0, None, 1, 1, 0, 1]
    dtypes = [torch.float8_e4m3fn, torch.float32, torch.float32, torch.bfloat16, torch.uint8, torch.float8_e5m2]
    for rank, (whole, names) in enumerate(ranks(world).run(gather, shapes, dtypes, dims)):
        for part, shape, dtype, dim in zip(whole, shapes, dtypes, dims, strict=True):
            expected = of_rank(rank, shape, dtype) if dim is None else concatenated(world, shape, dtype, dim)
            assert_bit_equal(part.view(dtype), expected, f"{dtype} along {dim}")
        assert len(names) == (1 if device_type == "cuda" else 5), names
        assert any("coalesced" in name for name in names) == (device_type == "cuda"), names


def gather_odd_strides() -> tuple[Tensor, ...]:
    strided, column = mine((3, 4), torch.float32).t(), mine((1, 4), torch.float32).t()
    assert column.is_contiguous() and column.stride() == (1, 4)
    return collectives.all_gather((strided, strided[:0], column), (0, 1, 0), dist.group.WORLD).wait()


@pytest.mark.parametrize("world", [2, 4])
def test_strided_and_empty_parts_are_gathered(ranks, world):
    for strided, empty, column in ranks(world).run(gather_odd_strides):
        assert_bit_equal(strided, torch.cat([of_rank(rank, (3, 4), torch.float32).t() for rank in range(world)]))
        assert empty.shape == (0, 3 * world)
        assert_bit_equal(column, torch.cat([of_rank(rank, (1, 4), torch.float32).t() for rank in range(world)]))


def wait_twice() -> list[bool]:
    x = mine((4, 2), torch.float32)
    started = [
        collectives.all_gather((x, x), (0, 1), dist.group.WORLD),
        collectives.reduce_scatter(x, dist.group.WORLD),
        collectives.all_reduce(x, dist.group.WORLD),
    ]
    in_reverse = [pending.wait() for pending in reversed(started)]
    return [again.wait() is first for again, first in zip(reversed(started), in_reverse, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pending_results_are_awaited_in_any_order_and_more_than_once(ranks, world):
    assert ranks(world).run(wait_twice) == [[True, True, True]] * world


def sum_in(dtype: torch.dtype) -> Tensor:
    return collectives.reduce_scatter(mine((8, 33), torch.bfloat16), dist.group.WORLD, dtype=dtype).wait().clone()


@pytest.mark.parametrize("world", [1, 2])
def test_a_sum_of_bf16_contributions_can_be_fp32(ranks, world):
    expected = torch.stack([of_rank(rank, (8, 33), torch.bfloat16) for rank in range(world)]).float().sum(0)
    for rank, found in enumerate(ranks(world).run(sum_in, torch.float32)):
        assert_bit_equal(found, expected.chunk(world)[rank])
    assert world == 1 or not torch.equal(expected, expected.bfloat16().float())


def sums(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    x = mine(shape, dtype)
    before = x.clone()
    scattered = collectives.reduce_scatter(x, dist.group.WORLD).wait()
    reduced = [collectives.all_reduce(x, dist.group.WORLD).wait() for _ in range(3)]
    same = all(torch.equal(again, reduced[0]) for again in reduced[1:]) and torch.equal(x, before)
    return scattered.clone(), reduced[0], same


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_fp32_in_rank_order_rounded_once(ranks, world, dtype):
    shape = (8 * world, 33)
    expected = summed(world, shape, dtype)
    for rank, (scattered, reduced, same) in enumerate(ranks(world).run(sums, shape, dtype)):
        assert_bit_equal(scattered, expected.chunk(world)[rank], "reduce_scatter")
        assert_bit_equal(reduced, expected, "all_reduce")
        assert same


@pytest.mark.ranks(4)
def test_the_order_of_a_sum_can_be_seen_in_its_bits():
    """Sums in another order, or rounded after each addition, have other bits. If they had equal bits, the comparison
    with the expected sum would not test the order."""
    parts = [of_rank(rank, (32, 33), torch.float32) for rank in range(4)]
    assert bit_difference(parts[3] + parts[2] + parts[1] + parts[0], summed(4, (32, 33), torch.float32))
    rounded = parts[0].bfloat16() + parts[1].bfloat16() + parts[2].bfloat16() + parts[3].bfloat16()
    assert bit_difference(rounded, summed(4, (32, 33), torch.bfloat16))


def reduce_odd_shapes() -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(), (1,), (3, 5), (0, 4)]
    return [collectives.all_reduce(mine(shape, torch.float32), dist.group.WORLD).wait() for shape in shapes]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_reduce_takes_any_shape(ranks, world):
    for results in ranks(world).run(reduce_odd_shapes):
        for result, shape in zip(results, [(), (1,), (3, 5), (0, 4)], strict=True):
            assert_bit_equal(result, summed(world, shape, torch.float32))


def reduce_uneven_rows() -> str:
    return may_raise(ValueError, collectives.reduce_scatter, mine((5, 2), torch.float32), dist.group.WORLD)


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter_refuses_uneven_rows_on_every_rank(ranks, world):
    for message in ranks(world).run(reduce_uneven_rows):
        assert f"divisible by the group's {world} ranks; got 5" in message


def agree_on(shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], bool, int]:
    observed = [mine(shape, torch.float32) for shape in shapes]
    before = [value.clone() for value in observed]
    with Collectives() as seen:
        agreed = agree(observed, dist.group.WORLD)
    return agreed, all(torch.equal(a, b) for a, b in zip(observed, before, strict=True)), len(seen.names)


SHAPES: list[list[tuple[int, ...]]] = [[(), (5,), (1, 3), ()], [(3,)], [(each,) for each in range(1, 12)]]


@pytest.mark.parametrize(("world", "shapes"), [(1, SHAPES[0]), (4, SHAPES[0]), *[(2, shapes) for shapes in SHAPES]])
def test_agree_is_one_reduction_to_the_elementwise_maximum(ranks, world, shapes):
    """`agree` computes the elementwise maximum over ranks. The cases have several tensors, one tensor, and more tensors
    than the kernel accepts."""
    for agreed, untouched, launches in ranks(world).run(agree_on, shapes):
        for value, shape in zip(agreed, shapes, strict=True):
            expected = torch.stack([of_rank(rank, shape, torch.float32) for rank in range(world)]).amax(0)
            assert_bit_equal(value, expected)
        assert untouched
        assert launches == (world > 1)


MIXED = [((4, 6), torch.bfloat16), ((8,), torch.float32), ((4, 3, 5), torch.float32), ((4, 0), torch.bfloat16)]


def sum_several() -> tuple[list[Tensor], list[Tensor], list[Tensor], list[list[str]]]:
    """Run a reduce-scatter and an all-reduce of each part, and one all-to-all of several parts of different dtypes.
    Return the results, and for each of the three operations the names of the launched collectives."""
    world, seen = dist.get_world_size(), [Collectives() for _ in range(3)]
    parts = [mine((world * shape[0], *shape[1:]), dtype) for shape, dtype in MIXED]
    with seen[0]:
        scattered = [collectives.reduce_scatter(part, dist.group.WORLD).wait() for part in parts]
    with seen[1]:
        reduced = [collectives.all_reduce(part, dist.group.WORLD).wait() for part in parts]
    with seen[2]:
        chunks = [part.unflatten(0, (world, len(part) // world)) for part in parts]
        exchanged = collectives.all_to_all(chunks, dist.group.WORLD).wait()
    return scattered, reduced, [part.contiguous() for part in exchanged], [s.names for s in seen]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_sum_is_one_launch_and_so_is_an_exchange_of_several_parts(ranks, world):
    """On several ranks, a reduce-scatter of one part is one launch, an all-reduce of one part is two launches (the
    second is a gather), and an all-to-all of several parts is one launch. On one rank nothing is launched."""
    for rank, (scattered, reduced, exchanged, names) in enumerate(ranks(world).run(sum_several)):
        for i, (shape, dtype) in enumerate(MIXED[:3]):
            whole = (world * shape[0], *shape[1:])
            expected = summed(world, whole, dtype)
            assert_bit_equal(scattered[i], expected.chunk(world)[rank], f"reduce_scatter of {dtype}")
            assert_bit_equal(reduced[i], expected, f"all_reduce of {dtype}")
            chunks = [of_rank(source, whole, dtype).chunk(world)[rank] for source in range(world)]
            assert_bit_equal(exchanged[i], torch.stack(chunks), f"all_to_all of {dtype}")
        assert (scattered[3].shape, reduced[3].shape, exchanged[3].shape) == ((4, 0), (4 * world, 0), (world, 4, 0))
        assert [len(launches) for launches in names] == (
            [0, 0, 0] if world == 1 else [len(MIXED), 2 * len(MIXED), 1]
        ), names


def gather_in_place() -> tuple[list[bool], list[Tensor]]:
    """Gather parts that were written into their segments of the result. Return, for each result, whether no copy was
    made, and the results. A gathered part must be in `storage`; the part with dim None must be the input itself."""
    shapes, dtypes, dims = [(4, 6), (), (4, 3)], [torch.uint8, torch.float32, torch.float32], [0, None, 0]
    storage, own = collectives.room(shapes, dtypes, dims, dist.group.WORLD, worker.device())
    for part, shape, dtype in zip(own, shapes, dtypes, strict=True):
        part.copy_(mine(shape, dtype))
    whole = collectives.all_gather(own, dims, dist.group.WORLD, storage).wait()
    kept = [own[1] if room is None else room for room in storage]
    return [a.data_ptr() == b.data_ptr() for a, b in zip(whole, kept, strict=True)], list(whole)


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_written_into_its_segment_is_gathered_in_place(ranks, world):
    for rank, (same, (codes, shared, scales)) in enumerate(ranks(world).run(gather_in_place)):
        assert same == [True, True, True], "nothing is copied before or after"
        assert_bit_equal(codes, concatenated(world, (4, 6), torch.uint8, 0))
        assert_bit_equal(shared, of_rank(rank, (), torch.float32))
        assert_bit_equal(scales, concatenated(world, (4, 3), torch.float32, 0))


# Random sequences: all ranks draw the same operations, keep several operations in flight, and wait for them in any
# order.


def value(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Input of `rank` for operation `step`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def of_all(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.stack([value(rank, step, shape) for rank in range(dist.get_world_size())])


def in_order(x: Tensor) -> Tensor:
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total


def start_collective(kind: str, step: int, shared: Tensor) -> Callable[[], bool]:
    """Write the input of operation `step` into `shared` [R, R, 3] (R ranks), and start a collective that reads it. The
    returned function waits, and returns whether the result is correct."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    own = value(rank, step, (world, 3)).to(shared.device)
    everything = of_all(step, (world, 3))
    if kind == "gather":
        shared[rank] = own
        pending = collectives.all_gather((shared[rank],), (0,), group, [shared])
        return lambda: torch.equal(pending.wait()[0].cpu(), everything.flatten(0, 1))
    source = shared[0].copy_(own)
    if kind == "reduce_scatter":
        scattered = collectives.reduce_scatter(source, group)
        return lambda: torch.equal(scattered.wait().cpu(), in_order(everything)[rank : rank + 1])
    if kind == "all_reduce":
        reduced = collectives.all_reduce(source, group)
        return lambda: torch.equal(reduced.wait().cpu(), in_order(everything))
    exchanged = collectives.all_to_all((source,), group)
    return lambda: torch.equal(exchanged.wait()[0].cpu(), everything[:, rank])


def random_collectives(seed: int, steps: int) -> list[bool]:
    """Start `steps` random collectives, each on a random one of three buffers; return whether each result is correct. A
    buffer is written again only after the collective that reads it has finished."""
    draw, world = random.Random(seed), dist.get_world_size()
    buffers = [torch.zeros(world, world, 3, device=worker.device()) for _ in range(3)]
    pending: dict[int, Callable[[], bool]] = {}
    found = []
    for step in range(steps):
        free = draw.randrange(3)
        if free in pending:
            found.append(pending.pop(free)())
        kind = draw.choice(["gather", "reduce_scatter", "all_reduce", "all_to_all"])
        pending[free] = start_collective(kind, step, buffers[free])
        if draw.random() < 0.3:
            found.append(pending.pop(draw.choice(sorted(pending)))())
    return found + [wait() for wait in pending.values()]


@pytest.mark.parametrize("world", [2, 4])
def test_random_sequences_of_collectives_on_shared_buffers(ranks, world):
    for found in ranks(world).run(random_collectives, 7, 60):
        assert len(found) == 60 and all(found)
