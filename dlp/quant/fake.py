"""Fake quantization: operands that hold, in high precision, the values that the codes of another quantizer stand for.

Such an operand may be transposed, whatever its scales span, so the columnwise one is the rowwise one: dgrad and wgrad read the
values that fprop reads. Where the quantizer clips, the operand has a second part that says where: no gradient passes there,
elsewhere it passes straight through the rounding. Both parts move alike, so tp, token shards and FSDP need nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.quant.quantizer import Quantizer, Wrapped, caps_of, offers
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import Format, HighPrecision, Part, QuantizedTensor, Shape


@dataclass(frozen=True)
class Decoded(HighPrecision):
    """Values of x after a cast to the format `inner` and back, in the dtype of x; with `clips` also `clipped`, bool of their
    shape."""

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


_format = cache(Decoded)  # one of its kind


@dataclass(frozen=True)
class FakeQuantized(Wrapped):
    """Casts to `inner`, then back to the dtype of x. Both orientations of an operand have the same values: use it for both.

    Rows that end in a partial block are cast with zeros appended. Raises ValueError for a quantizer with delayed scales, and
    for one whose values are rotated.
    """

    def __post_init__(self) -> None:
        fmt = self.inner.format
        if caps_of(self.inner).slot is not None:
            raise ValueError(
                f"{self.inner} scales by history, and fake quantization by what is at hand: choose current scales"
            )
        if fmt.basis:
            raise ValueError(
                f"{fmt.name} rotates what it holds, and fake quantization multiplies values: leave the rotation out"
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
    """Whether any operand of a recipe is fake-quantized."""
    return any(isinstance(quantizer, FakeQuantized) for quantizer in recipe.quantizers())


def deployed(recipe: Recipe) -> Recipe:
    """The recipe whose forward a fake-quantized one imitates: codes in the place of decoded values. Any other recipe is
    returned as it is."""

    def codes(quantizer: Quantizer) -> Quantizer:
        return quantizer.inner if isinstance(quantizer, FakeQuantized) else quantizer

    def both(operand: Operand) -> Operand:
        return Operand(codes(operand.rowwise), codes(operand.columnwise))

    return replace(recipe, x=both(recipe.x), w=both(recipe.w)) if is_fake(recipe) else recipe
