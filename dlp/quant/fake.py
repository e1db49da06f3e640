"""Fake quantization: operands are cast by a quantizer and decoded again, and stored in high precision.

Decoded values may always be transposed, so that the columnwise operand is the transposed rowwise operand, and dgrad and wgrad
read the same values as fprop. If the quantizer clips, the operand has a second part, a mask of clipped values. The gradient of
clipped values is 0; for all other values the rounding is ignored in backward (straight-through estimator). Values and mask are
sharded in the same way, so that tp, token shards and FSDP need no special code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.quant.quantizer import Quantizer, Wrapped, caps_of, offers
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import Format, HighPrecision, Part, QuantizedTensor, Shape


@dataclass(frozen=True)
class Decoded(HighPrecision):
    """Format of values that were cast to the format `inner` and decoded, in the dtype of x. With `clips`, a second part
    `clipped` is the mask of clipped values, bool in the same shape."""

    inner: Format
    clips: bool = False
    keeps_source = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"decoded {self.inner.name}"

    @cached_property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return (*HighPrecision.parts, Part("clipped", torch.bool, rows=0, contraction=1))[: 1 + self.clips]

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        return self.inner.block

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return (shape,) * len(self.parts)

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        return QuantizedTensor(self, tuple([part.t() for part in q.parts]))


_format = cache(Decoded)


@dataclass(frozen=True)
class FakeQuantized(Wrapped):
    """Quantizer that casts by `inner` and decodes the codes to the dtype of x. Both orientations of an operand must have the
    same quantizer.

    For the cast, x is zero-padded to complete blocks. Raises ValueError for an `inner` with delayed scales, or whose format has
    a transform (`Format.basis`).
    """

    def __post_init__(self) -> None:
        fmt = self.inner.format
        if caps_of(self.inner).slot is not None:
            raise ValueError(
                f"{self.inner} has delayed scales, and fake quantization needs current scales: choose a quantizer with current "
                f"scales"
            )
        if fmt.basis:
            raise ValueError(
                f"{fmt.name} holds rotated values, and fake quantization needs unrotated values: disable the rotation"
            )

    @cached_property
    def format(self) -> Format:
        return _format(self.inner.format, offers(self.inner, "clipped"))

    def observe(self, x: Tensor) -> Tensor | None:
        return self.inner.observe(self.inner.format.padded(x))

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, **how: Any
    ) -> QuantizedTensor:
        padded = self.inner.format.padded(x)
        parts = [self.inner.cast(padded, amax, **how).dequantize(x.dtype)]
        if self.format.clips:
            clipping: Any = self.inner
            parts.append(clipping.clipped(padded, amax))
        return self.format.fill(out, *[part[: x.shape[0], : x.shape[1]].contiguous() for part in parts])


def is_fake(recipe: Recipe) -> bool:
    """Return whether a recipe has a `FakeQuantized` quantizer."""
    return any(isinstance(quantizer, FakeQuantized) for quantizer in recipe.quantizers())


def deployed(recipe: Recipe) -> Recipe:
    """Return the recipe with each `FakeQuantized` of x and w replaced by its inner quantizer, so that fprop multiplies codes. A
    recipe without fake quantization is returned unchanged."""

    def codes(quantizer: Quantizer) -> Quantizer:
        return quantizer.inner if isinstance(quantizer, FakeQuantized) else quantizer

    return replace(recipe, x=recipe.x.mapped(codes), w=recipe.w.mapped(codes)) if is_fake(recipe) else recipe
