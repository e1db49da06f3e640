"""Loss of a bigram or unigram model that is estimated by counting, as a baseline for the validation loss of a run.

A transformer with broken attention still learns bigrams, so a validation loss below the bigram loss shows that attention works.
The bigram table has vocabulary^2 entries, so bigrams are used only for small vocabularies such as bytes. For larger
vocabularies the baseline is a unigram model, which uses no context: any model that learns has a lower loss.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.data.shard import Shard, Tokens

BYTES = 257  # size of the vocabulary of bytes and the separator
LARGEST_TABLE = 512  # largest vocabulary for a bigram table, which then has 2 MB
PIECE = 1 << 22  # number of tokens that are counted at once
MOST = 1 << 28  # maximum number of counted tokens of a split; of a larger split, evenly spaced pieces are counted

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Baseline(NamedTuple):
    """Loss of a counting model on the validation tokens.

    name   "byte-bigram", "bigram" or "unigram"
    loss   mean cross entropy
    unit   "nats/byte" or "nats/token"
    """

    name: str
    loss: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name} loss of the same split: {self.loss:.3f} {self.unit}"


def unit_of(shards: Sequence[Shard]) -> str:
    """Return the unit of a loss on the tokens of these shards: "nats/byte" or "nats/token"."""
    return "nats/byte" if _symbols(shards) == BYTES else "nats/token"


def baseline(train: Sequence[Shard], validation: Sequence[Shard]) -> Baseline:
    """Return the loss of a bigram model if the vocabulary is at most `LARGEST_TABLE`, else of a unigram model."""
    both, unit = (*train, *validation), unit_of((*train, *validation))
    if _symbols(both) > LARGEST_TABLE:
        return Baseline("unigram", unigram_loss(train, validation), unit)
    return Baseline("byte-bigram" if unit == "nats/byte" else "bigram", bigram_loss(train, validation), unit)


def bigram_loss(train: Sequence[Shard], validation: Sequence[Shard], smoothing: float = 0.05) -> float:
    """Return the cross entropy of a bigram model on the validation tokens, in nats per token.

    The model is estimated from the counts of pairs in the training tokens, plus `smoothing` for every pair. The loss hardly
    depends on `smoothing`. Memory: 8 bytes x vocabulary^2.
    """
    size = _symbols((*train, *validation))
    pairs, seen = (_count(shards, size * size, lambda t: t[:-1] * size + t[1:]) for shards in (validation, train))
    counts = seen.reshape(size, size) + smoothing
    log_likelihood = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-(pairs.reshape(size, size) * log_likelihood).sum() / pairs.sum())


def unigram_loss(train: Sequence[Shard], validation: Sequence[Shard], smoothing: float = 1.0) -> float:
    """Return the cross entropy of a unigram model on the validation tokens, in nats per token.

    The model is estimated from the counts of the training tokens, plus `smoothing` for every token. Memory: 8 bytes x
    vocabulary.
    """
    size = _symbols((*train, *validation))
    tokens, seen = (_count(shards, size, lambda t: t[1:]) for shards in (validation, train))
    counts = seen + smoothing
    return float(-(tokens * np.log(counts / counts.sum())).sum() / tokens.sum())


def _symbols(shards: Sequence[Shard]) -> int:
    return max(shard.vocabulary for shard in shards)


def _count(shards: Sequence[Shard], size: int, numbers: Any) -> Counts:
    """Count the values of `numbers(piece)` over all pieces of the shards; return int64 [size]. All values must be below
    `size`."""
    counts = np.zeros(size, np.int64)
    for piece in _pieces(shards):
        counts += np.bincount(numbers(piece.astype(np.int64)), minlength=size)
    return counts


def _pieces(shards: Sequence[Shard]) -> Iterator[Tokens]:
    """Yield pieces of at most `PIECE` + 1 tokens. If there are more than `MOST` tokens, yield evenly spaced pieces with about
    `MOST` tokens in total. Adjacent pieces of a shard overlap in one token, so that no pair is missed."""
    places = [(shard, first) for shard in shards for first in range(0, len(shard.tokens) - 1, PIECE)]
    for shard, first in places[:: max(1, -(-len(places) * PIECE // MOST))]:
        yield shard.tokens[first : first + PIECE + 1]
