"""Speeds of one board: GEMMs by recipe and size, attention, memory, kernels' gaps and links.

A file of `launch/estimate/tables` holds the speeds of one board. The times of GEMMs and of the link of tp come from the tables
of overlap strategies (`dlp.parallel.auto`), which `python -m dlp.parallel.tune` measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log, prod
from pathlib import Path
from typing import Any, NamedTuple

from dlp.parallel import auto
from dlp.parallel.auto import Sizes
from dlp.quant.recipe import Recipe

TABLES = Path(__file__).parent / "tables"
NEAREST = 3  # number of measured sizes between which a rate is interpolated


class AttentionRate(NamedTuple):
    """Floating-point operations per second of causal attention, forward and backward, at one sequence length."""

    sequence: int
    head_dim: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """Measured speeds of one board. Bytes count reads and writes.

    board           a name of `launch.common.devices`
    memory          bytes per second of pointwise kernels and casts
    optimizer       bytes per second of the fused AdamW
    norm            bytes per second of the gradient norm
    gap             seconds between the end of a kernel and the start of the next kernel of a CUDA graph
    replay          seconds between two replays of a graph
    host            seconds that the host needs per kernel of a step without a graph, Python included
    host_collective the same per collective of NCCL between ranks of tp
    host_spread     the time of the slowest measured host, as a multiple of these two
    nccl            bytes per second that a rank sends by NCCL's ring inside a host, alone
    nccl_slowdown   share of the speed of computation that is lost while NCCL's kernels run
    link, meeting   bytes per second and seconds per transfer between ranks of tp that map each other's memory
    """

    board: str
    memory: float
    optimizer: float
    norm: float
    gap: float
    replay: float
    host: float
    host_collective: float
    host_spread: float
    nccl: float
    nccl_slowdown: float
    link: float
    meeting: float
    attention: tuple[AttentionRate, ...]
    gemms: tuple[tuple[str, str, Sizes, float], ...]  # recipe, GEMM, (M, N, K) of a rank, operations per second
    about: Mapping[str, Any]

    def gemm_rate(self, recipe: Recipe, gemm: str, sizes: Sizes) -> float:
        """Operations per second of a GEMM: the geometric mean of the nearest measured sizes, weighted by their distance.

        Raises:
            ValueError: No GEMM of this recipe was measured.
        """
        near = self._measured(str(recipe), gemm) or self._measured(recipe.name, gemm)
        if not near:
            known = ", ".join(sorted({name for name, *_ in self.gemms}))
            raise ValueError(
                f"the table of {self.board} has no times of {recipe}, but of {known}: choose one of these, or measure "
                f"it with python -m dlp.parallel.tune --recipes {recipe.name}"
            )
        rate = auto.gemm_rate(near, sizes, neighbors=NEAREST)
        assert rate is not None, "near is not empty"
        return rate

    def _measured(self, recipe: str, gemm: str) -> list[tuple[Sizes, float]]:
        return [(size, rate) for name, which, size, rate in self.gemms if (name, which) == (recipe, gemm)]

    def gemm(self, recipe: Recipe, gemm: str, sizes: Sizes) -> float:
        """Seconds of a GEMM of (M, N, K)."""
        return 2.0 * prod(sizes) / self.gemm_rate(recipe, gemm, sizes)

    def attention_rate(self, sequence: int, head_dim: int) -> AttentionRate:
        """The rates at the nearest measured sequence length and head_dim."""
        return min(
            self.attention,
            key=lambda rate: abs(log(rate.head_dim / head_dim)) * 4 + abs(log(rate.sequence / sequence)),
        )


def boards() -> list[str]:
    """The boards that have a table."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


@cache
def rates_of(board: str) -> Rates:
    """The rates of a board in a run.

    Tables hold the speeds of GEMMs and attention in short bursts. `sustained` of a table is the share that remains under a
    steady load, when a GPU lowers its clocks at the power limit.

    Raises:
        ValueError: dlp ships no table of this board.
    """
    path = TABLES / f"{board}.json"
    if not path.exists():
        raise ValueError(
            f"no table of step times for {board!r}; dlp ships those of {', '.join(boards())}: name one of these, or measure "
            f"one with python -m launch.measure --board {board}"
        )
    found = json.loads(path.read_text())
    times = auto.load(auto.TABLES / found.pop("overlap_table"))
    sustained, about = found.pop("sustained"), found.pop("about")
    attention = tuple(
        AttentionRate(row["sequence"], row["head_dim"], row["forward"] * sustained, row["backward"] * sustained)
        for row in found.pop("attention")
    )
    gemms = tuple(_gemms(times.rows, sustained))
    return Rates(
        board=board, link=times.speed, meeting=times.meeting, attention=attention, gemms=gemms, about=about, **found
    )


def _gemms(rows: Sequence[auto.Row], sustained: float) -> list[tuple[str, str, Sizes, float]]:
    return [
        (row.key[-1], gemm, row.sizes, 2.0 * prod(row.sizes) / seconds * sustained)
        for row in rows
        for gemm, seconds in row.gemms.items()
        if seconds > 0
    ]
