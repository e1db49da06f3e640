"""Which tokens a step reads: a fixed list of windows, whatever the number of ranks.

The tokens of all shards are cut into windows of `sequence` inputs and their targets (the next token; documents follow
each other, and a target may be the separator or the first byte of the next document: the model learns where documents
end, and no position is wasted). Every epoch has its own pseudo-random order of windows, and step t reads places
t x global_batch ... (t + 1) x global_batch of the endless sequence of epochs:

    place  = step x global_batch + micro x (micro_batch x world) + rank x micro_batch + row
    window = permuted(place mod windows), keyed by (seed, place div windows)

So the position is the step and nothing else, and any mesh reads the same global batch. The permutation is computed
place by place (a Feistel network): no array as long as the data, and the same order with every version of numpy.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from launch.attention import Documents
from launch.shard import Shard

Indices = np.ndarray[Any, np.dtype[np.uint64]]
ROUNDS = 4
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def _mix(values: Indices) -> Indices:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def permute(places: Indices, count: int, key: Sequence[int]) -> Indices:
    """Where a pseudo-random permutation of range(count), chosen by `key`, sends `places` (uint64, each < count).

    A Feistel network permutes the smallest 4^n >= count; a place sent outside is sent on until it falls inside, which
    takes fewer than four tries on average and is a permutation again.
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


class TokenStream:
    """Batches of windows by step. Holds no position: the caller's step is the position.

    Raises ValueError if no shard holds one window; `split` is what the message calls them. `rank` and `world` below are
    data-parallel ones: ranks that differ only along tp read the same windows.
    """

    def __init__(
        self, shards: Sequence[Shard], *, split: str, sequence: int, global_batch: int, micro_batch: int, seed: int
    ) -> None:
        self.shards = shards
        self.sequence, self.global_batch, self.micro_batch, self.seed = sequence, global_batch, micro_batch, seed
        self.digest = hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()
        self._ends = np.cumsum([(len(shard.tokens) - 1) // sequence for shard in shards])
        self.num_windows = int(self._ends[-1])
        if self.num_windows == 0:
            tokens = max(len(shard.tokens) for shard in shards)
            raise ValueError(
                f"{shards[0].path.parent}: the {tokens} tokens of the largest {split} shard are fewer than one sequence of "
                f"{sequence} and its last target; add text, or set a smaller [train] sequence"
            )

    def order(self, step: int) -> Indices:
        """The windows of one step, uint64 [global_batch]."""
        epochs, places = np.divmod(
            np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.uint64),
            np.uint64(self.num_windows),
        )
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(places[chosen], self.num_windows, (self.seed, int(epoch)))
        return windows

    def batch(self, step: int, micro: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of one rank's microbatch, both int64 [micro_batch, sequence] on the CPU."""
        windows = (self._window(window) for window in self._chosen(step, micro, rank, world))
        rows = [shard.tokens[first : first + self.sequence + 1] for shard, first in windows]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def documents(self, step: int, micro: int, rank: int, world: int) -> Documents:
        """Where documents lie in that microbatch's tokens, on the CPU."""
        begins = [self._begins(*self._window(window)) for window in self._chosen(step, micro, rank, world)]
        offsets = np.concatenate([row * self.sequence + each for row, each in enumerate(begins)])
        starts = np.append(offsets, self.micro_batch * self.sequence)
        positions = np.arange(starts[-1]) - np.repeat(offsets, np.diff(starts))
        return Documents(
            torch.from_numpy(positions).view(self.micro_batch, self.sequence), torch.from_numpy(starts.astype(np.int32))
        )

    def _chosen(self, step: int, micro: int, rank: int, world: int) -> list[int]:
        """The windows of one rank's microbatch."""
        first = (micro * world + rank) * self.micro_batch
        assert 0 <= rank < world and first + self.micro_batch <= self.global_batch, "outside the global batch"
        return [int(window) for window in self.order(step)[first : first + self.micro_batch]]

    def _window(self, window: int) -> tuple[Shard, int]:
        """The shard of a window and its first token there; windows do not cross shards."""
        shard = int(np.searchsorted(self._ends, window, side="right"))
        return self.shards[shard], (window - (int(self._ends[shard - 1]) if shard else 0)) * self.sequence

    def _begins(self, shard: Shard, first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where documents begin in the window from token `first`, counted from there; its own beginning is the first."""
        inside = slice(*np.searchsorted(shard.starts, (first + 1, first + self.sequence)))
        return np.concatenate([[0], shard.starts[inside] - first])

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on apart from the step."""
        return {
            "data": self.digest,
            "sequence": self.sequence,
            "global_batch": self.global_batch,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that a saved run read the same windows in the same order; raises ValueError naming what differs."""
        for key, now in self.state_dict().items():
            if state[key] != now:
                raise ValueError(
                    f"the checkpoint was made with {key} {state[key]} and this run has {now}, so it would not continue "
                    f'in the order of the data; restore that setting, or start anew with [checkpoint] resume = "none"'
                )
