"""Overlap strategies: who schedules a GEMM together with its collective.

A strategy decides *when* transfers and GEMMs are issued. It gets a GEMM as a value (`Gemm`, run on rows of A), so it may
run it once, chunk by chunk, or hand it to a kernel that waits for its data inside; it never knows a format or a layer.
Strategies are modules of this folder with a module-level `STRATEGY`; `load("serial")` imports one by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm.collectives import Pending
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import QuantizedTensor


class Gather(Protocol):
    """An operand on its way from all ranks; may be consumed any number of times."""

    def gemm(self, gemm: Gemm) -> Tensor:
        """The GEMM over all rows of the gathered operand."""
        ...

    def whole(self) -> QuantizedTensor:
        """The gathered operand."""
        ...


class Overlap(Protocol):
    name: str

    def gather(self, a: QuantizedTensor, dim: int, group: ProcessGroup) -> Gather:
        """Start gathering this rank's shard along the operand's dimension `dim` (0 rows, 1 contraction)."""
        ...

    def gemm_reduce(
        self, a: QuantizedTensor, gemm: Gemm, group: ProcessGroup, *, reduce: str, wire: torch.dtype
    ) -> Pending[Tensor]:
        """Run the GEMM and sum its result over the group, carried in `wire`: reduce "all", or "scatter" over rows."""
        ...


def names() -> list[str]:
    """The strategies that exist: the modules of this folder, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Overlap:
    """The strategy of that name; ValueError for an unknown one."""
    if name not in names():
        raise ValueError(f"unknown overlap strategy {name!r}: the strategies are {', '.join(names())}")
    strategy: Overlap = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy
