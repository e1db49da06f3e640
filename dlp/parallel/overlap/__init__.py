"""Overlap strategies: schedules of a GEMM together with its collective.

A strategy defines *when* transfers and GEMMs are issued. A GEMM is a callable object (`Gemm`) that takes rows of A, so a
strategy can run the GEMM once or chunk by chunk. Strategies do not depend on formats or layers.

Each strategy is a module of this folder with an attribute `STRATEGY`; `load("serial")` imports the module by name. If the
module has a function `in_chunks`, the name may end with a number of chunks, as in `load("chunked:2")`.
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

Sent = list[tuple[torch.dtype, int]]  # bytes that a rank sends, by dtype of the values


class Work(NamedTuple):
    """GEMMs and one transfer whose time a strategy predicts. All times are in seconds.

    gathers     True: the transfer gathers A. False: the transfer reduces the result of the last GEMM
    gemms       time of each GEMM without a transfer, over the rows of all ranks
    columns     number of columns of the result of each GEMM
    rows        number of rows of A (or of the result) that belong to one rank
    format      format of operand A
    ranks       number of ranks
    transfer    time in which a rank sends its data to all other ranks, and receives theirs at the same time, without latency
    meeting     latency of a transfer
    processors  number of SMs of a GPU; 0: not known
    behind      time of the GEMM that runs next (wgrad after dgrad), under which a reduction can run
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
    """An operand that is being gathered from all ranks. Both methods may be called any number of times."""

    def gemm(self, gemm: Gemm) -> Tensor:
        """Run the GEMM over all rows of the gathered operand."""
        ...

    def whole(self) -> QuantizedTensor:
        """Wait for the gather, and return the gathered operand."""
        ...


class Lease(Protocol):
    """Output buffer of a gather. `mine`: this rank's segment, into which the caller casts before `gather`.

    Tensors that are needed after the pass must not be stored in `mine`, since they would keep the complete buffer alive."""

    @property
    def mine(self) -> QuantizedTensor: ...

    def gather(self) -> Gather:
        """Start the gather. `mine` must have been written before."""
        ...


class Overlap(Protocol):
    """Overlap strategy.

    launches_only   whether, with mapped memory, the strategy only launches kernels, in a fixed order, so that a pass can be
                    captured
    calls_only      whether, without mapped memory, transfers are calls between launches, so that a pass can be captured as well
    """

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
        """Allocate the output buffer for a gather of shards that have this `shape` [rows, contraction].

        fmt     format of the shards
        dim     dimension along which shards concatenate: 0 rows, 1 contraction
        dtype   dtype of parts that the format keeps in the dtype of the source
        """
        ...

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> Gather:
        """Start gathering this rank's shard `a`. Shards concatenate along `dim`: 0 rows, 1 contraction."""
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
        """Run the GEMM, round the result to `dtype`, and sum it over the group.

        reduce   "all": each rank gets the sum; "scatter": each rank gets its rows of the sum
        codec    format in which contributions are sent
        """
        ...

    def sent(self, y: Tensor, ranks: int, *, reduce: str, codec: ReduceCodec) -> Sent:
        """Return the bytes that a rank sends in `gemm_reduce` with a result of the shape and dtype of y [M, N], which may be a
        meta tensor.

        The method is optional: without it, the bytes of layers with this strategy are not compared with the plan."""
        ...

    def seconds(self, work: Work) -> float:
        """Predict the time in seconds until the GEMMs, the transfer and the next GEMM (`work.behind`) are done.

        The method is optional: without it, `overlap = "auto"` chooses the strategy only for layers that were measured."""
        ...


@cache
def names() -> tuple[str, ...]:
    """Return the names of all strategies, sorted. The folder is listed only once, since reading a table of times calls `load`
    for every entry."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(chosen: str) -> Overlap:
    """Load a strategy by name, such as "chunked" or "chunked:2". Raises ValueError for an unknown name, for "auto", and for
    a number of chunks that is invalid or that the strategy does not support."""
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
        raise ValueError(f"overlap strategy {chosen!r}: expected a number of chunks >= 1 after {name}:, got {chunks!r}")
    strategy = module.in_chunks(int(chunks))
    return strategy
