"""The loss to beat: what a model reaches that sees one token back, fitted by counting.

A transformer whose attention does not work still learns this, so a validation loss below it shows that attention does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.shard import Shard

PIECE = 1 << 22  # tokens counted at once


def bigram_loss(train: Sequence[Shard], validation: Sequence[Shard], smoothing: float = 0.05) -> float:
    """Cross entropy on the validation tokens of the best model that sees one token back, in nats per token.

    Pair counts of the training tokens plus `smoothing` for every pair: of the values from 1 to 0.001 this one is best
    on the standard library, by less than 0.003. Memory is vocabulary squared, so it is for bytes.
    """
    counts = _pairs(train) + smoothing
    log_likelihood = np.log(counts / counts.sum(axis=1, keepdims=True))
    pairs = _pairs(validation)
    return float(-(pairs * log_likelihood).sum() / pairs.sum())


def _pairs(shards: Sequence[Shard]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each token follows each other one, int64 [vocabulary, vocabulary], counted in pieces of a shard."""
    size = max(shard.vocabulary for shard in shards)
    counts = np.zeros(size * size, np.int64)
    for shard in shards:
        for first in range(0, len(shard.tokens) - 1, PIECE):
            tokens = shard.tokens[first : first + PIECE + 1].astype(np.int64)
            counts += np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size)
    return counts.reshape(size, size)
