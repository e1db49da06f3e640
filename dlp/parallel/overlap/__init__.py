"""Overlap strategies: schedules of a GEMM together with its collective.

A strategy decides *when* transfers and GEMMs are issued. A GEMM is a value (`Gemm`, run on rows of A), so a strategy
may run the GEMM once or chunk by chunk. A strategy knows no formats and no layers.
Strategies are modules of this folder with a module-level `STRATEGY`; `load("serial")` imports a strategy by name. The number of
chunks follows the name, as in `load("chunked:2")`, if the strategy has a function `in_chunks`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Pending, ReduceCodec
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor

Sent = list[tuple[torch.dtype, int]]  # bytes, by dtype of the values


class Work(NamedTuple):
    """GEMMs and one transfer, for a model of their duration; times in seconds.

    gathers     the transfer delivers rows of A; else the transfer sends rows of the last GEMM's result
    gemms       time of each GEMM alone, over the rows of all ranks
    columns     columns of the results
    rows        rows of a rank's shard, or of a rank's share of the result
    format      format of operand A
    ranks       number of ranks
    transfer    time from this rank to all others, with the reverse direction at the same time
    meeting     latency of each transfer
    processors  SMs of a rank; 0: not known
    behind      time of this rank's next work, which can overlap a reduction
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
    """An operand that is being gathered from all ranks. It may be used any number of times."""

    def gemm(self, gemm: Gemm) -> Tensor:
        """Run the GEMM over all rows of the gathered operand."""
        ...

    def whole(self) -> QuantizedTensor:
        """Return the gathered operand."""
        ...


class Lease(Protocol):
    """`mine`: this rank's segment of the storage of a gather. Quantize into `mine`, then start the gather.

    Tensors that live longer must not be stored there, since they would keep the whole storage alive."""

    @property
    def mine(self) -> QuantizedTensor: ...

    def gather(self) -> Gather:
        """Start the gather; `mine` has been written."""
        ...


class Overlap(Protocol):
    """Overlap strategy.

    `launches_only`: with a transport, the strategy only launches, in order, so that a pass can be captured.
    `calls_only`: a pass
    can also be captured without a transport, since sends are calls between launches."""

    name: str
    launches_only: bool
    calls_only: bool

    @property
    def at_once(self) -> Overlap:
        """Strategy for a consumer that needs the complete operand."""
        ...

    def lease(
        self, fmt: Format, shape: tuple[int, int], dim: int, group: ProcessGroup, *, dtype: torch.dtype,
        device: torch.device,
    ) -> Lease:  # fmt: skip
        """Allocate storage for gathering shards of `shape` [rows, contraction] along `dim`; `dtype`: dtype of
        high-precision parts."""
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
        """Run the GEMM, round the result to `dtype`, and sum it over the group: reduce "all", or "scatter" over rows."""
        ...

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        """Bytes that a rank sends in `gemm_reduce` of a result like y [M, N], which may be a meta tensor.

        A strategy without this method works as well, but the bytes of its layers are not compared with a plan."""
        ...

    def seconds(self, work: Work) -> float:
        """Predicted time in seconds of this rank for the work and `behind`.

        `overlap = "auto"` never chooses a strategy without this method for a layer that was not measured."""
        ...


@cache
def names() -> tuple[str, ...]:
    """Names of all strategies: the modules of this folder, sorted; listed once, since each row of a table has names."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(chosen: str) -> Overlap:
    """Load a strategy by name, such as "chunked" or "chunked:2". Raises ValueError for an unknown name or an invalid
    number."""
    name, colon, chunks = chosen.partition(":")
    if name == "auto":
        raise ValueError(
            f"overlap = 'auto' becomes a strategy when a model is converted or a layer is constructed; name one: "
            f"{', '.join(names())}"
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
