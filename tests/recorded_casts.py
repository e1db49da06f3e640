"""Recipe that records every operand that a layer casts, by tensor and orientation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dlp.quant.quantizer import Wrapped
from dlp.quant.recipe import OPERANDS, Operand, Recipe
from dlp.quant.tensor import QuantizedTensor


@dataclass(frozen=True)
class RecordingQuantizer(Wrapped):
    """Quantizer that also appends each operand that `cast` returns to the list `seen`."""

    seen: list[QuantizedTensor] = field(compare=False)

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        made = self.inner.cast(x, amax, **more)
        self.seen.append(made)
        return made


Seen = dict[tuple[str, str], list[QuantizedTensor]]


def recording(recipe: Recipe) -> tuple[Recipe, Seen]:
    """Return a recipe that records its casts, and the lists of recorded operands by (tensor, orientation). A columnwise
    operand that is transposed from the rowwise operand is not cast, so it is not recorded."""
    seen: Seen = {(name, way): [] for name in OPERANDS for way in ("rowwise", "columnwise")}
    operands = {
        name: Operand(
            *(
                RecordingQuantizer(getattr(getattr(recipe, name), way), seen[name, way])
                for way in ("rowwise", "columnwise")
            )
        )
        for name in OPERANDS
    }
    return replace(recipe, **operands), seen
