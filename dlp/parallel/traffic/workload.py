"""What a step adds to a plan, and the words in which its bytes are foretold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.comm import observer
from dlp.comm.mesh import AXES, DP_SHARD, ParallelDims
from dlp.quant.tensor import SHARED, Format


class Unforeseen(ValueError):
    """What a step sends cannot be told from its plan: a format or a strategy of a user does not say it."""


@contextmanager
def foretelling(what: str) -> Iterator[None]:
    """Inside, formats, quantizers and strategies are asked about `what`. Raises Unforeseen where one has no answer."""
    try:
        yield
    except Exception as error:  # whatever a user's own code does
        raise Unforeseen(f"the bytes of {what} cannot be foretold: {error or type(error).__name__}") from error


class Sent(NamedTuple):
    """What bytes are planned by; see `dlp.comm.observer.Key`."""

    group: str
    layer: str
    direction: str
    precision: str


Traffic = Mapping[Sent, int]


@dataclass(frozen=True)
class Workload:
    """What a step adds to a plan.

    sizes          ranks of dp_replicate, dp_shard, tp
    tokens         B*S of a microbatch
    microbatches   of one rank in a step
    dtype          of activations; `dtypes`: of the x of single layers, by name, where it is another
    weight_dtype   of weights as embeddings read them and FSDP gathers those that travel as values
    reduce_dtype   of gradients that FSDP reduces
    units          FSDP's units by module name, "" for the root; () without FSDP
    gather         whether FSDP gathers weights as their recipes quantize them
    weight_cache   as of `attach`
    reductions     of FSDP's gradients in a step: 1, or one a microbatch
    grad_wire      what carries FSDP's gradients over dp_shard (see `dlp.parallel.wires`); None: FSDP's own reduction
    recomputed     modules whose forward runs again in backward
    amax_group     an axis or "world" that agrees on every scale; None: the style table decides
    dp_shard_rank  whose part of uneven shards is meant
    """

    sizes: Mapping[str, int]
    tokens: int
    microbatches: int = 1
    dtype: torch.dtype = torch.bfloat16
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    weight_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    units: tuple[str, ...] = ()
    gather: bool = True
    weight_cache: str = "step"
    reductions: int = 1
    grad_wire: str | None = None
    recomputed: tuple[str, ...] = ()
    amax_group: str | None = None
    dp_shard_rank: int = 0

    @cached_property
    def dims(self) -> ParallelDims:
        return ParallelDims(*(self.sizes.get(axis, 1) for axis in AXES))

    def ranks(self, group: str) -> int:
        return self.dims.size(group)

    def named(self, group: str) -> str:
        return self.dims.name_of(group)

    def unit_of(self, name: str) -> str:
        """The innermost of FSDP's units that a parameter lies in."""
        return next(module for module in _around(name) if module in self._unit_names)

    def recomputes(self, name: str) -> bool:
        """Whether a module or parameter lies in a module whose forward runs again in backward."""
        return any(module in self._recomputed_names for module in _around(name))

    @cached_property
    def _unit_names(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def _recomputed_names(self) -> frozenset[str]:
        return frozenset(self.recomputed)

    def shard(self, shape: Sequence[int], *, padded: bool = False) -> tuple[int, ...]:
        """What FSDP leaves on this rank of a parameter of this shape: rows in equal parts, the last ones shorter."""
        first, *rest = shape
        rows = -(-first // self.ranks(DP_SHARD))
        here = rows if padded else min(max(first - rows * self.dp_shard_rank, 0), rows)
        return here, *rest


def _around(name: str) -> Iterator[str]:
    """A module or parameter and all modules around it, from the inside out: "a.b.c", "a.b", "a", ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def nothing(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def moved(fmt: Format, shape: Sequence[int], dim: int, dtype: torch.dtype) -> int:
    """Bytes of the parts of an operand of this shape that move when it is gathered along `dim`."""
    shapes = fmt.part_shapes((shape[0], shape[1]))
    return sum(
        prod(size) * (part.dtype or dtype).itemsize
        for part, size in zip(fmt.parts, shapes, strict=True)
        if part.moves_along(dim) is not SHARED
    )


def precision_of(fmt: Format, dtype: torch.dtype) -> str:
    """What an operand of values of `dtype` travels as."""
    return observer.dtype_name(dtype) if fmt.keeps_source else fmt.name
