"""Weights that FSDP manages and does not cut, since dp_shard is one rank: whole here, and cast once a step as others are.

What a layer holds may be FSDP's copy of them, so the step boundary reads the parameters that the optimizer steps on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlp.parallel.casts import Cast
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.fsdp2 import Managed
from dlp.parallel.weight.local import CastWeights
from dlp.parallel.weight.values import Values
from dlp.parallel.weight.ways import keeps_source


class UnshardedCasts(CastWeights):
    """The operands of one layer. `records`: of its weights."""

    def __init__(self, records: Sequence[Managed]) -> None:
        super().__init__()
        self._records = records

    def stored(self) -> list[Tensor]:
        return [record.stored for record in self._records]

    def casts(self, bound: BoundSpec, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Cast]:
        """None where FSDP's copies are what the layer reads, and where they are rounded otherwise than for it."""
        if keeps_source(bound.spec.recipe.w) or any(record.dtype not in (None, dtype) for record in self._records):
            return []
        return super().casts(bound, weights, dtype, values)
