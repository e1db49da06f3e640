"""Overlap strategies: who schedules a GEMM together with its collective.

A strategy decides *when* transfers and GEMMs are issued. It gets a GEMM as a value (`Gemm`, run on rows of A), so it may
run it once or chunk by chunk; it never knows a format or a layer.
Strategies are modules of this folder with a module-level `STRATEGY`; `load("serial")` imports one by name. One that works in
chunks takes their number behind its name, `load("chunked:2")`, by its function `in_chunks`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Pending, ReduceCodec
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

Sent = list[tuple[torch.dtype, int]]  # bytes, by the dtype they are of


class Work(NamedTuple):
    """GEMMs and the one transfer that goes with them, for a model of how long they take; times in seconds.

    gathers     the transfer brings the rows that they read; else it takes those of the last one's result
    gemms       of each GEMM alone, over the rows of all ranks
    columns     of their results
    rows        of a rank's shard, or of its share of the result
    format      of the operand whose rows they read
    ranks       of the group
    transfer    from this rank to all others, and the other way round at the same time
    meeting     what each transfer takes beside its bytes
    processors  multiprocessors of a rank; 0: not known
    behind      what this rank does next, which a reduction may run under
    """

    gathers: bool
    gemms: tuple[float, ...]
    columns: tuple[int, ...]
    rows: int
    format: Format
    ranks: int
    transfer: float
    meeting: float
    processors: int = 0
    behind: float = 0.0


class Gather(Protocol):
    """An operand on its way from all ranks; may be consumed any number of times."""

    def gemm(self, gemm: Gemm) -> Tensor:
        """The GEMM over all rows of the gathered operand."""
        ...

    def whole(self) -> QuantizedTensor:
        """The gathered operand."""
        ...


class Lease(Protocol):
    """`mine`: this rank's segment of the storage that a gather arrives in. Quantize into it, then start the gather; what
    is kept for longer does not belong there, since it would keep the whole storage alive."""

    @property
    def mine(self) -> QuantizedTensor: ...

    def gather(self) -> Gather:
        """Start gathering: `mine` has been written."""
        ...


class Overlap(Protocol):
    """`launches_only`: through a transport it only launches, in order, so that a direction can be captured. `calls_only`: so it
    can without one, since what sends is called between launches."""

    name: str
    launches_only: bool
    calls_only: bool

    @property
    def at_once(self) -> Overlap:
        """The one for what is read when all of it has arrived, of which nothing needs to arrive before the rest."""
        ...

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> Lease:  # fmt: skip
        """Storage to gather shards of `shape` [rows, contraction] along `dim`; `dtype`: of high-precision parts."""
        ...

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> Gather:
        """Start gathering this rank's shard along the operand's dimension `dim` (0 rows, 1 contraction)."""
        ...

    def gemm_reduce(
        self,
        a: QuantizedTensor,
        gemm: Gemm,
        group: ProcessGroup,
        *,
        reduce: str,
        dtype: torch.dtype,
        codec: ReduceCodec,
    ) -> Pending[Tensor]:
        """Run the GEMM, round its result to `dtype` and sum it over the group: reduce "all", or "scatter" over rows."""
        ...

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        """What one rank of so many sends in `gemm_reduce` of a result like y [M, N], which needs no memory. A strategy
        that does not say it works all the same; what its layers send is then not compared with a plan."""
        ...

    def seconds(self, work: Work) -> float:
        """How long a rank is at work and what is `behind`, by a model. A strategy that does not say it is never chosen by
        `overlap = "auto"` for a layer that was not measured."""
        ...


def names() -> list[str]:
    """The strategies that exist: the modules of this folder, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(chosen: str) -> Overlap:
    """The strategy of that name, as "chunked" or "chunked:2"; ValueError for an unknown one, or a number it cannot have."""
    name, colon, chunks = chosen.partition(":")
    if name == "auto":
        raise ValueError(
            f"overlap = 'auto' becomes a strategy in dlp.convert, which knows tokens and times; name one: {', '.join(names())}"
        )
    if name not in names():
        raise ValueError(f"unknown overlap strategy {name!r:.60}: the strategies are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    strategy: Overlap = module.STRATEGY
    if not colon:
        return strategy
    if not hasattr(module, "in_chunks"):
        raise ValueError(f"overlap strategy {chosen!r}: {name} does not work in chunks; set {name!r}")
    if not (chunks.isascii() and chunks.isdigit() and int(chunks)):
        raise ValueError(
            f"overlap strategy {chosen!r}: expected a number of chunks >= 1 behind {name}:, got {chunks!r}"
        )
    strategy = module.in_chunks(int(chunks))
    return strategy
