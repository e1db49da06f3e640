"""Operands of siblings as one operand, so that dx = sum over i of dy_i @ w_i is one GEMM where the kernel table has a kernel.

    A [M, N_1 + N_2 + ...]    dy_i rowwise       parts of dy_1, then parts of dy_2, ...
    B [K, N_1 + N_2 + ...]    w_i columnwise     parts of w_1, then parts of w_2, ...

Nothing is copied: each sibling keeps its codes and its scale. Rows may be cut, as in any other operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import table
from dlp.quant.gemm import Gemm, own_gemm
from dlp.quant.tensor import Format, Part, QuantizedTensor


@dataclass(frozen=True)
class Siblings(Format):
    """Format of an operand whose contraction is the contractions of `count` operands in the format `of`, one after the other.
    The payload is the payload of the first sibling."""

    of: Format
    count: int

    @property
    def name(self) -> str:
        return f"{self.of.name} of {self.count} siblings"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return self.of.parts * self.count

    @property
    def block(self) -> tuple[int, int]:
        return self.of.block

    @property
    def multiple(self) -> tuple[int, int]:
        return self.of.multiple

    @property
    def element(self) -> str:
        return self.of.element

    @property
    def gemm_kind(self) -> str:
        return f"{self.of.gemm_kind}_siblings"

    def split(self, q: QuantizedTensor) -> Iterator[QuantizedTensor]:
        """The operand of each sibling."""
        size = len(self.of.parts)
        for i in range(0, len(q.parts), size):
            yield self.of.wrap(q.parts[i : i + size])

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([each.dequantize(dtype) for each in self.split(q)], 1)


@table.remembered
def together(a: Format, b: Format, count: int, device: str) -> tuple[Siblings, Siblings] | None:
    """Return the formats of both operands of one GEMM of `count` siblings with operands in the formats `a` and `b`. None
    without such a GEMM in the kernel table for `device`, one of DEVICES, and if there are no siblings."""
    pair = Siblings(a, count), Siblings(b, count)
    kinds = pair[0].gemm_kind, pair[1].gemm_kind
    named = any(kinds in entry.formats for entry in table.gemm_entries(device))
    return pair if count > 1 and named and own_gemm(a, b) is None else None


def as_one(operands: Sequence[Any], gemms: Sequence[Gemm], dtype: torch.dtype) -> tuple[Sequence[Any], Sequence[Gemm]]:
    """Return the operands and GEMMs of siblings as one operand and one GEMM into `dtype`, if the kernel table has a kernel for
    the pair of formats; else the arguments.

    Operands that are being gathered, a factor, a bias and an accumulator leave the GEMMs as they are.
    """
    first = gemms[0]
    for a, gemm in zip(operands, gemms, strict=True):
        plain = gemm.alpha == 1.0 and gemm.bias is None and gemm.accumulate is None
        if not (
            plain
            and isinstance(a, QuantizedTensor)
            and (a.format, gemm.b.format) == (operands[0].format, first.b.format)
        ):
            return operands, gemms
    formats = together(operands[0].format, first.b.format, len(gemms), table.device_of(operands[0].payload))
    if formats is None:
        return operands, gemms
    joined_a = formats[0].wrap([part for each in operands for part in each.parts])
    joined_b = formats[1].wrap([part for gemm in gemms for part in gemm.b.parts])
    return [joined_a], [replace(first, b=joined_b, out_dtype=dtype)]
