"""Loss of counting models, as a baseline for training: a bigram model, or a unigram model for large vocabularies.

A transformer with broken attention still learns the bigram, so a validation loss below the bigram loss shows that attention
works. The bigram table has vocabulary^2 entries, so it is used for bytes. Larger vocabularies use the unigram, which uses no
context: a model that has learned anything has a lower loss.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.data.shard import Shard, Tokens

BYTES = 257  # size of the vocabulary of bytes with a separator
LARGEST_TABLE = 512  # symbols: 2 MB of counts
PIECE = 1 << 22  # tokens counted at once
MOST = 1 << 28  # maximum number of counted tokens of a split; a larger split is sampled in pieces at equal distances

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Baseline(NamedTuple):
    """Loss of a counting model on the validation tokens, in `unit`."""

    name: str
    loss: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name} loss of the same split: {self.loss:.3f} {self.unit}"


def unit_of(shards: Sequence[Shard]) -> str:
    """Unit of a loss on these tokens."""
    return "nats/byte" if _symbols(shards) == BYTES else "nats/token"


def baseline(train: Sequence[Shard], validation: Sequence[Shard]) -> Baseline:
    """The bigram model for bytes and other small vocabularies, else the unigram model."""
    both, unit = (*train, *validation), unit_of((*train, *validation))
    if _symbols(both) > LARGEST_TABLE:
        return Baseline("unigram", unigram_loss(train, validation), unit)
    return Baseline("byte-bigram" if unit == "nats/byte" else "bigram", bigram_loss(train, validation), unit)


def bigram_loss(train: Sequence[Shard], validation: Sequence[Shard], smoothing: float = 0.05) -> float:
    """Cross entropy on the validation tokens of the best model with one token of context, in nats per token.

    The model uses pair counts of the training tokens plus `smoothing` for every pair; among values from 1 to 0.001 the default
    is best on the standard library, by less than 0.003. Memory is 8 bytes x vocabulary^2.
    """
    size = _symbols((*train, *validation))
    pairs, seen = (_count(shards, size * size, lambda t: t[:-1] * size + t[1:]) for shards in (validation, train))
    counts = seen.reshape(size, size) + smoothing
    log_likelihood = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-(pairs.reshape(size, size) * log_likelihood).sum() / pairs.sum())


def unigram_loss(train: Sequence[Shard], validation: Sequence[Shard], smoothing: float = 1.0) -> float:
    """Cross entropy on the validation tokens under the frequencies of the training tokens, in nats per token. Memory is 8 bytes
    x vocabulary."""
    size = _symbols((*train, *validation))
    tokens, seen = (_count(shards, size, lambda t: t[1:]) for shards in (validation, train))
    counts = seen + smoothing
    return float(-(tokens * np.log(counts / counts.sum())).sum() / tokens.sum())


def _symbols(shards: Sequence[Shard]) -> int:
    return max(shard.vocabulary for shard in shards)


def _count(shards: Sequence[Shard], size: int, numbers: Any) -> Counts:
    """Counts of the values of `numbers(tokens)`, all below `size`, in the pieces of shards, int64 [size]."""
    counts = np.zeros(size, np.int64)
    for piece in _pieces(shards):
        counts += np.bincount(numbers(piece.astype(np.int64)), minlength=size)
    return counts


def _pieces(shards: Sequence[Shard]) -> Iterator[Tokens]:
    """Pieces of the tokens of shards; each piece ends with the first token of the next piece."""
    places = [(shard, first) for shard in shards for first in range(0, len(shard.tokens) - 1, PIECE)]
    for shard, first in places[:: max(1, -(-len(places) * PIECE // MOST))]:
        yield shard.tokens[first : first + PIECE + 1]
