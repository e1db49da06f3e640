"""Joined operands of siblings (linears with the same x), so that dx = sum over i of dy_i @ w_i is one GEMM.

The kernel table may have a kernel for the joined operands; otherwise the siblings run separate GEMMs.

    A [M, N_1 + N_2 + ...]    dy_i rowwise       parts of dy_1, then parts of dy_2, ...
    B [K, N_1 + N_2 + ...]    w_i columnwise     parts of w_1, then parts of w_2, ...

No data is copied: a joined operand refers to the codes and scales of each sibling. A GEMM can run in chunks of rows of A, as
with any other operand.
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
    """Format of `count` operands in the format `of`, joined along the contraction.

    The parts are the parts of all siblings, one sibling after the other; `payload` is only the payload of the first sibling."""

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
        """Yield the operand of each sibling."""
        size = len(self.of.parts)
        for i in range(0, len(q.parts), size):
            yield self.of.wrap(q.parts[i : i + size])

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([each.dequantize(dtype) for each in self.split(q)], 1)


@table.remembered
def together(a: Format, b: Format, count: int, device: str) -> tuple[Siblings, Siblings] | None:
    """Return the formats of the joined operands A and B of `count` siblings. Each sibling has operands of the formats `a` and
    `b`.

    The result is None if `count` is 1, if a format has a method `gemm`, or if the kernel table has no kernel for the joined
    formats on `device`, one of `dlp.kernels.table.DEVICES`."""
    pair = Siblings(a, count), Siblings(b, count)
    kinds = pair[0].gemm_kind, pair[1].gemm_kind
    named = any(kinds in entry.formats for entry in table.gemm_entries(device))
    return pair if count > 1 and named and own_gemm(a, b) is None else None


def as_one(operands: Sequence[Any], gemms: Sequence[Gemm], dtype: torch.dtype) -> tuple[Sequence[Any], Sequence[Gemm]]:
    """Join the operands and the GEMMs of siblings: return one operand A and one GEMM with a result of `dtype`, each in a list.

    The arguments are returned unchanged if `together` returns None, if an operand is still being gathered, if siblings have
    different formats, or if a GEMM has a bias, an `accumulate` tensor or an `alpha` other than 1.
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
