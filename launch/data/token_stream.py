"""Tokens of each step, which depend only on the step and the settings, not on the number of ranks.

The tokens of each shard are divided into windows of `sequence` inputs; the targets of a window are the next tokens. Windows
ignore the boundaries of documents: a target may be the separator or the first token of the next document. Every epoch reads all
windows in a pseudo-random order. Step t reads places t x global_batch to (t + 1) x global_batch - 1 of the infinite sequence of
epochs:

    place  = step x global_batch + micro x (micro_batch x world) + rank x micro_batch + row
    window = permuted(place mod windows), keyed by (seed, place div windows)

With several sources, each period of 4096 places gives every source a number of places in proportion to its weight, in a
pseudo-random order. Every source has epochs of its own.

The position in the data is therefore determined by the step, and every mesh reads the same global batch. A Feistel network
computes the permutation of single places, so it needs no array of the length of the data, and does not depend on the version of
numpy.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.data.shard import Shard
from launch.models.attention import Documents

Indices = np.ndarray[Any, np.dtype[np.uint64]]
SETTINGS = {  # key of `state_dict` -> setting that determines it, for messages
    "data": "[data] path", "weights": "[data] path", "sequence": "[train] sequence",
    "global_batch": "[train] global_batch", "seed": "[train] seed",
}  # fmt: skip
PERIOD = 4096  # number of places over which several sources are mixed in exact proportions
ROUNDS = 4  # rounds of the Feistel network
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def _mix(values: Indices) -> Indices:
    """Mix the bits of 64-bit numbers by the finalizer of splitmix64: every input bit affects every output bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def permute(places: Indices, count: int, key: Sequence[int]) -> Indices:
    """Apply a pseudo-random permutation of range(count), selected by `key`, to `places` (uint64, each < count).

    A Feistel network permutes range(4^n) for the smallest 4^n >= count. A result outside of range(count) is permuted again
    until it is inside, after fewer than four permutations on average; the result is a permutation of range(count).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    result = places.copy()
    outside = np.ones(len(places), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & low
        for number in range(ROUNDS):
            salt = _mix(np.array([(GOLDEN * (number + 1)) & MASK], np.uint64))
            for part in key:
                salt = _mix(salt ^ np.uint64(part & MASK))
            left, right = right, left ^ (_mix(right ^ salt) & low)
        result[outside] = left << half | right
        outside = result >= count
    return result


@dataclass(frozen=True)
class Source:
    """Windows of one folder.

    folder    the folder
    windows   number of windows
    first     number of the first window among the windows of all folders
    share     number of places of this folder in each `PERIOD`
    """

    folder: Path
    windows: int
    first: int
    share: int


def shares(weights: Mapping[Path, float]) -> list[int]:
    """Return the number of places of each source among `PERIOD`, by largest remainders. Raises ValueError for a source
    without a place."""
    exact = [PERIOD * weight / sum(weights.values()) for weight in weights.values()]
    found = [math.floor(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: found[i] - exact[i])
    for i in by_rest[: PERIOD - sum(found)]:
        found[i] += 1
    for folder, share in zip(weights, found, strict=True):
        if not share:
            raise ValueError(
                f"[data] path: {folder} would get less than one of {PERIOD} sequences; raise the weight of "
                f"{weights[folder]:g}, or leave this source out"
            )
    return found


@lru_cache(maxsize=4)
def turns(shares: tuple[int, ...], key: tuple[int, int]) -> tuple[Indices, Indices]:
    """Return, for each place of a period, the number of its source, and the number of earlier places of the same source in the
    period; uint64 [PERIOD] each.

    shares: number of places of each source; key: selects the pseudo-random order.
    """
    whose = np.repeat(np.arange(len(shares), dtype=np.uint64), shares)
    whose = whose[permute(np.arange(PERIOD, dtype=np.uint64), PERIOD, (*key, len(shares)))]
    before = np.empty_like(whose)
    for number, share in enumerate(shares):
        before[whose == number] = np.arange(share)
    return whose, before


class TokenStream:
    """Batches of windows by step. The object has no position: methods get the step as an argument.

    weights: weight of each folder; None or one entry: a single source. split: name of the split in messages. In the methods,
    `rank` and `world` are index and number of data-parallel ranks; tp ranks read the same windows. Raises ValueError if a
    folder has no complete window.
    """

    def __init__(
        self, shards: Sequence[Shard], *, split: str, sequence: int, global_batch: int, micro_batch: int, seed: int,
        weights: Mapping[Path, float] | None = None,
    ) -> None:  # fmt: skip
        self.shards = shards
        self.sequence, self.global_batch, self.micro_batch, self.seed = sequence, global_batch, micro_batch, seed
        self.digest = hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()
        self._ends = np.cumsum([(len(shard.tokens) - 1) // sequence for shard in shards])
        self.num_windows = int(self._ends[-1])
        self.sources = self._sources(weights or {}, split)

    def _sources(self, weights: Mapping[Path, float], split: str) -> list[Source]:
        """Return one source per folder if there are several weights, else one source for all shards."""
        of_folder = {folder: [s.path.parent for s in self.shards].count(folder) for folder in weights}
        given = zip(of_folder.items(), shares(weights), strict=True) if len(weights) > 1 else []
        counts = [(folder, count, share) for (folder, count), share in given]
        found, begin, first = [], 0, 0
        for folder, count, share in counts or [(self.shards[0].path.parent, len(self.shards), 1)]:
            mine, begin = self.shards[begin : begin + count], begin + count
            windows = sum((len(shard.tokens) - 1) // self.sequence for shard in mine)
            if windows == 0:
                tokens = max(len(shard.tokens) for shard in mine)
                raise ValueError(
                    f"{folder}: the {tokens} tokens of the largest {split} shard are fewer than one sequence of "
                    f"{self.sequence} and its last target; add text, or set a smaller [train] sequence"
                )
            found.append(Source(folder, windows, first, share))
            first += windows
        return found

    def describe(self, steps: int) -> Iterator[str]:
        """Yield a log line per source, if there are several: its share of the sequences, and its epochs in `steps` steps."""
        for source in self.sources if len(self.sources) > 1 else ():
            part = source.share / PERIOD
            epochs = part * steps * self.global_batch / source.windows
            yield f"data: {source.folder}: {part:.1%} of the sequences, {epochs:.2g} epochs in {steps} steps"

    def order(self, step: int) -> Indices:
        """Return the numbers of the windows of one step, uint64 [global_batch]."""
        places = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.uint64)
        numbers, drawn = self._drawn(places)
        windows = np.empty_like(places)
        for number, source in enumerate(self.sources):
            epochs, inside = np.divmod(drawn, np.uint64(source.windows))
            for epoch in np.unique(epochs[numbers == number]):
                chosen = (numbers == number) & (epochs == epoch)
                windows[chosen] = permute(inside[chosen], source.windows, (self.seed, int(epoch))) + np.uint64(
                    source.first
                )
        return windows

    def _drawn(self, places: Indices) -> tuple[Any, Indices]:
        """Return the number of the source of each place, and the number of earlier places of the same source."""
        if len(self.sources) == 1:
            return np.zeros_like(places), places
        given = tuple(source.share for source in self.sources)
        numbers, before = np.empty_like(places), np.empty_like(places)
        periods, inside = np.divmod(places, np.uint64(PERIOD))
        for period in np.unique(periods):
            chosen = periods == period
            whose, had = turns(given, (self.seed, int(period)))
            numbers[chosen] = whose[inside[chosen]]
            before[chosen] = had[inside[chosen]] + period * np.array(given, np.uint64)[whose[inside[chosen]]]
        return numbers, before

    def batch(self, step: int, micro: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, targets) of a microbatch of one rank, int64 [micro_batch, sequence] each, on the CPU."""
        windows = (self._window(window) for window in self._chosen(step, micro, rank, world))
        rows = [shard.tokens[first : first + self.sequence + 1] for shard, first in windows]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def documents(self, step: int, micro: int, rank: int, world: int) -> Documents:
        """Return the boundaries of documents in a microbatch of one rank, on the CPU."""
        begins = [self._begins(*self._window(window)) for window in self._chosen(step, micro, rank, world)]
        offsets = np.concatenate([row * self.sequence + each for row, each in enumerate(begins)])
        starts = np.append(offsets, self.micro_batch * self.sequence)
        positions = np.arange(starts[-1]) - np.repeat(offsets, np.diff(starts))
        return Documents(
            torch.from_numpy(positions).view(self.micro_batch, self.sequence), torch.from_numpy(starts.astype(np.int32))
        )

    def _chosen(self, step: int, micro: int, rank: int, world: int) -> list[int]:
        """Return the numbers of the windows of a microbatch of one rank."""
        first = (micro * world + rank) * self.micro_batch
        assert 0 <= rank < world and first + self.micro_batch <= self.global_batch, "outside the global batch"
        return [int(window) for window in self.order(step)[first : first + self.micro_batch]]

    def _window(self, window: int) -> tuple[Shard, int]:
        """Return the shard of a window, and the index of its first token in the shard. A window never spans two shards."""
        shard = int(np.searchsorted(self._ends, window, side="right"))
        return self.shards[shard], (window - (int(self._ends[shard - 1]) if shard else 0)) * self.sequence

    def _begins(self, shard: Shard, first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions at which documents begin in the window that starts at token `first` of a shard. The first entry
        is always 0."""
        inside = slice(*np.searchsorted(shard.starts, (first + 1, first + self.sequence)))
        return np.concatenate([[0], shard.starts[inside] - first])

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and hashes that determine the order of the data, except the step."""
        return {
            "data": self.digest,
            "sequence": self.sequence,
            "global_batch": self.global_batch,
            "seed": self.seed,
            **({"weights": [source.share for source in self.sources]} if len(self.sources) > 1 else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that `state`, from the `state_dict` of a saved run, gives the same order of data. Raises ValueError if not."""
        for key, now in self.state_dict().items():
            if state.get(key) != now:
                before, now = (f"{each:.12}" if key == "data" else each for each in (state.get(key, ""), now))
                raise ValueError(
                    f"the checkpoint was made with {key} {before} and this run has {now}, so it would not continue in the "
                    f'order of the data; restore {SETTINGS[key]}, or start again with [checkpoint] resume = "none"'
                )
