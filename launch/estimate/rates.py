"""Measured speeds of a board: GEMMs by recipe and size, attention, memory, gaps between kernels, links.

A file of `launch/estimate/tables`, written by `python -m launch.measure`, holds the speeds of one board. It names a table of
`dlp.parallel.auto`, written by `python -m dlp.parallel.tune`, from which the speeds of GEMMs and of mapped memory are read.
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
NEAREST = 3  # number of measured sizes from which the rate of another size is interpolated


class AttentionRate(NamedTuple):
    """FLOP/s of causal attention, forward and backward, for one sequence length and head_dim."""

    sequence: int
    head_dim: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """Measured speeds of one board. Bytes count reads and writes.

    board           key of `launch.common.devices.BOARDS`
    memory          bytes per second of pointwise kernels and casts
    optimizer       bytes per second of the fused AdamW
    norm            bytes per second of the gradient norm
    gap             seconds per kernel in a CUDA graph of tiny kernels, counted as the gap between any two kernels
    replay          seconds between two replays of a CUDA graph
    host            seconds per kernel that the host needs to launch a step without a CUDA graph, including Python
    host_collective seconds per NCCL collective over tp that the host needs in such a step
    host_spread     time of the slowest measured host, as a multiple of `host` and `host_collective`
    nccl            bytes per second that a rank sends in an NCCL collective within a host, without concurrent computation
    nccl_slowdown   relative loss of speed of computation while NCCL kernels run
    link            bytes per second that a rank sends over tp by mapped memory
    meeting         latency of a transfer over tp by mapped memory, in seconds
    attention       speeds of attention, for each measured sequence length and head_dim
    gemms           (recipe, GEMM, (M, N, K) on a rank, FLOP/s) of each measured GEMM
    about           device, date, torch version and command of the measurement
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
    gemms: tuple[tuple[str, str, Sizes, float], ...]
    about: Mapping[str, Any]

    def gemm_rate(self, recipe: Recipe, gemm: str, sizes: Sizes) -> float:
        """Return the FLOP/s of a GEMM, interpolated between the nearest measured sizes (`dlp.parallel.auto.gemm_rate`).

        Args:
            recipe: Recipe of the layer.
            gemm: "fprop", "dgrad" or "wgrad".
            sizes: (M, N, K) on a rank.

        Raises:
            ValueError: The table has no GEMM of this recipe.
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
        """Return the seconds of a GEMM; arguments as in `gemm_rate`."""
        return 2.0 * prod(sizes) / self.gemm_rate(recipe, gemm, sizes)

    def attention_rate(self, sequence: int, head_dim: int) -> AttentionRate:
        """Return the measured rates for the nearest sequence length and head_dim."""
        return min(
            self.attention,
            key=lambda rate: abs(log(rate.head_dim / head_dim)) * 4 + abs(log(rate.sequence / sequence)),
        )


def boards() -> list[str]:
    """Return the boards that have a table in `TABLES`."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


@cache
def rates_of(board: str) -> Rates:
    """Read the rates of a board under a steady load.

    Tables hold the speeds of GEMMs and attention in short bursts. These are multiplied by `sustained` of the table, the share
    that remains when the GPU lowers its clocks at the power limit.

    Raises:
        ValueError: There is no table of this board.
    """
    path = TABLES / f"{board}.json"
    if not path.exists():
        raise ValueError(
            f"no table of step times for {board!r}; dlp ships those of {', '.join(boards())}: name one of these, or write "
            f"{path} with python -m launch.measure"
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
